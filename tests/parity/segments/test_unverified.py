"""Parameters with numbers of their own that move no result are reported, in both modes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare

pytestmark = pytest.mark.usefixtures("settings_of_jax")


class OneHead(torch.nn.Module):
    """Attention in which the bias of the keys moves no result."""

    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).split(8, -1)
        return torch.softmax(q @ k.mT / 8**0.5, -1) @ v


def one_head(params, x):
    q, k, v = (x @ params[name]["kernel"] + params[name]["bias"] for name in "qkv")
    return jax.nn.softmax(q @ k.mT / 8**0.5) @ v


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("number", [0.0, 0.5])
@pytest.mark.parametrize("bias", ["zeros", "random"])
def test_numbers_that_move_no_result_are_not_taken_for_right(bias, number, backward):
    torch.manual_seed(0)
    reference = OneHead()
    if bias == "zeros":
        torch.nn.init.zeros_(reference.qkv.bias)
    kernels = reference.qkv.weight.detach().numpy().T.reshape(8, 3, 8)
    biases = reference.qkv.bias.detach().numpy().reshape(3, 8)
    params = {
        name: {"kernel": jnp.asarray(kernels[:, i]), "bias": jnp.asarray(biases[i])}
        for i, name in enumerate("qkv")
    }
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    assert compare(reference, (one_head, params), x, backward=backward).verdict == "rounding"
    params["k"]["bias"] = jnp.full(8, number)
    report = compare(reference, (one_head, params), x, backward=backward)
    if bias == "zeros" and number == 0:
        assert report.verdict == "rounding"
    else:
        assert report.verdict == "incomplete"
        (line,) = report.incomplete
        assert "the numbers of k.bias of the candidate" in line
        assert "no result depends on them" in line


@pytest.mark.parametrize("backward", [True, False])
def test_numbers_that_the_results_show_need_no_twin(backward):
    torch.manual_seed(0)
    reference = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 3))
    first, second, bias = (p.detach().numpy().astype(np.float64) for p in reference.parameters())
    # Two matrices are one: no parameter of the reference has its numbers.
    params = {"kernel": jnp.asarray((second @ first).T), "bias": jnp.asarray(bias)}
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    report = compare(reference, (_folded, params), x, backward=backward)
    assert not any("no result depends" in line for line in report.incomplete), report.incomplete


def _folded(params, x):
    return x @ params["kernel"] + params["bias"]
