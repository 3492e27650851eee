"""What ``jax.shard_map`` and ``jax.pmap`` run on one device is what they call."""

import re
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxformer.errors import UsageError
from jaxformer.parity import compare
from jaxformer.parity.recording.operators.collectives import inside_shard_map

pytestmark = pytest.mark.usefixtures("settings_of_jax")

MESH = Mesh(np.array(jax.devices()[:1]), ("d",))
X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x)))


REFERENCE = Reference()
PARAMS = {name: p.detach().numpy() for name, p in REFERENCE.named_parameters()}


def inner(p, x, factor=1.0):
    return factor * (jax.nn.silu(x @ p["up.weight"].T + p["up.bias"]) @ p["down.weight"].T)


def rows(p, x, factor=1.0):
    made = jax.shard_map(
        lambda p, x: inner(p, x, factor), mesh=MESH, in_specs=(P(), P("d")), out_specs=P("d")
    )
    return made(p, x) + p["down.bias"]


def columns(p, x):
    def one(up, bias, down, x):
        part = inner({"up.weight": up, "up.bias": bias, "down.weight": down}, x)
        return jax.lax.psum(part, "d")

    specs = P("d"), P("d"), P(None, "d"), P()
    made = jax.shard_map(one, mesh=MESH, in_specs=specs, out_specs=P())
    return made(p["up.weight"], p["up.bias"], p["down.weight"], x) + p["down.bias"]


def every_operator(p, x):
    def one(p, x):
        x = jax.lax.all_gather(x, "d")
        x = jax.lax.psum_scatter(x, "d") + jax.lax.axis_index("d")
        x = jax.lax.all_to_all(jax.lax.all_gather(x, "d", tiled=True), "d", 0, 1, tiled=True)
        x = jax.lax.ppermute(x, "d", [(0, 0)]) + jax.lax.ppermute(x, "d", [])
        largest = jax.lax.pmax(jax.lax.stop_gradient(x), "d")
        x = x + largest - jax.lax.stop_gradient(x)
        return jax.lax.scan(lambda _, row: (_, jax.lax.pmean(row, "d")), 0.0, inner(p, x))[1]

    made = jax.shard_map(one, mesh=MESH, in_specs=(P(), P("d")), out_specs=P(), check_vma=False)
    return made(p, x) + p["down.bias"]


def axis_of_vmap(p, x):
    def one(x):
        return jax.vmap(lambda r: r + 0 * jax.lax.psum(r, ("rows", "d")), axis_name="rows")(x)

    made = jax.shard_map(one, mesh=MESH, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    return inner(p, made(x)) + p["down.bias"]


def mapped(p, x):
    made = jax.pmap(lambda x: inner(p, x), devices=jax.devices()[:1])
    return made(x[None])[0] + p["down.bias"]


@pytest.mark.parametrize(
    "port", [rows, columns, jax.jit(columns), every_operator, axis_of_vmap, mapped]
)
def test_a_right_port_is_no_bug(port):
    report = compare(REFERENCE, (port, PARAMS), X)
    assert report.verdict == "rounding", str(report)
    assert report.coverage.gradients == (5, 5)


def test_a_bug_inside_is_found():
    report = compare(REFERENCE, (lambda p, x: rows(p, x, 1.5), PARAMS), X)
    (cause,) = report.root_causes
    # JAX 0.12 converts the number in an operator of its own.
    assert re.search("the number 1.5 in (mul|convert_element_type) must be 1", cause.diagnosis)


def test_several_devices_are_an_error():
    equation = SimpleNamespace(params={"mesh": SimpleNamespace(size=8)})
    with pytest.raises(UsageError, match="on 8 devices: give it one device"):
        inside_shard_map(equation)
