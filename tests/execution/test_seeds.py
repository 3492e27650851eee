"""Keys of seeds: those of JAX below 2^32, and no two seeds have the same."""

import jax
import numpy as np
import pytest

from jaxformer.execution.seeds import seed_key


@pytest.mark.parametrize("seed", [0, 7, 2**31 + 5, 2**32 - 1])
def test_small_seeds_have_the_keys_of_jax(seed):
    assert seed_key(seed) == seed_key(np.uint32(seed)) == jax.random.key(seed)


def test_every_bit_counts():
    seeds = [0, 7, *(7 + 2**bit for bit in range(3, 63)), 2**63 - 1]
    keys = np.array([jax.random.key_data(seed_key(seed)) for seed in seeds])
    assert len(np.unique(keys, axis=0)) == len(seeds)


@pytest.mark.parametrize("x64", [False, True])
def test_the_width_of_integers_changes_no_key(x64):
    with jax.enable_x64(x64):
        found = [jax.random.key_data(seed_key(s)).tolist() for s in (7, 7 + 2**32, 7 + 2**62)]
    assert found[0] == [0, 7]
    assert found == [jax.random.key_data(seed_key(s)).tolist() for s in (7, 7 + 2**32, 7 + 2**62)]


@pytest.mark.parametrize(
    ("seed", "words"),
    [
        (-1, r"seed must be in \[0, 2\^63\): got -1"),
        (2**63, r"seed must be in \[0, 2\^63\): got 9223372036854775808"),
        (1.5, r"seed must be an integer: got 1\.5"),
        (None, "seed must be an integer: got None"),
    ],
)
def test_other_seeds_are_rejected(seed, words):
    with pytest.raises(ValueError, match=words):
        seed_key(seed)
