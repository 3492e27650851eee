"""Calls of one weight belong together by their values: their order is the author's choice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import linen, nnx

from jaxformer.parity import compare
from tests.support.ports.planted import line_of
from tests.support.ports.torch_models import perturbed

pytestmark = pytest.mark.usefixtures("settings_of_jax")

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(3, 5, 6))
IDS = list(RANDOM.integers(0, 11, (2, 3, 5)))
ORDERS = {"reversed": (4, 3, 2, 1, 0), "interleaved": (2, 0, 4, 1, 3)}


class OneLayerForAll(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.out = torch.nn.Linear(6, 7), torch.nn.Linear(35, 2)

    def forward(self, x):
        made = [torch.tanh(self.shared(x[:, i])) for i in range(x.shape[1])]
        return self.out(torch.cat(made, -1))


class Siamese(torch.nn.Module):
    """Two texts through one encoder, and a head that is its table of tokens."""

    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(11, 6)
        self.up, self.down, self.norm = (
            torch.nn.Linear(6, 8), torch.nn.Linear(8, 6), torch.nn.LayerNorm(6),
        )  # fmt: skip

    def encode(self, ids):
        x = self.tokens(ids)
        for _ in range(2):
            x = self.norm(x + self.down(torch.relu(self.up(x))))
        return x

    def forward(self, one, other):
        one, other = self.encode(one), self.encode(other)
        return (one - torch.tanh(other)) @ self.tokens.weight.T


def arrays_of(model):
    return {name: array.detach().numpy() for name, array in model.named_parameters()}


def dense(p, name, x):
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def in_order(order, wrong=None):
    def forward(p, x):
        made = {}
        for i in order:
            row = x[:, i]
            if i == wrong:
                row = 1.01 * row  # planted
            made[i] = jnp.tanh(dense(p, "shared", row))
        return dense(p, "out", jnp.concatenate([made[i] for i in range(len(order))], -1))

    return forward


def batched(p, x):
    return dense(p, "out", jnp.tanh(dense(p, "shared", x)).reshape(len(x), -1))


def mapped(p, x):
    made = jax.vmap(lambda row: jnp.tanh(dense(p, "shared", row)), 1, 1)(x)
    return dense(p, "out", made.reshape(len(x), -1))


def scanned(p, x):
    def step(state, row):
        return state, jnp.tanh(dense(p, "shared", row))

    made = jax.lax.scan(step, 0.0, x.swapaxes(0, 1), reverse=True)[1]
    return dense(p, "out", made.swapaxes(0, 1).reshape(len(x), -1))


def function_port(forward):
    model = perturbed(OneLayerForAll())
    return model, (forward, arrays_of(model))


class LinenOrder(linen.Module):
    order: tuple[int, ...]

    @linen.compact
    def __call__(self, x):
        shared, made = linen.Dense(7, name="shared"), {}
        for i in self.order:
            made[i] = jnp.tanh(shared(x[:, i]))
        row = jnp.concatenate([made[i] for i in range(len(made))], -1)
        return linen.Dense(2, name="out")(row)


def linen_port(order):
    model = perturbed(OneLayerForAll())
    arrays = arrays_of(model)
    names = ("shared", "out")
    params = {n: {"kernel": arrays[f"{n}.weight"].T, "bias": arrays[f"{n}.bias"]} for n in names}
    return model, (LinenOrder(order), {"params": params})


class NnxOrder(nnx.Module):
    def __init__(self, arrays, order):
        self.order = order
        self.shared = nnx.Linear(6, 7, rngs=nnx.Rngs(0))
        self.out = nnx.Linear(35, 2, rngs=nnx.Rngs(0))
        for name in ("shared", "out"):
            layer = getattr(self, name)
            layer.kernel[...] = arrays[f"{name}.weight"].T
            layer.bias[...] = arrays[f"{name}.bias"]

    def __call__(self, x):
        made = {i: jnp.tanh(self.shared(x[:, i])) for i in self.order}
        return self.out(jnp.concatenate([made[i] for i in range(len(made))], -1))


def nnx_port(order):
    model = perturbed(OneLayerForAll())
    return model, NnxOrder(arrays_of(model), order)


PORTS = {
    **{name: lambda order=order: function_port(in_order(order)) for name, order in ORDERS.items()},
    "batched": lambda: function_port(batched),
    "mapped": lambda: function_port(mapped),
    "scanned": lambda: function_port(scanned),
    "linen": lambda: linen_port(ORDERS["reversed"]),
    "nnx": lambda: nnx_port(ORDERS["interleaved"]),
}


@pytest.mark.parametrize("port", PORTS)
def test_calls_of_a_layer_may_come_in_any_order(port):
    report = compare(*PORTS[port](), X)
    assert report.verdict == "rounding", str(report)
    assert not report.remarks
    compared, expected = report.coverage.gradients
    assert compared == expected


@pytest.mark.parametrize("order", ORDERS)
def test_a_bug_in_one_of_the_calls_is_found(order):
    report = compare(*function_port(in_order(ORDERS[order], wrong=1)), X)
    (cause,) = report.root_causes
    assert cause.jax_source == line_of(__file__, "row = 1.01 * row  # planted")
    assert "1.01 in mul must be 1" in cause.diagnosis


def encode(p, ids, eps=1e-5):
    x = p["tokens.weight"][ids]
    for _ in range(2):
        x = x + dense(p, "down", jax.nn.relu(dense(p, "up", x)))
        mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        x = (x - mean) / jnp.sqrt(variance + eps)
        x = x * p["norm.weight"] + p["norm.bias"]
    return x


def head(p, one, other):
    return (one - jnp.tanh(other)) @ p["tokens.weight"].T


def other_first(p, one, other):
    other = encode(p, other)
    return head(p, encode(p, one), other)


def together(p, one, other):
    return head(p, *jnp.split(encode(p, jnp.concatenate([one, other])), 2))


def encoded_twice(p, one, other):
    later = (encode(p, other) + encode(p, other)) / 2
    return head(p, encode(p, one), later)


def wrong_number(p, one, other):
    other = encode(p, other)
    return head(p, encode(p, one, eps=1e-3), other)


def one_text_alone(p, one, other):
    later = encode(p, other)
    first = encode(p, other)  # planted
    return head(p, first, later)


@pytest.mark.parametrize("port", [other_first, together, encoded_twice])
def test_an_encoder_may_read_two_texts_in_any_order(port):
    model = perturbed(Siamese())
    report = compare(model, (port, arrays_of(model)), IDS)
    assert report.verdict == "rounding", str(report)


def test_a_bug_in_one_of_two_texts_is_found():
    model = perturbed(Siamese())
    report = compare(model, (wrong_number, arrays_of(model)), IDS)
    (cause,) = report.root_causes
    assert "0.001 in add must be 1e-05" in cause.diagnosis
    report = compare(model, (one_text_alone, arrays_of(model)), IDS)
    (cause,) = report.root_causes
    assert cause.jax_source == line_of(__file__, "first = encode(p, other)  # planted")
    assert "looks up rows" in cause.diagnosis


class ScaledHeads(torch.nn.Module):
    """Scales what the tied head reads, as T5 does, and what a layer with a bias gives."""

    def __init__(self):
        super().__init__()
        self.tokens, self.layer = torch.nn.Embedding(11, 6), torch.nn.Linear(6, 6)

    def forward(self, ids):
        x = self.tokens(ids)
        x = x + torch.relu(self.layer(x))
        return x * 6**-0.5 @ self.tokens.weight.T, 3.5 * self.layer(x)


def scaled_elsewhere(p, ids, activation=jax.nn.relu, shift=3.5, factor=None):
    x = p["tokens.weight"][ids]
    x = x + activation(dense(p, "layer", x))
    if factor is not None:
        x = factor * x
    made = (3.5 * x) @ p["layer.weight"].T + shift * p["layer.bias"]
    return x @ p["tokens.weight"].T * 6**-0.5, made


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({}, ""),
        ({"activation": jax.nn.silu}, "computes SiLU; the reference computes ReLU"),
        ({"factor": 1.02}, "1.02 in mul must be 1"),
        ({"shift": 1.0}, ""),
    ],
)
def test_a_scale_before_a_product_is_one_after_it(changes, text):
    model = perturbed(ScaledHeads())
    port = functools.partial(scaled_elsewhere, **changes)
    report = compare(model, (port, arrays_of(model)), IDS[0])
    assert report.verdict == ("bug" if changes else "rounding"), str(report)
    assert len(report.root_causes) == bool(changes), str(report)
    assert all(text in cause.diagnosis for cause in report.root_causes)


class Halved(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)

    def forward(self, x):
        return x + 0.5 * self.layer(torch.tanh(x))


def test_terms_around_a_product_may_be_added_in_any_order():
    def port(p, x, factor=0.5):
        return x + (0.5 * jnp.tanh(x)) @ p["layer.weight"].T + factor * p["layer.bias"]

    reference = perturbed(Halved())
    report = compare(reference, (port, arrays_of(reference)), X)
    assert report.verdict == "rounding", str(report)
    wrong = functools.partial(port, factor=0.4)
    assert compare(reference, (wrong, arrays_of(reference)), X).verdict == "bug"


class Memory(torch.nn.Module):
    """Reads a memory twice, with a trained temperature (Ramsauer et al., 2021, eq. 3)."""

    def __init__(self, scale):
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(6, 8), scale
        self.memory = torch.nn.Parameter(torch.randn(5, 8))
        self.beta = torch.nn.Parameter(torch.tensor(0.73))

    def forward(self, x):
        x = self.layer(x)
        for _ in range(2):
            x = torch.softmax(self.scale(x, self.beta) @ self.memory.T, -1) @ self.memory
        return x


def memory(scale, p, x):
    x = dense(p, "layer", x)
    for _ in range(2):
        x = jax.nn.softmax(scale(x @ p["memory"].T, p["beta"])) @ p["memory"]
    return x


@pytest.mark.parametrize(
    ("scale", "port"),
    [
        (lambda x, beta: x * beta, lambda x, beta: x * beta),
        (lambda x, beta: x / beta, lambda x, beta: x / beta),
        (lambda x, beta: beta.exp() * x, lambda x, beta: jnp.exp(beta) * x),
    ],
)
def test_a_scale_before_a_product_may_be_a_parameter(scale, port):
    model = perturbed(Memory(scale))
    report = compare(model, (functools.partial(memory, port), arrays_of(model)), X)
    assert report.verdict == "rounding", str(report)
    wrong = functools.partial(memory, lambda x, beta: 1.02 * port(x, beta))
    assert compare(model, (wrong, arrays_of(model)), X).verdict == "bug"


class Repeated(torch.nn.Module):
    """One layer, several times."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 6)

    def forward(self, x):
        for _ in range(3):
            x = torch.tanh(self.layer(x))
        return x


@pytest.mark.parametrize("count", [2, 3, 4])
def test_a_layer_that_is_read_more_often_is_named(count):
    model = perturbed(Repeated())

    def port(p, x):
        return jax.lax.fori_loop(0, count, lambda _, y: jnp.tanh(dense(p, "layer", y)), x)

    report = compare(model, (port, arrays_of(model)), X)
    if count == 3:
        assert report.verdict == "rounding", str(report)
        return
    text = f"the candidate reads layer.weight {count} times; the reference 3"
    assert [cause.diagnosis for cause in report.root_causes] == [text], str(report)
    assert report.remarks == (f"gradients were not compared: {text}",)
