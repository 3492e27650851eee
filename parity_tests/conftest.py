import jax
import pytest
import torch


@pytest.fixture(autouse=True)
def float64():
    """Parity is first of all a statement about the mathematics: float64 is switched on."""
    before = torch.get_default_dtype()
    with jax.enable_x64(True):
        yield
    torch.set_default_dtype(before)
