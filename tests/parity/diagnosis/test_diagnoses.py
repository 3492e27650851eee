"""A step that one side alone has, and rows of a table that are not the reference's, are named."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare

pytestmark = pytest.mark.usefixtures("settings_of_jax")

IDS = np.random.default_rng(0).integers(0, 11, (2, 7))


class Scored(torch.nn.Module):
    """Tokens and types, and one score of every pair, to which a term is added."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = torch.nn.Embedding(11, 6)
        self.types = torch.nn.Embedding(3, 6)
        self.spare = torch.nn.Linear(6, 6)
        self.query, self.far = torch.nn.Linear(6, 5), torch.nn.Linear(6, 7)
        self.out = torch.nn.Linear(6, 4)

    def forward(self, ids):
        x = self.tokens(ids) + self.types(torch.zeros_like(ids))
        q = self.query(x)
        scores = q @ q.transpose(1, 2) + torch.tanh(self.far(x))
        return self.out(torch.softmax(scores / 5**0.5, -1) @ x)


REFERENCE = Scored()
ARRAYS = {n: p.detach().numpy() for n, p in REFERENCE.named_parameters()}


def forward(params, ids, kind=0, has_term=True, is_bent=False, factor=1):
    def linear(name, x):
        return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]

    kinds = jnp.full_like(ids, kind)
    x = params["tokens.weight"][ids] + params["types.weight"][kinds]
    q = linear("query", x)
    if factor != 1:
        q = q * factor
    scores = q @ q.swapaxes(1, 2)
    if has_term:
        scores = scores + jnp.tanh(linear("far", x))
    if is_bent:
        scores = scores + jnp.cos(scores)
    return linear("out", jax.nn.softmax(scores / 5**0.5) @ x)


def test_what_has_no_effect_on_either_side_is_no_gap():
    report = compare(REFERENCE, (forward, ARRAYS), IDS)
    assert report.verdict == "rounding", str(report)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kind": 2}, "looks up rows 2 alone of types.weight; the reference 0 alone"),
        ({"has_term": False}, "the tanh of the model is missing: the reference's add"),
        ({"is_bent": True}, "comes in by add: the reference has no such step"),
        ({"factor": 1.0000042}, "the number 1.0000042 in mul must be 1: the reference has no"),
    ],
)
def test_the_cause_is_named(changes, text):
    report = compare(REFERENCE, (lambda p, ids: forward(p, ids, **changes), ARRAYS), IDS)
    assert report.verdict == "bug"
    assert [text in cause.diagnosis for cause in report.root_causes] == [True], str(report)
    path, _, line = report.root_causes[0].jax_source.rpartition(":")
    assert path == __file__
    if "kind" in changes:
        assert "jnp.full_like" in Path(path).read_text().splitlines()[int(line) - 1]


