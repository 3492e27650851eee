"""A candidate's own names of its modules, found by their numbers."""

import equinox
import haiku
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx
from torch import nn

from jaxformer.parity import compare
from tests.parity.test_user_modules import CandidateMlp, D, F, ReferenceMlp
from tests.support.subjects import hidden, randomize

pytestmark = pytest.mark.usefixtures("float64")


class Wrapped(nn.Module):
    """Returns what its part returns, which holds the same parameters, after a dropout."""

    def __init__(self):
        super().__init__()
        self.mlp, self.drop = ReferenceMlp(), nn.Dropout()
        self.mlp.register_buffer("frequencies", torch.arange(3.0) + 7)

    def forward(self, x):
        return self.drop(self.mlp(x))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Wrapped() for _ in range(2)])
        # The same numbers in both layers: what the norms return tells them apart.
        self.layers[1].mlp.norm.load_state_dict(self.layers[0].mlp.norm.state_dict())

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return torch.tanh(x)


class CandidateStack(nnx.Module):
    def __init__(self, reference):
        self.blocks = nnx.List([CandidateMlp(layer.mlp) for layer in reference.layers])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return jnp.tanh(x)


def paths(report):
    return {node.reference_path: node.path for node in report}


def test_nnx_modules_name_themselves():
    reference = randomize(Stack())
    report = compare(reference, CandidateStack(reference), [hidden()])
    assert report.verdict == "rounding"
    assert paths(report) == {
        "": "",
        # The innermost of two that are alike.
        **{f"layers.{n}": f"layers.{n}" for n in range(2)},
        **{f"layers.{n}.drop": f"layers.{n}.drop" for n in range(2)},
        **{f"layers.{n}.mlp": f"blocks.{n}" for n in range(2)},
        **{f"layers.{n}.mlp.norm": f"blocks.{n}.ln" for n in range(2)},
        **{f"layers.{n}.mlp.first": f"blocks.{n}.up" for n in range(2)},
        **{f"layers.{n}.mlp.second": f"blocks.{n}.down" for n in range(2)},
    }
    assert {node.kind for node in report if node.path == "blocks.1.up"} == {"Linear"}
    assert report.coverage.candidate_modules == (8, 8)


def test_a_module_that_is_wrong_has_its_name():
    reference = randomize(Stack())
    candidate = CandidateStack(reference)
    candidate.blocks[1].ln.epsilon = 0.1
    report = compare(reference, candidate, [hidden()])
    (cause,) = report.root_causes
    assert (cause.path, cause.reference_path) == ("blocks.1.ln", "layers.1.mlp.norm")
    assert cause.jax_module == "blocks.1.ln"


class LinenMlp(linen.Module):
    @linen.compact
    def __call__(self, x):
        inner = linen.Dense(F, name="up")(linen.LayerNorm(epsilon=1e-5, name="ln")(x))
        return x + linen.Dense(D, name="down")(jax.nn.relu(inner))


def test_haiku_modules_name_themselves():
    reference = randomize(ReferenceMlp())

    class Mlp(haiku.Module):
        def __call__(self, x):
            inner = haiku.LayerNorm(-1, True, True, name="ln")(x)
            inner = jax.nn.relu(haiku.Linear(F, name="up")(inner))
            return x + haiku.Linear(D, name="down")(inner)

    made = haiku.transform(lambda x: jnp.tanh(Mlp()(x)))
    names = {"scale": "scale", "bias": "offset", "kernel": "w"}
    arrays = {
        f"mlp/{layer}": {names[n]: a for n, a in each.items()}
        for layer, each in as_arrays(reference)["params"].items()
    }
    for layer in ("up", "down"):
        arrays[f"mlp/{layer}"]["b"] = arrays[f"mlp/{layer}"].pop("offset")
    report = compare(nn.Sequential(reference, nn.Tanh()), (made, arrays), [hidden()])
    assert report.verdict == "rounding", str(report)
    assert paths(report) == {
        "": "", "0": "mlp", "0.norm": "mlp/ln", "0.first": "mlp/up", "0.second": "mlp/down",
        "1": "1",
    }  # fmt: skip


