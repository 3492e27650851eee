"""Products of rows with the matrices of their groups: no group is computed for all rows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.execution.grouped_products import _product, block_sizes, grouped_product


@pytest.mark.parametrize(("rows", "groups", "used"), [(1, 4, 4), (61, 3, 1), (130, 5, 4)])
def test_each_row_is_multiplied_by_the_matrix_of_its_group(rows, groups, used):
    random = np.random.default_rng(rows)
    with jax.enable_x64(True):
        x = jnp.array(random.standard_normal((rows, 3)))
        kernel = jnp.array(random.standard_normal((groups, 3, 2)))
        weights = jnp.array(random.standard_normal((rows, 2)))
        which = jnp.array(np.sort(random.integers(0, used, rows)))

        def total(x, kernel, product):
            return jnp.sum(product(x, kernel) * weights)

        found = jax.jit(
            jax.value_and_grad(
                lambda x, k: total(x, k, lambda x, k: grouped_product(x, k, which)), (0, 1)
            )
        )(x, kernel)
        wanted = jax.value_and_grad(
            lambda x, k: total(x, k, lambda x, k: jnp.einsum("ri,rio->ro", x, k[which])), (0, 1)
        )(x, kernel)
    for here, there in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(here, there, rtol=0, atol=1e-12 * np.abs(there).max())


def test_no_group_is_computed_for_all_rows():
    rows, groups = 4096, 16
    text = jax.jit(lambda x, k, g: grouped_product(x, k, g)).lower(
        jax.ShapeDtypeStruct((rows, 8), np.float32),
        jax.ShapeDtypeStruct((groups, 8, 4), np.float32),
        jax.ShapeDtypeStruct((rows,), np.int32),
    )
    sizes = block_sizes(rows, groups)
    assert sizes == tuple(range(24, 385, 24))
    # Each product is of one block.
    products = re.findall(r"\(tensor<(\d+)x8xf32>, tensor<8x4xf32>\)", text.as_text())
    assert {int(size) for size in products} == set(sizes)


@pytest.mark.parametrize("sizes", [(4, 8, 12, 16), (1,), (16,), (7, 14)])
def test_blocks_leave_what_other_groups_made(sizes):
    """Blocks reach into the rows of the next group, and the last group's into those before it."""
    groups = jnp.array(np.repeat([0, 1, 2, 3, 5], [1, 16, 37, 5, 2]))
    random = np.random.default_rng(3)
    x = jnp.array(random.permutation(len(groups))[:, None] + 1.0)
    kernel = jnp.array([10.0, 100.0, 1000.0, 10000.0, 1.0, 5.0]).reshape(6, 1, 1)
    found = _product(x, kernel, groups, sizes)
    np.testing.assert_array_equal(found, x * kernel[groups, 0])
    gradient = jax.grad(lambda k: jnp.sum(_product(x, k, groups, sizes)))(kernel)
    expected = np.bincount(np.asarray(groups), np.asarray(x[:, 0]), minlength=6)
    np.testing.assert_array_equal(gradient[:, 0, 0], expected)


def test_there_is_a_block_for_each_number_of_rows():
    for rows, groups in [(1, 1), (1, 64), (7, 2), (32, 8), (4096, 8), (100, 3), (513, 1)]:
        sizes = block_sizes(rows, groups)
        assert list(sizes) == sorted(set(sizes))
        assert 1 <= sizes[0] <= sizes[-1] <= rows
