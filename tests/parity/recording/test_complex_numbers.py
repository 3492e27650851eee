"""Complex inputs, parameters and buffers are recorded with the precision of float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare

pytestmark = pytest.mark.usefixtures("settings_of_jax")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(5, 6)).astype(np.float32)
Z = (RNG.normal(size=(5, 6)) + 1j * RNG.normal(size=(5, 6))).astype(np.complex64)


class OfInputs(torch.nn.Module):
    """Reads angles and magnitudes of complex numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = torch.nn.Linear(6, 4)

    def forward(self, z):
        z = z * torch.tensor(0.3 + 0.1j, dtype=torch.cfloat) + torch.exp(z.conj())
        return self.fc(z.angle() + z.abs() ** 2)


def of_inputs(p, z, power=2):
    z = z * jnp.complex64(0.3 + 0.1j) + jnp.exp(jnp.conj(z))
    return (jnp.angle(z) + jnp.abs(z) ** power) @ p["fc.weight"].T + p["fc.bias"]


@pytest.mark.parametrize(("power", "verdict"), [(2, "rounding"), (1, "bug")])
def test_complex_inputs(power, verdict):
    reference = OfInputs()
    params = {name: p.detach().numpy() for name, p in reference.named_parameters()}
    report = compare(reference, (lambda p, z: of_inputs(p, z, power), params), Z)
    assert report.verdict == verdict, str(report)


class OfParameters(torch.nn.Module):
    """Has complex parameters and a complex buffer, as state space models do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.kernel = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.cfloat))
        self.decay = torch.nn.Parameter(torch.randn(4, dtype=torch.cfloat))
        self.register_buffer("turn", torch.polar(torch.ones(4), torch.arange(4.0)))
        self.fc = torch.nn.Linear(4, 3)

    def forward(self, x):
        z = (x.to(torch.cfloat) @ self.kernel) * torch.exp(0.1 * self.decay) * self.turn
        return self.fc(z.real**2 + z.imag)


REFERENCE = OfParameters()
PARAMS = {name: p.detach().numpy() for name, p in REFERENCE.named_parameters()}
TURN = REFERENCE.turn.numpy()


def of_parameters(p, x, turn=TURN, factor=0.1, stop=lambda d: d):
    z = (x @ p["kernel"]) * jnp.exp(factor * stop(p["decay"])) * turn
    return (z.real**2 + z.imag) @ p["fc.weight"].T + p["fc.bias"]


def in_two(p, x):
    return of_parameters({**p, "kernel": p["real"] + 1j * p["imag"]}, x)


def transposed(p, x):
    return of_parameters({**p, "kernel": p["kernel"].T}, x)


KERNEL = PARAMS["kernel"]
WITHOUT = {name: array for name, array in PARAMS.items() if name != "kernel"}


@pytest.mark.parametrize(
    ("port", "params", "count"),
    [
        (of_parameters, PARAMS, 5),
        (lambda p, x: of_parameters(p, x, p["turn"]), {**PARAMS, "turn": TURN}, 6),
        (transposed, {**PARAMS, "kernel": KERNEL.T}, 5),
        (in_two, {**WITHOUT, "real": KERNEL.real.copy(), "imag": KERNEL.imag.copy()}, 6),
    ],
)
def test_complex_parameters(port, params, count):
    report = compare(REFERENCE, (port, params), X)
    assert report.verdict == "rounding", str(report)
    assert report.coverage.gradients[1] == count
    assert report.coverage.gradients[0] == count - ("turn" in params)


def test_wrong_complex_numbers_and_gradients_are_found():
    wrong = {**PARAMS, "decay": 1.5 * PARAMS["decay"]}
    (message,) = compare(REFERENCE, (of_parameters, wrong), X).weights
    assert message == "decay is not decay: it is 1.5 times the reference's"
    for changes in ({"factor": 0.2}, {"turn": TURN.conj()}):
        port = lambda p, x, changes=changes: of_parameters(p, x, **changes)  # noqa: E731
        assert compare(REFERENCE, (port, PARAMS), X).verdict == "bug", changes
    port = lambda p, x: of_parameters(p, x, stop=jax.lax.stop_gradient)  # noqa: E731
    (cause,) = compare(REFERENCE, (port, PARAMS), X).root_causes
    assert cause.is_backward
