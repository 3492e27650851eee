"""Products of rows with the matrices of their groups: no group is computed for all rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.execution.grouped_products import block_rows, grouped_product


@pytest.mark.parametrize(("rows", "groups", "used"), [(1, 4, 4), (61, 3, 1), (130, 5, 4)])
def test_each_row_is_multiplied_by_the_matrix_of_its_group(rows, groups, used):
    random = np.random.default_rng(rows)
    with jax.enable_x64(True):
        x = jnp.array(random.standard_normal((rows, 3)))
        kernel = jnp.array(random.standard_normal((groups, 3, 2)))
        weights = jnp.array(random.standard_normal((rows, 2)))
        which = jnp.array(random.integers(0, used, rows))

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


def test_rows_of_zeros_are_fewer_than_rows():
    rows, groups = 4096, 16
    text = jax.jit(lambda x, k, g: grouped_product(x, k, g)).lower(
        jax.ShapeDtypeStruct((rows, 8), np.float32),
        jax.ShapeDtypeStruct((groups, 8, 4), np.float32),
        jax.ShapeDtypeStruct((rows,), np.int32),
    )
    size = block_rows(rows, groups)
    assert size == 128
    # The rows in blocks are of this number; a product for every group would have 16 times as many.
    assert f"tensor<{rows + groups * size}x8xf32>" in text.as_text()
