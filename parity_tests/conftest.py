import pytest


@pytest.fixture(autouse=True, scope="module")
def everything_in_float64(float64):
    """Parity is first of all a statement about the mathematics."""
