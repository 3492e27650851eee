"""Parameters that a conversion computes in float32 are no bug, and hide none beside them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.nn.utils.parametrizations import weight_norm

from jaxformer.parity import compare
from jaxformer.parity.matching.computed_parameters import describe_scaled
from tests.support.tiers import FULL

pytestmark = pytest.mark.usefixtures("settings_of_jax")

WIDTH = 24
ROOT = np.sqrt(np.float32(WIDTH))
X = np.random.default_rng(0).normal(size=(5, WIDTH)).astype(np.float32)


class Layers(torch.nn.Module):
    """What conversions fold: a norm's one, a weight's norm, the scales of rows, and a BatchNorm."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.Parameter(0.1 * torch.randn(WIDTH))
        self.up = weight_norm(torch.nn.Linear(WIDTH, WIDTH))
        self.down = torch.nn.Linear(WIDTH, WIDTH)
        self.scale = torch.nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.batch_norm = torch.nn.BatchNorm1d(WIDTH)
        for array in (self.batch_norm.running_var, self.batch_norm.weight.data):
            array.uniform_(0.5, 2)
        for array in (self.batch_norm.running_mean, self.batch_norm.bias.data):
            array.normal_(std=0.3)
        self.last = torch.nn.Linear(WIDTH, 7)

    def forward(self, x):
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.norm)
        x = self.scale * self.down(torch.nn.functional.silu(self.up(x)))
        return self.last(self.batch_norm(x)) / WIDTH**0.5


def converted(module):
    """The parameters of the port: each scale is part of a matrix, in float32."""
    arrays = {
        name: array.detach().numpy() for name, array in module.state_dict(keep_vars=True).items()
    }
    factor = arrays["batch_norm.weight"] / np.sqrt(
        arrays["batch_norm.running_var"] + np.float32(1e-5)
    )
    shift = arrays["batch_norm.bias"] - arrays["batch_norm.running_mean"] * factor
    return {
        "norm": 1 + arrays["norm"],
        "up": module.up.weight.detach().numpy().T,
        "up_bias": arrays["up.bias"],
        "down": (arrays["down.weight"] * (arrays["scale"] * factor)[:, None]).T,
        "down_bias": arrays["down.bias"] * arrays["scale"] * factor + shift,
        "last": arrays["last.weight"].T / ROOT,
        "last_bias": arrays["last.bias"] / ROOT,
    }


def port(activation, params, x):
    x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * params["norm"]
    x = activation(x @ params["up"] + params["up_bias"]) @ params["down"] + params["down_bias"]
    return x @ params["last"] + params["last_bias"]


def compared(activation=jax.nn.silu, **changed):
    module = Layers().eval()
    params = converted(module)
    for name, change in changed.items():
        params[name] = change(params[name]).astype(np.float32)
    return compare(module, (lambda given, x: port(activation, given, x), params), X)


def test_what_is_computed_in_float32_is_rounding():
    report = compared()
    assert report.verdict == "rounding", str(report)
    assert not report.weights
    assert report.tables


def test_a_bug_beside_them_is_found():
    report = compared(jax.nn.relu)
    assert report.verdict == "bug"
    assert report.root_causes[0].jax_source.split(":")[0].endswith("test_computed_parameters.py")


def off(array):
    return array * np.where(np.arange(array.size).reshape(array.shape) == 3, 1.001, 1)


@pytest.mark.parametrize(
    "name",
    ["norm", "down", "last", *(pytest.param(n, marks=FULL) for n in ("up", "down_bias"))],
)
def test_one_wrong_number_of_them_is_found(name):
    assert compared(**{name: off}).verdict == "bug"


def test_wrong_numbers_are_told_from_what_was_computed():
    assert compared(norm=off).weights == (
        "norm is not the add of the model: equal but for entries 3 of axis 0",
    )
    assert compared(last=off).weights == (
        "last is last.weight times a scale, but for entries 0 of axis 0",
    )


def test_a_constant_is_no_scaled_parameter():
    ones, threes = np.ones(40, np.float32), np.full(40, 3, np.float32)
    ones[3], threes[7] = 1.5, 4
    telling = np.linspace(1, 2, 40, dtype=np.float32)
    off_by_one = 3 * telling
    off_by_one[7] = 4
    found = describe_scaled(
        ["threes", "off"], {"threes": threes, "off": off_by_one}, ["ones", "line"],
        {"ones": ones, "line": telling},
    )  # fmt: skip
    assert list(found) == ["off is line times a scale, but for entries 7 of axis 0"]


def test_a_parameter_in_which_few_numbers_differ_is_that_of_the_reference():
    def linear(params, x):
        return x @ params["weight"].T + params["bias"]

    module = torch.nn.Linear(WIDTH, 3)
    params = {name: array.detach().numpy().copy() for name, array in module.named_parameters()}
    params["weight"][1, 2] = np.nextafter(params["weight"][1, 2], np.float32(9))
    report = compare(module, (linear, params), X)
    assert report.weights[0].startswith("weight is not weight: ")
