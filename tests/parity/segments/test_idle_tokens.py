"""Tokens that may attend to none: code bases mask them in different ways, and all are right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare

pytestmark = pytest.mark.usefixtures("settings_of_jax")


class AddedMask(torch.nn.Module):
    """A causal attention whose mask is added; texts are padded to their left."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(6, 18)

    def forward(self, x, mask):
        length = x.shape[1]
        allowed = torch.ones(length, length, dtype=torch.bool).tril() & (mask[:, None, None] > 0)
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)
        scores = q @ k.transpose(-1, -2) + torch.where(allowed, 0.0, -1e30)
        return (scores.softmax(-1) @ v)[:, 0]


class UnnamedMask(AddedMask):
    def forward(self, x, kept):
        return super().forward(x, kept)


@pytest.mark.parametrize("kind", [AddedMask, UnnamedMask])
@pytest.mark.parametrize("factor", [1, 2])
def test_tokens_that_may_attend_to_none_are_masked_in_another_way(kind, factor):
    """A sum sends gradients back through their scores, a selection none: neither is wrong."""
    torch.manual_seed(0)
    reference = kind()

    @jax.custom_vjp
    def scaled(x):
        return x

    scaled.defvjp(lambda x: (x, None), lambda _, g: (factor * g,))

    def attend(params, x, mask):
        length = x.shape[1]
        allowed = jnp.tril(jnp.ones((length, length), bool)) & (mask[:, None, None] > 0)
        q, k, v = jnp.split((x @ params["w"] + params["b"])[:, None], 3, -1)
        scores = jnp.where(allowed, scaled(q @ k.swapaxes(-1, -2)), -1e30)
        return (jax.nn.softmax(scores, -1) @ v)[:, 0]

    params = {
        "w": reference.qkv.weight.detach().numpy().T, "b": reference.qkv.bias.detach().numpy()
    }  # fmt: skip
    x = np.random.default_rng(0).normal(size=(2, 7, 6)).astype(np.float32)
    mask = np.ones((2, 7), int)
    mask[0, :3] = 0
    report = compare(reference, (attend, params), [x, mask])
    assert (report.verdict == "bug") == (factor == 2), str(report)
    assert any("may attend to none" in r for r in report.remarks) == (kind is UnnamedMask)
