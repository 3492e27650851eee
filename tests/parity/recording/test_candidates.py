"""Every kind of candidate is taken, with inputs of every kind."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

from jaxformer.errors import UsageError
from jaxformer.parity import compare

pytestmark = pytest.mark.usefixtures("settings_of_jax")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import equinox
    import haiku

X = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = torch.nn.Linear(5, 7)
        self.norm = torch.nn.LayerNorm(7)
        with torch.no_grad():
            self.norm.weight += torch.randn(7)
            self.norm.bias += torch.randn(7)

    def forward(self, x):
        return self.norm(torch.nn.functional.gelu(self.fc(x)))


REFERENCE = Reference()
KERNEL, BIAS, SCALE, SHIFT = (
    p.detach().numpy()
    for p in (
        REFERENCE.fc.weight.T, REFERENCE.fc.bias, REFERENCE.norm.weight, REFERENCE.norm.bias,
    )
)  # fmt: skip


class Nnx(nnx.Module):
    def __init__(self, approximate):
        self.dense = nnx.Linear(5, 7, rngs=nnx.Rngs(0))
        self.norm = nnx.LayerNorm(7, epsilon=1e-5, rngs=nnx.Rngs(0))
        self.approximate = approximate
        self.dense.kernel[...], self.dense.bias[...] = KERNEL, BIAS
        self.norm.scale[...], self.norm.bias[...] = SCALE, SHIFT

    def __call__(self, x):
        return self.norm(nnx.gelu(self.dense(x), approximate=self.approximate))


class Linen(linen.Module):
    approximate: bool

    @linen.compact
    def __call__(self, x):
        y = linen.gelu(linen.Dense(7, name="fc")(x), approximate=self.approximate)
        return linen.LayerNorm(epsilon=1e-5, name="norm")(y)


LINEN_VARIABLES = {
    "params": {"fc": {"kernel": KERNEL, "bias": BIAS}, "norm": {"scale": SCALE, "bias": SHIFT}}
}


class Equinox(equinox.Module):
    fc: equinox.nn.Linear
    norm: equinox.nn.LayerNorm
    approximate: bool

    def __call__(self, x):
        def one(row):
            return self.norm(jax.nn.gelu(self.fc(row), approximate=self.approximate))

        return jax.vmap(one)(x)


def equinox_module(approximate):
    model = Equinox(
        equinox.nn.Linear(5, 7, key=jax.random.key(0)), equinox.nn.LayerNorm(7), approximate
    )
    where = lambda m: (m.fc.weight, m.fc.bias, m.norm.weight, m.norm.bias)  # noqa: E731
    return equinox.tree_at(where, model, tuple(map(jnp.asarray, (KERNEL.T, BIAS, SCALE, SHIFT))))


def haiku_function(approximate):
    def forward(x):
        y = jax.nn.gelu(haiku.Linear(7, name="fc")(x), approximate=approximate)
        return haiku.LayerNorm(-1, True, True, name="norm")(y)

    params = {"fc": {"w": KERNEL, "b": BIAS}, "norm": {"scale": SCALE, "offset": SHIFT}}
    return haiku.transform(forward), params


@jax.jit
def _function(params, x, approximate):
    y = x @ params["kernel"] + params["bias"]
    y = jnp.where(approximate, jax.nn.gelu(y), jax.nn.gelu(y, approximate=False))
    y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5)
    return y * params["scale"] + params["shift"]


def function(approximate):
    params = {"kernel": KERNEL, "bias": BIAS, "scale": SCALE, "shift": SHIFT}
    return (lambda params, x: _function(params, x, approximate)), params


KINDS = {
    "nnx": Nnx,
    "linen": lambda approximate: (Linen(approximate), LINEN_VARIABLES),
    "equinox": equinox_module,
    "haiku": haiku_function,
    "function": function,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_taken(kind):
    report = compare(REFERENCE, KINDS[kind](False), X)
    assert report.verdict == "rounding", str(report)
    assert report.error < 1e-14
    report = compare(REFERENCE, KINDS[kind](True), X)
    assert report.verdict == "bug"
    assert report.root_causes[0].error > 1e-5


@pytest.mark.parametrize(
    "inputs", [X, [X], (torch.from_numpy(X),), jnp.asarray(X), {"x": X}, {"x": torch.tensor(X)}]
)
def test_inputs_of_every_kind_are_taken(inputs):
    assert compare(REFERENCE, KINDS["linen"](False), inputs).verdict == "rounding"


def test_what_has_no_effect_is_named():
    def forward(params, x):
        return _function(params, x, False)

    params = function(False)[1] | {"spare": KERNEL}
    report = compare(REFERENCE, (forward, params), X)
    assert report.verdict == "incomplete"
    assert report.incomplete == (
        "the parameter spare of the candidate has no effect on its results",
    )


@pytest.mark.parametrize(
    ("candidate", "match"),
    [
        (Linen(False), "together with its variables"),
        ((Linen(False), {"kernel": KERNEL}), "dict of collections"),
        (3, "the candidate must be an NNX or Equinox module"),
    ],
)
def test_other_candidates_are_rejected_in_one_line(candidate, match):
    with pytest.raises(UsageError, match=match):
        compare(REFERENCE, candidate, X)


def test_an_option_that_does_not_serve_is_rejected():
    with pytest.raises(UsageError, match="force: serves"):
        compare(REFERENCE, KINDS["linen"](False), X, force=True)
    with pytest.raises(UsageError, match="dialect: serves jaxformer's own models, without names"):
        compare(REFERENCE, KINDS["nnx"](False), X, names={"dense": "fc"}, dialect="gpt2")
    with pytest.raises(UsageError, match=r"tolerance is no option of compare: .*, backward, names"):
        compare(REFERENCE, KINDS["linen"](False), X, tolerance=1e-3)
    with pytest.raises(UsageError, match=r"backwards is .* \(did you mean backward\?\)"):
        compare(REFERENCE, KINDS["linen"](False), X, backwards=False)


@pytest.mark.parametrize("kind", KINDS)
def test_how_each_side_is_called_may_be_said(kind):
    report = compare(
        REFERENCE,
        KINDS[kind](False),
        [X],
        torch_call=lambda module, given: 2 * module(given[0]),
        jax_call=lambda module, given: module(given[0]) + module(*given),
        about={"note": "twice"},
    )
    assert report.verdict == "rounding", report
    assert report.about == {"note": "twice"}


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_input_has_a_suggestion(kind):
    with pytest.raises(UsageError, match=r"the reference, which takes \(x\): it has no input xs"):
        compare(REFERENCE, KINDS[kind](False), {"xs": X})


@pytest.mark.parametrize("kind", ["nnx", "linen", "function"])
def test_an_unknown_input_of_the_candidate_has_a_suggestion(kind):
    with pytest.raises(UsageError, match=r"fit the candidate.*no input xx \(did you mean x\?\)"):
        compare(REFERENCE, KINDS[kind](False), {"x": X}, jax_inputs={"xx": X})
    with pytest.raises(UsageError, match=r"fit the candidate.*too many positional arguments"):
        compare(REFERENCE, KINDS[kind](False), X, jax_inputs=[X, X])


def test_a_module_that_jit_was_given_is_taken():
    assert compare(REFERENCE, nnx.jit(KINDS["nnx"](False)), X).verdict == "rounding"
    assert compare(REFERENCE, equinox.filter_jit(KINDS["equinox"](False)), X).verdict == "rounding"


def test_names_are_for_modules_of_nnx():
    with pytest.raises(UsageError, match="names pairs the modules of an NNX module"):
        compare(REFERENCE, KINDS["linen"](False), X, names={"fc": "fc"})
