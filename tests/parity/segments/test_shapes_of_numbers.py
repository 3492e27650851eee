"""A bug is found where shapes of the reference depend on numbers, so that few tries can be run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare

pytestmark = pytest.mark.usefixtures("settings_of_jax")

WIDTH, EXPERTS = 8, 4


class Mixture(torch.nn.Module):
    """Experts that are gone through in a loop, each with the tokens that were sent to it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.gate = torch.nn.Linear(WIDTH, EXPERTS)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            out.index_add_(0, token, expert(x[token]) * weights[token, slot, None])
        return out


def port(params, x, factor=1):
    weights = jax.nn.softmax(x @ params["gate.weight"].T + factor * params["gate.bias"][None])
    weights, chosen = jax.lax.top_k(weights, 2)
    shares = (jax.nn.one_hot(chosen, EXPERTS, dtype=x.dtype) * weights[..., None]).sum(1)
    out = jnp.zeros_like(x)
    for number in range(EXPERTS):
        weight, bias = (params[f"experts.{number}.{name}"] for name in ("weight", "bias"))
        out = out + shares[:, number, None] * (x @ weight.T + bias[None])
    return out


@pytest.mark.tier("full")
def test_a_wrong_router_before_a_loop_over_experts_is_named():
    reference = Mixture()
    params = {name: one.detach().numpy() for name, one in reference.named_parameters()}
    x = np.random.default_rng(0).normal(size=(12, WIDTH)).astype(np.float32)
    assert compare(reference, (port, params), x).verdict == "rounding"
    report = compare(reference, (functools.partial(port, factor=-3), params), x)
    assert [cause.diagnosis for cause in report.root_causes] == [
        "the number -3 in mul must be 1: the reference has no such step"
    ]
