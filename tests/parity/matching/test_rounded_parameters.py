"""Parameters that one side keeps in 16 bits are the other's, rounded, and no bug."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from jaxformer.parity import compare

pytestmark = pytest.mark.usefixtures("settings_of_jax")

X = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)


def linear(params, x):
    return x @ params["weight"].T + params["bias"]


def make(dtype=torch.float32):
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 3)
    arrays = {n: p.detach().numpy().copy() for n, p in layer.named_parameters()}
    return layer.to(dtype), arrays


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_a_candidate_with_rounded_parameters(dtype):
    reference, arrays = make()
    rounded = {name: array.astype(dtype) for name, array in arrays.items()}
    report = compare(reference, (linear, rounded), X)
    assert report.verdict == "rounding", str(report)
    assert report.casts == (f"parameters of one side, to {np.dtype(dtype).name}: bias, weight",)
    assert report.coverage.parameters == (2, 2)
    assert report.coverage.gradients == (3, 3)
    rounded["weight"] = (arrays["weight"] * 1.01).astype(dtype)
    report = compare(reference, (linear, rounded), X)
    assert report.verdict == "bug"
    assert report.weights[0].startswith("weight is not weight: ")


def test_a_reference_with_rounded_parameters():
    reference, arrays = make(torch.bfloat16)
    report = compare(reference, (linear, arrays), X)
    assert report.verdict == "rounding", str(report)
    assert report.casts == ("parameters of one side, to bfloat16: bias, weight",)


def test_both_sides_rounded_alike_are_equal():
    reference, _ = make(torch.bfloat16)
    arrays = {n: p.detach().float().numpy() for n, p in reference.named_parameters()}
    rounded = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}
    report = compare(reference, (linear, rounded), X)
    assert report.verdict in ("exact", "rounding")
    assert not report.casts


class ThreeProjections(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (torch.nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        return torch.tanh(self.q(x)) * self.k(x) + self.v(x)


def fused(params, x):
    q, k, v = jnp.split(x @ params["kernel"] + params["bias"], 3, axis=-1)
    return jnp.tanh(q) * k + v


def fuse(module):
    of_each = [module.q, module.k, module.v]
    kernel = np.concatenate([p.weight.detach().float().numpy().T for p in of_each], axis=1)
    return {
        "kernel": kernel,
        "bias": np.concatenate([p.bias.detach().float().numpy() for p in of_each]),
    }


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_a_fused_parameter_is_rounded_in_all_its_parts(dtype):
    reference = ThreeProjections()
    x = np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32)
    rounded = {name: array.astype(dtype) for name, array in fuse(reference).items()}
    report = compare(reference, (fused, rounded), x)
    assert report.verdict == "rounding", str(report)
    assert report.casts == (f"parameters of one side, to {np.dtype(dtype).name}: bias, kernel",)
    assert report.coverage.parameters == (2, 2)
    assert report.coverage.gradients == (3, 3)
    assert report.coverage.operators == (6, 6)
    assert report.coverage.candidate_operators == (2, 2)
    rounded["kernel"][:, 7] *= dtype(1.25)
    report = compare(reference, (fused, rounded), x)
    assert report.verdict == "bug"


def test_a_reference_in_16_bits_is_fused_in_32():
    reference = ThreeProjections().bfloat16()
    x = np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32)
    wide = {name: array + np.float32(2e-4) * array for name, array in fuse(reference).items()}
    report = compare(reference, (fused, wide), x)
    assert report.verdict == "rounding", str(report)
    assert report.casts == ("parameters of one side, to bfloat16: bias, kernel",)
