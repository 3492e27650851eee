"""What PyTorch's kernels for float64 round to float32 is computed in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare
from tests.support.ports.torch_models import perturbed

pytestmark = pytest.mark.usefixtures("settings_of_jax")

X = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)

FUNCTIONS = {
    "hardsigmoid": (torch.nn.Hardsigmoid(), jax.nn.hard_sigmoid),
    "hardswish": (torch.nn.Hardswish(), jax.nn.hard_swish),
    "elu": (torch.nn.ELU(0.7), lambda x: jax.nn.elu(x, 0.7)),
    "celu": (torch.nn.CELU(1.7), lambda x: jax.nn.celu(x, 1.7)),
    "celu exactly": (torch.nn.CELU(0.5), lambda x: jax.nn.celu(x, 0.5)),
    "celu in place": (torch.nn.CELU(1.7, inplace=True), lambda x: jax.nn.celu(x, 1.7)),
    "digamma": (
        lambda x: torch.digamma(torch.exp(x) + 0.5),
        lambda x: jax.scipy.special.digamma(jnp.exp(x) + 0.5),
    ),
}


class Between(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.first, self.last = torch.nn.Linear(7, 6), torch.nn.Linear(6, 3)
        self.function = function

    def forward(self, x):
        return self.last(self.function(self.first(x)))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_float64(name):
    function, port = FUNCTIONS[name]

    def candidate(p, x):
        hidden = port(x @ p["first.weight"].T + p["first.bias"])
        return hidden @ p["last.weight"].T + p["last.bias"]

    model = perturbed(Between(function))
    arrays = {name: array.detach().numpy() for name, array in model.named_parameters()}
    report = compare(model, (candidate, arrays), X)
    assert report.verdict == "rounding", str(report)
