"""Gated feed-forwards by group are those of each row alone, and so are their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.execution.grouped_feed_forward import Kernels, grouped_feed_forward
from tests.support.tiers import full_after


def activate(gate, up, biases, keep):
    for_gate, for_up = map(jnp.atleast_2d, biases)
    hidden = jnp.tanh(gate + for_gate) * (up + for_up)
    return hidden if keep is None else jnp.where(keep, 2 * hidden, 0)


def one_by_one(x, kernels, biases, keep, groups, activate):
    """Computes each row with its own group's matrices; a row of no group is not computed."""
    gate, up, down = (kernel[groups] for kernel in kernels)
    gate, up = jnp.einsum("rd,rdf->rf", x, gate), jnp.einsum("rd,rdf->rf", x, up)
    hidden = activate(gate, up, [bias[groups] for bias in biases], keep)
    return jnp.einsum("rf,rfd->rd", hidden, down)


@pytest.mark.parametrize("has_mask", full_after(1, [True, False]))
@pytest.mark.parametrize(
    ("rows", "num_groups", "used"), full_after(1, [(130, 5, 4), (61, 3, 1), (1, 4, 4)])
)
def test_values_and_gradients_are_those_of_each_row_alone(rows, num_groups, used, has_mask):
    random = np.random.default_rng(rows)
    with jax.enable_x64(True):

        def draw(*shape):
            return jnp.array(random.standard_normal(shape))

        kernels = Kernels(*(draw(num_groups, *of) for of in ((3, 7), (3, 7), (7, 3))))
        given = draw(rows, 3), kernels, [draw(num_groups, 7), draw(num_groups, 7)]
        keep = jnp.array(random.random((rows, 7)) < 0.5) if has_mask else None
        groups = jnp.array(np.sort(random.integers(0, used, rows)))
        weights = draw(rows, 3)

        def total(function, *given):
            return jnp.sum(function(*given, keep, groups, activate) * weights)

        def differentiate(function):
            return jax.jit(jax.value_and_grad(lambda *given: total(function, *given), (0, 1, 2)))

        found = differentiate(grouped_feed_forward)(*given)
        wanted = differentiate(one_by_one)(*given)
        without_gradient = total(grouped_feed_forward, *given)
    np.testing.assert_array_equal(without_gradient, found[0])
    for here, there in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(here, there, rtol=0, atol=1e-12 * np.abs(there).max())


@pytest.mark.tier("full")
def test_rows_of_no_group_change_no_gradient():
    """As those are whose expert is on another device."""
    random = np.random.default_rng(0)
    kernels = Kernels(*(random.standard_normal((2, 3, 3), np.float32) for _ in range(3)))
    biases = [np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)]
    x = random.standard_normal((6, 3), np.float32)

    def differentiate(groups):
        groups = jnp.array(groups)

        def total(*given):
            y = grouped_feed_forward(*given, None, groups, activate)
            return jnp.sum(jnp.where((groups < 2)[:, None], y, 0))

        return jax.grad(total, (0, 1, 2))(x[: len(groups)], kernels, biases)

    to_x, *to_groups = differentiate([0, 0, 1, 2, 2, 2])
    wanted_to_x, *wanted = differentiate([0, 0, 1])
    np.testing.assert_allclose(to_x[:3], wanted_to_x, rtol=1e-6)
    np.testing.assert_array_equal(to_x[3:], 0)
    for here, there in zip(jax.tree.leaves(to_groups), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-6, atol=1e-6)
