"""A wrong function that serves queries and keys is named, not the product of the two."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare

pytestmark = pytest.mark.usefixtures("settings_of_jax")

X = np.random.default_rng(0).normal(size=(2, 5, 8))
HEADS, WIDTH, CACHE = 2, 4, 7
ANGLES = np.arange(5)[:, None] * [1.0, 0.1]


class Attention(torch.nn.Module):
    """Queries and keys are rotated, and their products scaled."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
        cos, sin = (torch.as_tensor(made(ANGLES)) for made in (np.cos, np.sin))

        def rotate(y):
            a, b = y.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        scores = rotate(q) @ rotate(k).transpose(2, 3) * WIDTH**-0.5
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def port(params, x, sign, is_cached):
    def linear(name, x):
        return x @ params[f"{name}.weight"].T + params[f"{name}.bias"][None, None]

    def rotate(y):
        cos, sin = jnp.cos(ANGLES)[None, :, None], jnp.sin(ANGLES)[None, :, None]
        a, b = jnp.split(y, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + sign * a * sin], -1)

    def kept(y):
        cache = jnp.zeros((2, CACHE, HEADS, WIDTH), y.dtype)
        return jax.lax.dynamic_update_slice(cache, y, (0, 0, 0, 0)) if is_cached else y

    q, k, v = jnp.moveaxis(linear("qkv", x).reshape(2, 5, 3, HEADS, WIDTH), 2, 0)
    q, k, v = rotate(q) * WIDTH**-0.5, kept(rotate(k)), kept(v)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    is_seen = jnp.arange(k.shape[1])[None] <= jnp.arange(5)[:, None]
    scores = jnp.where(is_seen[None, None], scores, -jnp.inf)
    made = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return linear("out", made.reshape(2, 5, 8))


@pytest.mark.tier("full")
@pytest.mark.parametrize("is_cached", [False, True])
def test_a_rotation_of_queries_and_keys_is_named(is_cached):
    reference = Attention()
    params = {name: one.detach().numpy() for name, one in reference.named_parameters()}
    for sign, verdict in ((1, "rounding"), (-1, "bug")):
        candidate = (lambda params, x, sign=sign: port(params, x, sign, is_cached)), params
        report = compare(reference, candidate, X)
        assert report.verdict == verdict
        for cause in report.root_causes:
            path, _, line = cause.jax_source.rpartition(":")
            assert "b * cos + sign * a * sin" in Path(path).read_text().splitlines()[int(line) - 1]
