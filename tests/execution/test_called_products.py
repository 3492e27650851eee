"""Products as custom calls of XLA, jaxformer's and torch's: right, and always the same."""

import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.execution.called_products import (
    FEWEST_ROWS,
    grouped,
    product,
    products_of,
    scores,
    wanted_library,
    weighted,
)
from jaxformer.execution.sharding import layout
from jaxformer.hardware import matrix_products, torch_library
from jaxformer.hardware.custom_call_builds import UnavailableError
from jaxformer.hardware.matrix_products import LIBRARIES, check_products, register_products
from tests.support.narrow_calls import register_narrow

# Why the products of a library cannot be used here.
MISSING = {}
for _library in LIBRARIES:
    try:
        register_products(_library)
    except UnavailableError as error:
        MISSING[_library] = str(error)
        if "cannot build" in str(error):  # a compiler that fails is an error of the source
            raise


def needs_products(library):
    why = MISSING.get(library, "")
    return pytest.mark.skipif(bool(why), reason=f"{library}'s products: {why}")


_EACH = [pytest.param(name, marks=needs_products(name)) for name in LIBRARIES]
for_each_library = pytest.mark.parametrize("library", _EACH)
# jaxformer's for registers of half the width, which this processor has too.
NARROW = "narrow"


@pytest.fixture(params=[*_EACH, NARROW])
def each_build(request):
    """A library, or jaxformer's own built for narrower registers."""
    if request.param == NARROW:
        register_narrow(matrix_products.NAME, matrix_products._FORMS, "jaxformer_")
    return request.param


# Few rows, no multiple of anything, cut by rows, by columns, a single column, a long sum, several
# blocks of rows, columns and terms, no rows, columns or terms.
SHAPES = [
    (33, 7, 301),
    (256, 129, 517),
    (1000, 64, 48),
    (40, 300, 3000),
    (77, 50, 1),
    (32, 5000, 9),
    (66, 400, 225),
    (210, 500, 1700),
    (0, 5, 6),
    (4, 0, 6),
    (4, 5, 0),
]


def matrices(rows, inputs, outputs, seed=0):
    random = np.random.default_rng(seed)
    return (
        random.standard_normal((rows, inputs), np.float32),
        random.standard_normal((inputs, outputs), np.float32),
        random.standard_normal((rows, outputs), np.float32),
    )


def multiply_by(library):
    return jax.jit(functools.partial(product, library))


