"""What a traced function may hold: numbers in float32, random keys, parts that nobody needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.extend.core import Literal

from jaxformer.errors import UsageError
from jaxformer.parity import compare
from jaxformer.parity.matching.anchors import Anchors
from jaxformer.parity.matching.values import moments
from jaxformer.parity.recording.operators.numpy_operators import numpy_function
from jaxformer.parity.recording.operators.tape import Tape
from jaxformer.parity.words import shorten
from jaxformer.porting import from_torch
from torch_ref import layers as torch_layers

pytestmark = pytest.mark.usefixtures("settings_of_jax")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 5)).astype(np.float32)


class Gelu(torch.nn.Module):
    """A layer and the tanh form of GELU, a table of angles added."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = torch.nn.Linear(5, 7)

    def forward(self, x):
        angles = torch.arange(3)[:, None] / 10000.0 ** (torch.arange(7) / 7)
        return torch.nn.functional.gelu(self.fc(x), approximate="tanh") * angles.cos()


REFERENCE = Gelu()
ARRAYS = {n: p.detach().numpy() for n, p in REFERENCE.named_parameters()}


def forward(params, x, root=None, spread=1.0):
    root = np.float32(np.sqrt(2 / np.pi)) if root is None else root
    y = (x @ params["fc.weight"].T + params["fc.bias"]).astype(jnp.float32)
    y = 0.5 * y * (1 + jnp.tanh(root * (y + 0.044715 * y**3)))
    angles = np.arange(3)[:, None] / np.float32(10000) ** (np.arange(7, dtype=np.float32) / 7)
    # As large as the batch, as tables are that are looked up by position.
    table = jnp.asarray(np.cos(angles * spread).astype(np.float32))
    return y * table[jnp.arange(3)]


def test_numbers_and_tables_in_float32_are_no_bug():
    report = compare(REFERENCE, (forward, ARRAYS), X)
    assert report.verdict == "rounding", str(report)
    assert report.tables


@pytest.mark.parametrize("changes", [{"root": 0.79}, {"spread": 1.001}])
def test_numbers_that_are_off_by_more_are_a_bug(changes):
    report = compare(REFERENCE, (lambda p, x: forward(p, x, **changes), ARRAYS), X)
    assert report.verdict == "bug"


def test_keys_and_what_nobody_needs():
    def with_keys(params, x):
        key = jax.random.fold_in(jax.random.key(0), 1)
        unused = jax.jit(lambda k: jax.random.normal(k, (2,)))(key)
        noise = 0 * jax.random.normal(jax.random.split(key)[0], (7,))
        jax.lax.while_loop(lambda v: v[0] < 3, lambda v: v + 1, unused)
        return forward(params, x) + noise

    report = compare(REFERENCE, (with_keys, ARRAYS), X)
    assert report.verdict == "rounding", str(report)


def small_calls():
    x, y = RNG.normal(size=(2, 3, 5)), RNG.normal(size=(2, 3, 5))
    lax = jax.lax
    yield from ((f, (np.abs(x) + 0.1,)) for f in (
        lax.neg, lax.exp, lax.log, lax.tanh, lax.sqrt, lax.sin, lax.cos, lax.floor, lax.ceil,
        lax.abs, lax.log1p, lax.expm1, lax.exp2, lax.square, lax.rsqrt, lax.logistic,
        lax.is_finite, lambda a: lax.integer_pow(a, 3), lambda a: lax.transpose(a, (2, 0, 1)),
        lambda a: lax.reshape(a, (6, 5)), lambda a: lax.slice(a, (0, 1, 1), (2, 3, 5), (1, 1, 2)),
        lambda a: lax.broadcast_in_dim(a, (2, 4, 3, 5), (0, 2, 3)), lambda a: lax.rev(a, (1,)),
        lambda a: lax.reduce_sum_p.bind(a, axes=(1,), out_sharding=None),
        lambda a: lax.reduce_max_p.bind(a, axes=(0, 2), out_sharding=None),
        lambda a: lax.squeeze(lax.expand_dims(a, (1,)), (1,)),
    ))  # fmt: skip
    yield from ((f, (x, y)) for f in (
        lax.add, lax.sub, lax.mul, lax.div, lax.max, lax.min, lax.eq, lax.lt, lax.ge,
        lambda a, b: lax.pow(lax.abs(a), b), lambda a, b: lax.select(a > b, a, b),
        lambda a, b: lax.concatenate([a, b], 1),
        lambda a, b: lax.dot_general(a, b, (((2,), (2,)), ((0,), (0,)))),
        lambda a, b: lax.dot_general(a, b, (((1, 2), (1, 2)), ((), ()))),
        lambda a, b: (a > 0) & ~(b > 0) | (b > 1),
    ))  # fmt: skip


def test_numpy_computes_what_jax_does():
    seen = set()
    with jax.enable_x64(True):
        for function, arrays in small_calls():
            jaxpr = jax.make_jaxpr(function)(*arrays)
            values = dict(zip(jaxpr.jaxpr.invars, arrays, strict=True))
            for equation in jaxpr.jaxpr.eqns:
                read = [v.val if isinstance(v, Literal) else values[v] for v in equation.invars]
                is_float = all(np.asarray(array).dtype.kind == "f" for array in read)
                name = equation.primitive.name
                made = equation.primitive.bind(*map(jnp.asarray, read), **equation.params)
                own = numpy_function(name, equation.params, is_float, size=15)
                if own is not None:
                    seen.add(name)
                    got = own(*map(np.asarray, read))
                    assert got.shape == made.shape, name
                    np.testing.assert_allclose(got, made, rtol=1e-14, atol=1e-15, err_msg=name)
                values[equation.outvars[0]] = np.asarray(made)
    assert len(seen) >= 35, seen