class Rotated(torch.nn.Module):
    """Attention whose queries and keys are rotated; a key serves two queries."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = torch.nn.Embedding(11, 8)
        self.query, self.key = torch.nn.Linear(8, 40), torch.nn.Linear(8, 20)
        self.register_buffer("frequencies", 10000.0 ** -(torch.arange(5) / 5), persistent=False)

    def forward(self, ids, positions):
        x = self.tokens(ids)
        angles = positions[:, None, :, None].float() * self.frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)

        def rotate(y):
            a, b = y.unflatten(-1, (-1, 10)).transpose(1, 2).chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        q, k = rotate(self.query(x)), rotate(self.key(x))
        scores = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 10**-0.5
        return torch.softmax(scores, -1) @ x[:, None]


def rotated(params, ids, positions, base=10000.0):
    """The same: heads in groups, and angles that are made anew for the queries and the keys."""

    def rotate(name):
        y = x @ params[f"{name}.weight"].T + params[f"{name}.bias"]
        a, b = jnp.split(y.reshape(*ids.shape, -1, 10), 2, -1)
        angles = positions[..., None, None] / base ** (jnp.arange(5) / 5)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = params["tokens.weight"][ids]
    q, k = rotate("query").reshape(*ids.shape, 2, 2, 10), rotate("key")
    scores = jnp.einsum("BTHGD,BSHD->BHGTS", q, k) * 10**-0.5
    return (jax.nn.softmax(scores) @ x[:, None, None]).reshape(len(ids), 4, *x.shape[1:])


@pytest.mark.tier("full")
def test_a_wrong_base_is_found_in_queries_and_keys_and_float32_tables_are_no_bug():
    reference = Rotated()
    arrays = {n: p.detach().numpy() for n, p in reference.named_parameters()}
    inputs = {"ids": IDS, "positions": np.maximum(np.arange(7) - [[0], [2]], 0)}
    report = compare(reference, (rotated, arrays), inputs)
    assert report.verdict == "rounding", str(report)
    report = compare(reference, (lambda p, **i: rotated(p, **i, base=500.0), arrays), inputs)
    assert report.verdict == "bug"
    expected = "the number 500 in pow must be 10000"
    assert {expected} == {cause.diagnosis for cause in report.root_causes}, str(report)


def convolved(params, x, is_shifted=False, factor=None):
    def convolve(name, x, stride):
        made = jax.lax.conv_general_dilated(x, params[f"{name}.weight"], (stride,), [(1, 1)])
        return made + params[f"{name}.bias"][:, None]

    x = jnp.tanh(convolve("0", x, 1))
    if is_shifted:
        x = jnp.pad(x[..., :-1], ((0, 0), (0, 0), (1, 0)))
    if factor is not None:
        x = x.at[..., 2].multiply(factor)
    return convolve("2", x, 2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"is_shifted": True}, "its entries along axis 2 are shifted by 1"),
        ({"factor": 1.01}, "scatter-mul is one step too many"),
    ],
)
def test_what_a_convolution_reads_is_compared(changes, text):
    layers = torch.nn.Conv1d(6, 8, 3, padding=1), torch.nn.Conv1d(8, 5, 3, 2, padding=1)
    reference = torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1])
    arrays = {n: p.detach().numpy() for n, p in reference.named_parameters()}
    x = np.random.default_rng(0).normal(size=(2, 6, 12))
    report = compare(reference, (convolved, arrays), x)
    assert report.verdict == "rounding", str(report)
    assert report.coverage.operators == (2, 2)
    report = compare(reference, (lambda p, x: convolved(p, x, **changes), arrays), x)
    assert [text in cause.diagnosis for cause in report.root_causes] == [True], str(report)


def test_numbers_that_were_not_loaded_are_named():
    """Where nothing is alike, the axes have the order that they have before."""
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(3, 4, 1), *(torch.nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))]
    reference = torch.nn.Sequential(*(part for one in layers for part in (one, torch.nn.ReLU())))
    params = {
        name: array.detach().numpy().transpose(2, 3, 1, 0) if array.ndim == 4 else array.numpy()
        for name, array in reference.state_dict().items()
    }
    random = np.random.default_rng(0)
    params["4.weight"] = random.normal(size=params["4.weight"].shape)

    def port(params, x):
        for i in range(0, 8, 2):
            letters = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(
                x, params[f"{i}.weight"], (1, 1), "SAME", dimension_numbers=letters
            )
            x = jax.nn.relu(x + params[f"{i}.bias"])
        return x

    x = random.normal(size=(2, 3, 5, 5))
    report = compare(reference, (port, params), x, jax_inputs=x.transpose(0, 2, 3, 1))
    (cause,) = report.root_causes
    assert cause.diagnosis == (
        "4.weight has numbers that the reference does not have; the candidate has none of 4.weight"
    )


class Projections(torch.nn.Module):
    """A gate and a value, from two projections."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.value = (torch.nn.Linear(5, 7, bias=False) for _ in range(2))

    def forward(self, x):
        return torch.tanh(self.gate(x)) * self.value(x)


@pytest.mark.parametrize(
    ("wrong", "held"),
    [
        (
            ([1, 3], [2, 8]),
            "gate.weight but for entries 2 of axis 0, value.weight but for entries 1",
        ),
        (([1], [2]), "gate.weight but for entries 2 of axis 0"),
        ((slice(None), slice(7)), "none of gate.weight"),
        (
            ([3, *range(5)], [8, *range(5)]),
            "none of gate.weight, and value.weight but for entries 1",
        ),
    ],
)
def test_wrong_numbers_of_a_fused_weight_are_named(wrong, held):
    """Where they would be in the reference's parameters."""
    reference = Projections()
    fused = np.concatenate([part.weight.detach().numpy().T for part in reference.children()], 1)
    fused[wrong] += 1

    def port(params, x):
        gate, value = jnp.split(x @ params["fused"], 2, -1)
        return jnp.tanh(gate) * value

    x = np.random.default_rng(0).normal(size=(3, 5))
    report = compare(reference, (port, {"fused": fused}), x)
    (cause,) = report.root_causes
    assert cause.diagnosis.startswith(
        f"fused has numbers that the reference does not have; the candidate has {held}"
    )


