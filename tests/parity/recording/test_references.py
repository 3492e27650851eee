"""References in the forms that PyTorch has: compared, or one line says what to give instead."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.errors import UsageError
from jaxformer.parity import compare

pytestmark = pytest.mark.usefixtures("settings_of_jax")

X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(6, 8), torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.down(torch.nn.functional.silu(self.up(x)))


class Profiled(Model):
    def forward(self, x):
        with torch.profiler.record_function("model"):
            return super().forward(x)


class ByRow(Model):
    def forward(self, x):
        return torch.func.vmap(super().forward)(x)


class Compiled(torch.nn.Module):
    """As ``torch.compile`` wraps a module, whose compiler takes seconds to import."""

    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


class Computed(Model):
    def __init__(self):
        super().__init__()
        self.doubled = self.up.weight * 2


def arrays(module):
    return {name: array.detach().numpy() for name, array in module.state_dict().items()}


def port(p, x):
    return jax.nn.silu(x @ p["up.weight"].T + p["up.bias"]) @ p["down.weight"].T + p["down.bias"]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: Profiled(),
        lambda: ByRow(),
        lambda: Compiled(Model()),
        lambda: torch.nn.DataParallel(Model()),
        lambda: torch.nn.DataParallel(Compiled(Model())),
    ],
)
def test_it_is_compared(wrap):
    report = compare(wrap(), (port, arrays(Model())), X)
    assert report.verdict == "rounding", str(report)
    assert report.coverage.gradients == (5, 5)


def normed(p, x):
    v = p["up.weight_v"]
    weight = p["up.weight_g"] * v / jnp.linalg.norm(v, axis=1, keepdims=True)
    return port({**p, "up.weight": weight}, x)


def test_a_weight_that_each_call_computes():
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.nn.utils.weight_norm(model.up)
    report = compare(model, (normed, arrays(model)), X)
    assert report.verdict == "rounding", str(report)
    assert report.coverage.gradients == (6, 6)


def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nn.Sequential(torch.jit.script(torch.nn.Linear(6, 3)))


def lazy():
    return torch.nn.Sequential(torch.nn.LazyLinear(3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (scripted, "0 was made by torch.jit, which hides its operators: give the module that"),
        (lazy, "weight of 0, a LazyLinear, has no numbers yet: call the reference on the inputs"),
        (Computed, r"doubled of the reference was computed of parameters .* or detach\(\) it"),
    ],
)
def test_it_is_said_what_to_give_instead(make, message):
    with pytest.raises(UsageError, match=message):
        compare(make(), (port, {}), X)
