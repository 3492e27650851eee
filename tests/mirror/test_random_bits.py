"""The numbers behind dropout: uniform, independent, and the same for any cut of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.layers import Dropout, random_bits

pytestmark = pytest.mark.optimized

SHAPE = (37, 3, 61, 59)


def bits(seed=0, shape=SHAPE):
    return np.asarray(random_bits(jax.random.key(seed), shape))


def correlation(one, other):
    return np.corrcoef(one.ravel(), other.ravel())[0, 1]


def test_every_bit_is_set_in_half_of_the_numbers():
    numbers = bits().ravel()
    shares = [np.mean((numbers >> np.uint32(bit)) & 1) for bit in range(32)]
    # Five standard deviations of a share of n fair bits.
    np.testing.assert_allclose(shares, 0.5, rtol=0, atol=2.5 / np.sqrt(numbers.size))


@pytest.mark.parametrize("rate", [0.1, 0.2, 0.5])
def test_neighbours_along_every_axis_are_kept_independently(rate):
    keep = bits() < np.uint32((1 - rate) * 2**32)
    sigma = np.sqrt(rate * (1 - rate) / keep.size)
    assert abs(keep.mean() - (1 - rate)) < 5 * sigma
    for axis, length in enumerate(SHAPE):
        for lag in {1, 2, length // 2, length - 1}:
            first = np.take(keep, range(length - lag), axis)
            second = np.take(keep, range(lag, length), axis)
            assert abs(correlation(first, second)) < 5 / np.sqrt(first.size), (axis, lag)


def test_keys_that_differ_in_one_bit_give_unrelated_numbers():
    data = np.asarray(jax.random.key_data(jax.random.key(3)))
    base = np.asarray(random_bits(jax.random.wrap_key_data(data), SHAPE))
    for word in range(2):
        for bit in range(0, 32, 5):
            other = data.copy()
            other[word] ^= np.uint32(1 << bit)
            numbers = np.asarray(random_bits(jax.random.wrap_key_data(other), SHAPE))
            assert abs(correlation(base, numbers)) < 5 / np.sqrt(base.size), (word, bit)


def test_sums_over_blocks_have_the_variance_of_independent_numbers():
    keep = (bits(1, (4096, 1024)) < np.uint32(0.8 * 2**32)).astype(float)
    sums = keep.sum(axis=1)
    # The variance of 4096 sums has a relative standard deviation of sqrt(2 / 4095).
    assert abs(sums.var() / (1024 * 0.8 * 0.2) - 1) < 5 * np.sqrt(2 / 4095)


def test_the_parts_of_a_batch_are_what_the_whole_has():
    key = jax.random.key(9)
    whole = random_bits(key, (8, 5, 7))
    parts = [random_bits(key, (2, 5, 7), jnp.int32(first)) for first in range(0, 8, 2)]
    assert (whole == jnp.concatenate(parts)).all()


def test_a_rate_near_zero_or_one_is_still_a_rate():
    for rate in (1e-9, 1 - 1e-9):
        dropout = Dropout(rate)
        dropout.key = jax.random.key(1)
        assert dropout.keep((1000,)).mean() == round(1 - rate)


def test_a_part_of_the_mask_is_that_of_the_whole():
    dropout, shape, first, sizes = Dropout(0.4), (4, 3, 11, 13), (2, 1, 5, 6), (1, 2, 4, 7)
    dropout.key, dropout.first_row = jax.random.key(3), jnp.int32(6)
    places = tuple(slice(start, start + size) for start, size in zip(first, sizes, strict=True))
    part = jax.jit(lambda starts: dropout.keep_part(shape, starts, sizes))
    whole = dropout.keep(shape)
    assert (part([jnp.int32(start) for start in first]) == whole[places]).all()
    dropout.keep_mask = ~whole
    assert (dropout.keep_part(shape, [jnp.int32(n) for n in first], sizes) == ~whole[places]).all()
    assert Dropout(0.0).keep_part(shape, first, sizes) is None