def test_a_gradient_of_a_lookup_in_float32_is_added_up_in_float64():
    embedding = torch.nn.Embedding(7, 5)
    params = {"table": embedding.weight.detach().numpy()}

    def port(p, ids):
        return jnp.take(p["table"].astype(jnp.float32), ids, axis=0)

    report = compare(embedding, (port, params), np.array([[1, 2, 2], [4, 1, 2]]))
    assert report.verdict == "exact", str(report)
    assert report.coverage.gradients == (1, 1)


def test_a_variance_is_told_from_itself_plus_a_small_eps():
    variance = RNG.uniform(0.1, 1, size=20)
    reference = Tape()
    values = [reference.add(variance, "input"), reference.add(variance + 1e-12, "input")]
    anchors = Anchors(reference)
    anchors.index.add(values)
    for value in values:
        np.testing.assert_array_equal(anchors.candidate.add(value.data, "input").data, value.data)


class Scaled(torch.nn.Module):
    """Scales the scores by a number in float32, and masks them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(3))
        self.out = torch.nn.Linear(6, 5)
        self.root = torch.sqrt(torch.tensor(6.0))

    def forward(self, x):
        q, k, v = (linear(x) for linear in self.qkv)
        seen = torch.ones(7, 7).tril().bool()
        scores = torch.where(seen, q @ k.mT, -1e9) / self.root
        return self.out(torch.softmax(scores, -1) @ v)


def test_factors_that_make_up_for_each_other_are_no_bug():
    model = Scaled()
    arrays = {n: p.detach().numpy() for n, p in model.named_parameters()}

    def forward(params, x):
        q, k, v, out = (
            lambda y, n=n: y @ params[f"{n}.weight"].T + params[f"{n}.bias"]
            for n in ("qkv.0", "qkv.1", "qkv.2", "out")
        )
        seen = jnp.tril(jnp.ones((7, 7), bool))
        # The queries are scaled, so that the gradients of the scores are others.
        scores = jnp.where(seen, (q(x) / np.sqrt(6)) @ k(x).swapaxes(1, 2), -1e9)
        return out(jax.nn.softmax(scores) @ v(x))

    x = np.random.default_rng(0).normal(size=(2, 7, 6)).astype(np.float32)
    report = compare(model, (forward, arrays), x)
    assert report.verdict == "rounding", str(report)


def test_numbers_near_zero_have_moments():
    assert np.isfinite(moments(np.full(5, 1e-200))).all()
    assert np.isfinite(moments(np.full(5, 5e-324))).all()


@pytest.mark.parametrize("name", ["add_any", "reshape of add_any"])
def test_a_sum_is_no_more_exact_than_what_it_adds(name):
    anchors = Anchors(Tape())
    tape = anchors.candidate
    one, other = tape.add(np.full(3, 0.85), "input"), tape.add(np.full(3, -0.85 + 1e-15), "input")
    (end,) = tape.record(
        "add_any", [one, other], [one.data + other.data], lambda a, b: [np.add(a, b)]
    )
    if "reshape" in name:
        (end,) = tape.record("reshape", [end], [end.data[None]], lambda a: [a[None]])
    # In float32 both are the same number, and nothing is left of them.
    allowed = anchors.allowed(tape.operators, end, float(np.abs(end.data).max()))
    assert 1e-14 < allowed < 1e-11


def test_rounding_to_fewer_bits_is_left_out_and_said():
    linear = torch.nn.Linear(5, 7)
    params = {"w": linear.weight.detach().numpy(), "b": linear.bias.detach().numpy()}

    def port(p, x):
        made = x.astype(jnp.bfloat16) @ p["w"].T.astype(jnp.bfloat16)
        return made.astype(jnp.float32) + p["b"]

    report = compare(linear, (port, params), np.random.default_rng(0).normal(size=(3, 5)))
    assert report.verdict in ("exact", "rounding"), str(report)
    (cast,) = report.casts
    assert cast.startswith(f"{shorten(__file__ + ':1').rpartition(':')[0]}:")
    assert cast.endswith(", to bfloat16 in 2 places")
    assert "Rounded to fewer bits than float32" in str(report)
    assert type(report).from_dict(report.to_dict()).casts == report.casts


def reads_a_number(params, x):
    return forward(params, x) if float(x.sum()) < 1e9 else -x


def gives_an_array_of_numpy(params, x):
    return np.asarray(forward(params, x))


@pytest.mark.parametrize("function", [reads_a_number, gives_an_array_of_numpy])
def test_code_that_reads_numbers_of_what_is_traced_is_named(function):
    line = function.__code__.co_firstlineno + 1
    with pytest.raises(UsageError, match=f"test_tracing.py:{line} reads numbers of an array"):
        compare(REFERENCE, (function, ARRAYS), X)


def test_so_is_what_calls_a_model_of_jaxformer():
    reference = torch_layers.Linear(5, 7)
    with pytest.raises(UsageError, match=r"test_tracing.py:\d+ reads numbers of an array"):
        compare(
            reference, from_torch(reference), [X], jax_call=lambda model, x: float(model(*x).sum())
        )
