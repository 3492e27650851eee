import jax
import pytest


@pytest.fixture
def settings_of_jax():
    """Of tests with other people's code, which JAX runs with its own settings."""
    with jax.numpy_rank_promotion("allow"), jax.default_matmul_precision(None):
        yield