class ScannedMlp(linen.Module):
    """The layers of a stack, one after another in a scan."""

    @linen.compact
    def __call__(self, x):
        layers = linen.scan(
            Carried, variable_axes={"params": 0}, split_rngs={"params": True}, length=2
        )
        return jnp.tanh(layers(name="layers")(x, None)[0])


class Carried(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return LinenMlp(name="mlp")(x), None


def as_arrays(reference):
    """The parameters of a ReferenceMlp for Linen."""

    def turned(layer):
        return {"kernel": layer.weight.detach().numpy().T, "bias": layer.bias.detach().numpy()}

    norm = reference.norm
    ln = {"scale": norm.weight.detach().numpy(), "bias": norm.bias.detach().numpy()}
    return {"params": {"ln": ln, "up": turned(reference.first), "down": turned(reference.second)}}


def test_linen_modules_name_themselves():
    reference = randomize(ReferenceMlp())
    report = compare(reference, (LinenMlp(), as_arrays(reference)), [hidden()])
    assert paths(report) == {"": "", "norm": "ln", "first": "up", "second": "down"}


class EquinoxMlp(equinox.Module):
    ln: equinox.nn.LayerNorm
    layers: list

    def __init__(self, reference):
        key = jax.random.key(0)
        made = equinox.nn.LayerNorm(D), [equinox.nn.Linear(*s, key=key) for s in ((D, F), (F, D))]
        layers = reference.norm, (reference.first, reference.second)
        self.ln = with_arrays(made[0], layers[0])
        self.layers = [with_arrays(*both) for both in zip(made[1], layers[1], strict=True)]

    def __call__(self, x):
        return jax.vmap(jax.vmap(self.one))(x)

    def one(self, x):
        return x + self.layers[1](jax.nn.relu(self.layers[0](self.ln(x))))


def with_arrays(module, reference):
    arrays = [jnp.asarray(getattr(reference, name).detach().numpy()) for name in ("weight", "bias")]
    return equinox.tree_at(lambda m: [m.weight, m.bias], module, arrays)


def test_equinox_modules_name_themselves():
    reference = randomize(ReferenceMlp())
    report = compare(reference, EquinoxMlp(reference), [hidden()])
    assert report.verdict == "rounding"
    assert paths(report) == {"": "", "norm": "ln", "first": "layers[0]", "second": "layers[1]"}


def test_a_module_that_stands_for_several_layers_has_the_name_of_none():
    reference = randomize(Stack())
    each = [as_arrays(layer.mlp)["params"] for layer in reference.layers]
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *each)
    variables = {"params": {"layers": {"mlp": stacked}}}
    report = compare(reference, (ScannedMlp(), variables), [hidden()])
    assert report.verdict == "rounding"
    assert all(path == own for path, own in paths(report).items())


class FromOne(nn.Module):
    """A norm whose scale is one plus its weight, as Gemma's is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))

    def forward(self, x):
        return (1 + self.weight) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class CandidateNorm(nnx.Module):
    def __init__(self, reference):
        self.norm = nnx.RMSNorm(D, epsilon=1e-6, rngs=nnx.Rngs(0))
        self.norm.scale.set_value(jnp.asarray(1 + reference[0].weight.detach().numpy()))

    def __call__(self, x):
        return self.norm(x) * 2


class Twice(nn.Module):
    def forward(self, x):
        return x * 2


def test_a_module_whose_parameter_was_computed_has_its_name():
    torch.manual_seed(0)
    reference = nn.Sequential(FromOne(), Twice())
    report = compare(reference, CandidateNorm(reference), [hidden()])
    assert report.verdict == "rounding"
    assert paths(report) == {"": "", "0": "norm", "1": "1"}


def test_what_has_no_modules_keeps_the_names_of_the_reference():
    reference = randomize(ReferenceMlp())

    def function(variables, x):
        return LinenMlp().apply(variables, x)

    report = compare(reference, (function, as_arrays(reference)), [hidden()])
    assert all(path == own for path, own in paths(report).items())
