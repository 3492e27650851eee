"""The ports are other people's code: JAX runs them with its own settings."""

import jax
import pytest


@pytest.fixture(autouse=True)
def with_settings_of_jax():
    with jax.numpy_rank_promotion("allow"), jax.default_matmul_precision(None):
        yield
