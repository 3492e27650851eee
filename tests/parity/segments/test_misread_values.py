"""A right value that one of its readers must not read: that reader is wrong, and no other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare

pytestmark = pytest.mark.usefixtures("settings_of_jax")

SILU = jax.nn.silu


class ThreeReaders(torch.nn.Module):
    """Three projections read one activation, as those of a time embedding do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.time, *self.others = (torch.nn.Linear(6, 6) for _ in range(4))
        self.others = torch.nn.ModuleList(self.others)

    def forward(self, x, time):
        embedding = self.time(time)
        for linear in self.others:
            x = torch.tanh(x + linear(torch.nn.functional.silu(embedding)))
        return x


def linear(params, name, x):
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def right(params, x, time):
    embedding = linear(params, "time", time)
    for name in ("others.0", "others.1", "others.2"):
        x = jnp.tanh(x + linear(params, name, SILU(embedding)))
    return x


def forgotten(params, x, time):
    embedding = linear(params, "time", time)
    x = jnp.tanh(x + linear(params, "others.0", SILU(embedding)))
    x = jnp.tanh(x + linear(params, "others.1", embedding))  # planted
    return jnp.tanh(x + linear(params, "others.2", SILU(embedding)))


def test_a_forgotten_activation_of_one_reader_is_one_cause():
    reference = ThreeReaders()
    params = {n: p.detach().numpy() for n, p in reference.named_parameters()}
    inputs = [np.random.default_rng(n).normal(size=(4, 6)).astype(np.float32) for n in (0, 1)]
    assert compare(reference, (right, params), inputs).verdict in ("exact", "rounding")
    report = compare(reference, (forgotten, params), inputs)
    (cause,) = report.root_causes
    assert cause.diagnosis == "the candidate computes the identity; the reference computes SiLU"
    path, _, line = cause.jax_source.rpartition(":")
    with open(path) as file:
        assert "planted" in file.read().splitlines()[int(line) - 1]


class Edges(torch.nn.Module):
    """Features of pairs of points, of which two axes have one size (Wang et al., 2019, eq. 8)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.edge = torch.nn.Conv2d(6, 8, 1)

    def forward(self, x):
        centre = x[:, :, None].expand(-1, -1, x.shape[1], -1)
        pairs = torch.cat([x[:, None] - centre, centre], -1).permute(0, 3, 1, 2)
        return torch.tanh(self.edge(pairs)).max(-1)[0]


def edges(params, x):
    centre = jnp.broadcast_to(x[:, :, None], (*x.shape[:2], *x.shape[1:]))
    pairs = jnp.concatenate([centre, x[:, None] - centre], -1)  # exchanged
    made = pairs @ params["edge.weight"][..., 0, 0].T + params["edge.bias"]
    return jnp.tanh(made).max(2).swapaxes(1, 2)


def test_what_is_put_right_has_its_axes_in_the_order_of_its_parts():
    reference = Edges()
    params = {n: p.detach().numpy() for n, p in reference.named_parameters()}
    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype(np.float32)
    (cause,) = compare(reference, (edges, params), x).root_causes
    path, _, line = cause.jax_source.rpartition(":")
    with open(path) as file:
        assert "exchanged" in file.read().splitlines()[int(line) - 1]
