"""Products of rows with the matrices of their groups: no group is computed for all rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.execution.grouped_products import _product, block_rows, grouped_product


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
    large, small = block_rows(rows, groups)
    assert (large, small) == (128, 32)
    # The rows, and those that the last block may reach into; products are of one block each.
    assert f"tensor<{rows + small}x8xf32>" in text.as_text()
    assert f"tensor<{large}x8xf32>, tensor<8x4xf32>" in text.as_text()


def test_blocks_leave_what_other_groups_made():
    """Of 37 rows a group takes blocks of 16 and 4: its last reaches into the next group's rows."""
    groups = jnp.array(np.repeat([0, 1, 2, 3], [1, 16, 37, 5]))
    random = np.random.default_rng(3)
    x = jnp.array(random.permutation(len(groups))[:, None] + 1.0)
    kernel = jnp.array([10.0, 100.0, 1000.0, 10000.0]).reshape(4, 1, 1)
    found = _product(x, kernel, groups, (16, 4))
    np.testing.assert_array_equal(found, x * kernel[groups, 0])
    gradient = jax.grad(lambda k: jnp.sum(_product(x, k, groups, (16, 4))))(kernel)
    expected = np.bincount(np.asarray(groups), np.asarray(x[:, 0]))
    np.testing.assert_array_equal(gradient[:, 0, 0], expected)
