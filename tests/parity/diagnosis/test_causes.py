"""Root causes that are one bug are listed once, and have the line of the code that is wrong."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare
from jaxformer.parity.diagnosis.causes import merge_causes
from jaxformer.parity.findings import RootCause

QUERIES = RootCause("rope.py:3", "reference.py:10", "interleaved, not halves", 0.1)
KEYS = dataclasses.replace(QUERIES, torch_source="reference.py:11", error=0.3)


def test_a_line_that_is_wrong_in_one_way_is_one_cause():
    (found,) = merge_causes([QUERIES, KEYS])
    assert found == dataclasses.replace(QUERIES, places=2, error=0.3)


def test_what_is_not_known_to_be_one_bug_stays_apart():
    unknown = [dataclasses.replace(cause, diagnosis="") for cause in (QUERIES, KEYS)]
    without_a_line = [dataclasses.replace(cause, jax_source="") for cause in (QUERIES, KEYS)]
    backward = dataclasses.replace(QUERIES, stage="backward")
    other = dataclasses.replace(QUERIES, diagnosis="another base")
    causes = [QUERIES, backward, other, *unknown, *without_a_line]
    assert merge_causes(causes) == causes


class Decaying(torch.nn.Module):
    """Sums what it has seen, which fades."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        state, made = torch.zeros_like(x[:, 0]), []
        for token in self.layer(x).unbind(1):
            state = torch.tanh(0.5 * state + token)
            made.append(state / (1 + state.square()))
        return torch.stack(made, 1)


@pytest.mark.usefixtures("settings_of_jax")
def test_a_bug_in_a_step_of_a_scan_has_a_line_of_the_step():
    def port(params, x):
        tokens = x @ params["layer.weight"].T + params["layer.bias"]

        def step(state, token):
            state = jnp.tanh(0.6 * state + token)
            return state, state / (1 + state * state)

        _, made = jax.lax.scan(step, jnp.zeros_like(tokens[:, 0]), tokens.swapaxes(0, 1))
        return made.swapaxes(0, 1)

    reference = Decaying()
    arrays = {name: p.detach().numpy() for name, p in reference.named_parameters()}
    x = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
    report = compare(reference, (port, arrays), x, backward=False)
    assert report.root_causes
    first = port.__code__.co_firstlineno
    for cause in report.root_causes:
        assert int(cause.jax_source.rpartition(":")[2]) in (first + 4, first + 5)


class Experts(torch.nn.Module):
    """Each expert is called with the tokens that chose it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router = torch.nn.Linear(8, 3, bias=False)
        self.up = torch.nn.Parameter(torch.randn(3, 12, 8))
        self.down = torch.nn.Parameter(torch.randn(3, 8, 12))

    def forward(self, x):
        x = x.flatten(0, 1)
        weights, chosen = torch.softmax(self.router(x), -1).max(-1)
        made = torch.zeros_like(x)
        for expert in range(3):
            tokens = (chosen == expert).nonzero()[:, 0]
            inner = torch.nn.functional.silu(x[tokens] @ self.up[expert].T)
            made[tokens] = weights[tokens, None] * (inner @ self.down[expert].T)
        return made


@pytest.mark.usefixtures("settings_of_jax")
def test_a_bug_in_experts_that_are_written_densely_has_its_line():
    def port(params, x):
        probabilities = jax.nn.softmax(x @ params["router.weight"].T)
        weights = probabilities * (probabilities == probabilities.max(-1, keepdims=True))
        inner = jnp.einsum("btd,efd->btef", x, params["up"])
        inner = jax.nn.gelu(inner)  # not silu
        made = jnp.einsum("btef,edf->bted", inner, params["down"])
        return jnp.einsum("bted,bte->btd", made, weights).reshape(-1, 8)

    reference = Experts()
    arrays = {name: p.detach().numpy() for name, p in reference.named_parameters()}
    x = np.random.default_rng(0).normal(size=(2, 7, 8)).astype(np.float32)
    report = compare(reference, (port, arrays), x, backward=False)
    (cause,) = report.root_causes
    assert int(cause.jax_source.rpartition(":")[2]) == port.__code__.co_firstlineno + 4
    text = "the candidate computes the tanh form of GELU; the reference computes SiLU"
    assert cause.diagnosis == text
