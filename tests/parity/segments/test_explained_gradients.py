"""Gradients that a wrong value of the forward pass explains are no causes of their own."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare

pytestmark = pytest.mark.usefixtures("settings_of_jax")

X = np.random.default_rng(0).normal(size=(3, 5, 8))


class Attention(torch.nn.Module):
    """A norm whose result enters two products."""

    def __init__(self):
        super().__init__()
        self.down, self.norm = torch.nn.Linear(8, 4), torch.nn.LayerNorm(4)
        self.up = torch.nn.Linear(4, 8)

    def forward(self, x):
        h = self.norm(self.down(x))
        return self.up(torch.softmax(h @ h.transpose(1, 2), -1) @ h)


class Block(torch.nn.Module):
    """Two branches, each added to what it reads a norm of, or that itself."""

    def __init__(self):
        super().__init__()
        self.norm, self.attention = torch.nn.LayerNorm(8), Attention()
        self.gate, self.out = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.out(torch.sigmoid(self.gate(x)))


class Model(torch.nn.Module):
    """Two blocks between two layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def forward(params, x, bug):
    def linear(name, x):
        return x @ params[f"{name}.weight"].T + params[f"{name}.bias"][None, None]

    def norm(name, x):
        centred = x - x.mean(-1, keepdims=True)
        made = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return made * params[f"{name}.weight"][None, None] + params[f"{name}.bias"][None, None]

    def block(name, x):
        n = norm(f"{name}.norm", x)
        h = linear(f"{name}.attention.down", n)
        h = norm(f"{name}.attention.norm", h)
        h = jax.nn.softmax(h @ h.swapaxes(1, 2)) @ h
        x = (n if bug else x) + linear(f"{name}.attention.up", h)
        return x + linear(f"{name}.out", jax.nn.sigmoid(linear(f"{name}.gate", x)))

    x = linear("first", x)
    for number in range(2):
        x = jax.checkpoint(partial(block, f"blocks.{number}"))(x)
    return linear("last", x)


@pytest.mark.parametrize("bug", ["wrong input", ""])
def test_a_wrong_value_has_no_wrong_gradients_beside_it(bug):
    reference = Model()
    params = {name: one.detach().numpy() for name, one in reference.named_parameters()}
    report = compare(reference, (lambda params, x: forward(params, x, bug), params), X)
    assert report.verdict == ("bug" if bug else "rounding")
    assert {cause.stage for cause in report.root_causes} == ({"forward"} if bug else set())
    # What a checkpoint computes again is put right again: what is left are two ways of a gradient.
    explained = "gradients differ in 2 places beside the causes above"
    assert (explained in report.remarks) == bool(bug)