def check_product(found, a, b):
    """A sum of n products in float32 is within n roundings of the exact one (Higham, 2002, 3.1)."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    bound = a.shape[1] * np.finfo(np.float32).eps / 2 * (np.abs(a) @ np.abs(b))
    assert found.shape == bound.shape
    assert np.all(np.abs(np.asarray(found, np.float64) - a @ b) <= bound)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_and_its_gradients_are_right_to_rounding(shape, each_build):
    x, kernel, dy = matrices(*shape)
    y, pull = jax.vjp(multiply_by(each_build), x, kernel)
    dx, dkernel = pull(jnp.asarray(dy))
    check_product(y, x, kernel)
    check_product(dx, dy, kernel.T)
    check_product(dkernel, x.T, dy)


@for_each_library
def test_a_number_that_is_not_finite_comes_through(library):
    x, kernel, _ = matrices(64, 40, 50)
    x[3, 7], kernel[7, 9] = np.nan, np.inf
    found, expected = np.asarray(multiply_by(library)(x, kernel)), x @ kernel
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))


@for_each_library
def test_many_at_once_end_and_give_the_same_bits(library):
    """From several threads, on several devices, each with blocks for all threads of the pool."""
    x, kernel, dy = matrices(640, 200, 300)

    def run(number):
        placed = jax.device_put((x, kernel, dy), jax.devices()[number % 4])
        return [np.asarray(a) for a in compiled(*placed)]

    @jax.jit
    def compiled(x, kernel, dy):
        y, pull = jax.vjp(multiply_by(library), x, kernel)
        return y, *pull(dy + y)

    first = run(0)
    with ThreadPoolExecutor(8) as threads:
        for arrays in threads.map(run, range(200)):
            for found, expected in zip(arrays, first, strict=True):
                np.testing.assert_array_equal(found, expected)


@for_each_library
def test_texts_side_by_side_are_computed_one_after_the_other(library):
    x, kernel, _ = matrices(3 * 40, 20, 30)
    found = jax.jit(jax.vmap(multiply_by(library), (0, None)))(x.reshape(3, 40, 20), kernel)
    check_product(found.reshape(120, 30), x, kernel)


HEADS = [(3, 5, 7, 4, 2, 6), (2, 33, 65, 6, 1, 16), (1, 128, 128, 3, 3, 64), (5, 1, 9, 2, 2, 8)]


@pytest.mark.parametrize("unused", [0, 3])
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_products_of_heads_and_their_gradients_are_right_to_rounding(shape, unused, each_build):
    """Beside einsum in float64; heads of queries that share one of keys add up their gradients.

    Keys that are not used have gradients of zeros.
    """
    batch, queries, keys, heads, key_heads, width = shape
    random = np.random.default_rng(0)
    q = random.standard_normal((batch, queries, heads, width), np.float32)
    tokens = random.standard_normal((batch, keys + unused, key_heads, width), np.float32)
    k = tokens[:, :keys]
    p = random.standard_normal((batch, heads, queries, keys), np.float32)

    def in_float64(sign, q, k, p):
        """With absolute values in place of all numbers, what the bounds are made of."""
        q, k, p = (np.abs(x) if sign else x for x in (q, k, p))
        k = np.repeat(k, heads // key_heads, axis=2)
        return np.einsum("btnh,bsnh->bnts", q, k), np.einsum("bnts,bsnh->btnh", p, k)

    def share(x):
        return x.reshape(batch, keys, key_heads, -1, width).sum(axis=3)

    s, pull = jax.vjp(jax.jit(lambda q, k: scores(each_build, q, k, keys)), q, tokens)
    dq, dk = pull(jnp.asarray(p))
    o, pull = jax.vjp(jax.jit(functools.partial(weighted, each_build)), p, tokens)
    dp, dv = pull(jnp.asarray(q))
    assert not np.any(dk[:, keys:])
    assert not np.any(dv[:, keys:])
    dk, dv = dk[:, :keys], dv[:, :keys]
    wide = [x.astype(np.float64) for x in (q, k, p)]
    expected, bounds = in_float64(False, *wide), in_float64(True, *wide)
    back = [share(np.einsum("bnts,btnh->bsnh", f(wide[2]), f(wide[0]))) for f in (np.copy, np.abs)]
    eps = np.finfo(np.float32).eps / 2
    for found, exact, size, terms in (
        (s, expected[0], bounds[0], width),
        (dp, expected[0], bounds[0], width),
        (o, expected[1], bounds[1], keys),
        (dq, expected[1], bounds[1], keys),
        (dk, *back, queries * heads // key_heads),
        (dv, *back, queries * heads // key_heads),
    ):
        assert found.shape == exact.shape
        assert np.all(np.abs(np.asarray(found, np.float64) - exact) <= terms * eps * size)


@pytest.mark.parametrize("counts", [(7, 0, 40, 1), (0, 0, 0, 0), (64, 0, 0, 0)], ids=str)
@pytest.mark.parametrize("others", [0, 9])
def test_products_of_groups_and_their_gradients_are_right_to_rounding(counts, others, each_build):
    """Groups without rows have gradients of zeros, and rows of no group get and give zeros."""
    inputs, outputs, used = 19, 37, sum(counts)
    x, _, dy = matrices(used + others, inputs, outputs)
    kernel = np.random.default_rng(1).standard_normal((len(counts), inputs, outputs), np.float32)
    dy[used:] = 0
    first = np.cumsum([0, *counts], dtype=np.int32)
    y, pull = jax.vjp(jax.jit(lambda x, kernel: grouped(each_build, x, kernel, first)), x, kernel)
    dx, dkernel = pull(jnp.asarray(dy))
    for group, begin in enumerate(first[:-1]):
        rows = slice(begin, first[group + 1])
        check_product(y[rows], x[rows], kernel[group])
        check_product(dx[rows], dy[rows], kernel[group].T)
        check_product(dkernel[group], x[rows].T, dy[rows])
    assert not np.any(y[used:])
    assert not np.any(dx[used:])


def test_only_float32_outside_a_mesh_is_a_custom_call():
    x, kernel = jnp.zeros((FEWEST_ROWS, 5)), jnp.zeros((5, 4))
    assert wanted_library(x, kernel) is None
    with products_of("jaxformer"):
        assert wanted_library(x, kernel) == "jaxformer"
        assert wanted_library(x.astype(jnp.bfloat16), kernel) is None
        assert wanted_library(x, kernel.astype(jnp.bfloat16)) is None
        with products_of("torch"):
            assert wanted_library(x, kernel) == "torch"
        with products_of(None):
            assert wanted_library(x, kernel) is None
    with products_of("jaxformer"), layout(object()):
        assert wanted_library(x, kernel) is None


@needs_products("jaxformer")
def test_a_number_does_not_depend_on_what_is_computed_beside_it():
    """Tiles have other rows and columns, and threads other parts, where there are more of them."""
    x, kernel, _ = matrices(513, 401, 333)
    multiply, rows, columns = multiply_by("jaxformer"), slice(67, 190), slice(128, 171)
    whole, part = multiply(x, kernel), multiply(x[rows], kernel[:, columns])
    np.testing.assert_array_equal(whole[rows, columns], part)


def test_custom_calls_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("JAXFORMER_CUSTOM_CALLS", "off")
    with pytest.raises(UnavailableError, match=r"^JAXFORMER_CUSTOM_CALLS is off$"):
        check_products("jaxformer")


def test_a_torch_without_mkl_is_said_to_be_so():
    library = torch_library.ctypes.CDLL(None)
    with pytest.raises(UnavailableError, match=r"was built without Intel's MKL$"):
        torch_library._function(library, "no_such_function_")


def test_without_torch_it_is_said(monkeypatch):
    monkeypatch.setattr(torch_library.importlib.util, "find_spec", lambda name: None)

    def missing(name):
        raise torch_library.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(torch_library.metadata, "version", missing)
    with pytest.raises(UnavailableError, match=r"^torch is not installed$"):
        torch_library._load_torch()


@needs_products("torch")
@pytest.mark.tier("full")
def test_torch_is_not_imported():
    code = """
import sys
from jaxformer.hardware.matrix_products import register_products
register_products("torch")
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True)
    assert done.returncode == 0, done.stderr
