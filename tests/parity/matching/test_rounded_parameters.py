"""Parameters that one side keeps in 16 bits are the other's, rounded, and no bug."""

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