class Turned(torch.nn.Module):
    """Scores of queries and keys whose halves are turned by a table."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key = torch.nn.Linear(8, 16), torch.nn.Linear(8, 16)

    def forward(self, x):
        angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** -(torch.arange(4) / 4)
        angles = torch.cat([angles, angles], -1).to(x.dtype)

        def turn(y):
            y = y.unflatten(-1, (2, 8)).transpose(1, 2)
            one, two = y.chunk(2, -1)
            return y * angles.cos() + torch.cat([-two, one], -1) * angles.sin()

        return turn(self.query(x)) @ turn(self.key(x)).transpose(-1, -2)


def turned(frequencies, pairs="halves", factor=1.0, is_mixed=False):
    """Returns a port whose tables are constants in float32."""
    angles = (np.arange(7)[:, None] * frequencies).astype(np.float32)
    join = np.concatenate if (pairs == "halves") is not is_mixed else np.stack
    table = join([angles, angles], -1).reshape(7, 1, 8)
    cos, sin = factor * np.cos(table), factor * np.sin(table)

    def port(params, x):
        def turn(name):
            y = x @ params[f"{name}.weight"].T + params[f"{name}.bias"]
            y = y.reshape(*x.shape[:2], 2, 8)
            if pairs == "halves":
                one, two = jnp.split(y, 2, -1)
                return y * cos + jnp.concatenate([-two, one], -1) * sin
            return y * cos + jnp.stack([-y[..., 1::2], y[..., ::2]], -1).reshape(y.shape) * sin

        return jnp.einsum("bqhd,bkhd->bhqk", turn("query"), turn("key"))

    return port


POWERS = np.arange(4) / 4
RIGHT = "the reference rotates halves with base 10000, the first position 0"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"frequencies": 12345.0**-POWERS}, "rotates halves with base 12345, the first position 0"),
        *(
            pytest.param(*case, marks=pytest.mark.tier("full"))
            for case in (
                ({"frequencies": 1e4**-POWERS / 2}, "with base 10000, 2 times as slowly, the"),
                ({"frequencies": 1e4**-POWERS, "pairs": "neighbours"}, "rotates neighbours with"),
                ({"frequencies": 1e4**-POWERS, "factor": 1.1}, "position 0, multiplied by 1.1;"),
                ({"frequencies": np.array([1, 0.1, 0.02, 0.001])}, "frequencies 1, 0.1, 0.02, 0."),
                ({"frequencies": 1e4**-POWERS, "is_mixed": True}, "does not rotate pairs by one"),
            )
        ),
    ],
)
def test_a_rotation_by_other_tables_is_named(changes, text):
    reference = Turned()
    arrays = {n: p.detach().numpy() for n, p in reference.named_parameters()}
    x = np.random.default_rng(0).normal(size=(2, 7, 8))
    right = turned(10000.0**-POWERS)
    assert compare(reference, (right, arrays), x, backward=False).verdict == "rounding"
    report = compare(reference, (turned(**changes), arrays), x, backward=False)
    assert report.root_causes, str(report)
    for cause in report.root_causes:
        assert text in cause.diagnosis, str(report)
        assert RIGHT in cause.diagnosis
        assert cause.jax_source.startswith(__file__)


class Gated(torch.nn.Module):
    """Multiplies its input by a function of a layer."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.function = torch.nn.Linear(6, 6), function

    def forward(self, x):
        return x * self.function(self.gate(x))


def quick_gelu(x):
    return x * torch.sigmoid(1.702 * x)


@pytest.mark.parametrize(
    ("right", "own", "diagnosis"),
    [
        (torch.sigmoid, jnp.tanh, "computes tanh; the reference computes the sigmoid"),
        (torch.sigmoid, jax.nn.silu, "computes SiLU; the reference computes the sigmoid"),
        (torch.tanh, jax.nn.sigmoid, "computes the sigmoid; the reference computes tanh"),
        # Their sigmoids differ, and are parts of the functions.
        (quick_gelu, jax.nn.silu, "computes SiLU; the reference computes the quick GELU"),
    ],
)
def test_both_functions_of_a_gate_have_their_names(right, own, diagnosis):
    reference = Gated(right)
    arrays = {n: p.detach().numpy() for n, p in reference.named_parameters()}

    def gated(params, x):
        return x * own(x @ params["gate.weight"].T + params["gate.bias"])

    x = np.random.default_rng(0).normal(size=(3, 7, 6))
    report = compare(reference, (gated, arrays), x)
    assert report.root_causes[0].diagnosis == f"the candidate {diagnosis}"
