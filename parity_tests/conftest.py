import jax
import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def float64():
    """Parity is first of all a statement about the mathematics: float64 is switched on."""
    threads = torch.get_num_threads()
    # The arrays are tiny: a second thread would only wait.
    torch.set_num_threads(1)
    with jax.enable_x64(True):
        yield
    torch.set_num_threads(threads)
