"""torch's products as a custom call of XLA: right ones, always the same, and clear where missing."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.execution.torch_products import FEWEST_ROWS, is_wanted, product, torch_products
from jaxformer.hardware import torch_library
from jaxformer.hardware.torch_library import UnavailableError, register_products

try:
    register_products()
    MISSING = ""
except UnavailableError as error:
    MISSING = str(error)

needs_products = pytest.mark.skipif(bool(MISSING), reason=f"torch's products: {MISSING}")
# Few rows, no multiple of anything, cut by rows, by columns, a single column, a long sum.
SHAPES = [(33, 7, 301), (256, 129, 517), (1000, 64, 48), (40, 300, 3000), (77, 50, 1), (32, 5000, 9)]


def matrices(rows, inputs, outputs, seed=0):
    random = np.random.default_rng(seed)
    return (
        random.standard_normal((rows, inputs), np.float32),
        random.standard_normal((inputs, outputs), np.float32),
        random.standard_normal((rows, outputs), np.float32),
    )


def check_product(found, a, b):
    """A sum of n products in float32 is within n roundings of the exact one (Higham, 2002, 3.1)."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    bound = a.shape[1] * np.finfo(np.float32).eps / 2 * (np.abs(a) @ np.abs(b))
    assert found.shape == bound.shape
    assert np.all(np.abs(np.asarray(found, np.float64) - a @ b) <= bound)


@needs_products
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_and_its_gradients_are_right_to_rounding(shape):
    x, kernel, dy = matrices(*shape)
    y, pull = jax.vjp(jax.jit(product), x, kernel)
    dx, dkernel = pull(jnp.asarray(dy))
    check_product(y, x, kernel)
    check_product(dx, dy, kernel.T)
    check_product(dkernel, x.T, dy)


@needs_products
def test_a_number_that_is_not_finite_comes_through():
    x, kernel, _ = matrices(64, 40, 50)
    x[3, 7], kernel[7, 9] = np.nan, np.inf
    found, expected = np.asarray(jax.jit(product)(x, kernel)), x @ kernel
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))


@needs_products
def test_many_at_once_end_and_give_the_same_bits():
    """From several threads, on several devices, each with blocks for all threads of the pool."""
    x, kernel, dy = matrices(640, 200, 300)

    def run(number):
        placed = jax.device_put((x, kernel, dy), jax.devices()[number % 4])
        return [np.asarray(a) for a in compiled(*placed)]

    @jax.jit
    def compiled(x, kernel, dy):
        y, pull = jax.vjp(product, x, kernel)
        return y, *pull(dy + y)

    first = run(0)
    with ThreadPoolExecutor(8) as threads:
        for arrays in threads.map(run, range(200)):
            for found, expected in zip(arrays, first, strict=True):
                np.testing.assert_array_equal(found, expected)


@needs_products
def test_texts_side_by_side_are_computed_one_after_the_other():
    x, kernel, _ = matrices(3 * 40, 20, 30)
    found = jax.jit(jax.vmap(product, (0, None)))(x.reshape(3, 40, 20), kernel)
    check_product(found.reshape(120, 30), x, kernel)


def test_only_float32_with_many_rows_outside_a_mesh_is_torchs():
    x, kernel = jnp.zeros((FEWEST_ROWS, 5)), jnp.zeros((5, 4))
    assert not is_wanted(x, kernel)
    with torch_products():
        assert is_wanted(x, kernel)
        assert not is_wanted(x[1:], kernel)
        assert not is_wanted(x.astype(jnp.bfloat16), kernel)
        assert not is_wanted(x, kernel.astype(jnp.bfloat16))
        with torch_products(False):
            assert not is_wanted(x, kernel)


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jaxformer" / "torch_products"


@needs_products
def test_it_is_built_once(empty_cache):
    first = torch_library._build()
    made = first.stat()
    assert torch_library._build() == first
    assert first.stat() == made
    assert [path.name for path in empty_cache.iterdir()] == [first.name]


def test_why_nothing_can_be_built_is_said(empty_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UnavailableError, match=r"^there is no C compiler$"):
        torch_library._build()
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(UnavailableError, match="cannot build the custom calls: no such flag$"):
        torch_library._build()
    assert list(empty_cache.iterdir()) == []
    empty_cache.chmod(0o777)
    with pytest.raises(UnavailableError, match="^others can write to "):
        torch_library._build()


def test_a_torch_without_mkl_is_said_to_be_so():
    library = torch_library.ctypes.CDLL(None)
    with pytest.raises(UnavailableError, match="was built without Intel's MKL$"):
        torch_library._function(library, "no_such_function_")


def test_without_torch_it_is_said(monkeypatch):
    monkeypatch.setattr(torch_library.importlib.util, "find_spec", lambda name: None)

    def missing(name):
        raise torch_library.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(torch_library.metadata, "version", missing)
    with pytest.raises(UnavailableError, match="^torch is not installed$"):
        torch_library._load_torch()


@needs_products
@pytest.mark.tier("full")
def test_torch_is_not_imported():
    code = """
import sys
from jaxformer.hardware.torch_library import register_products
register_products()
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True)
    assert done.returncode == 0, done.stderr
