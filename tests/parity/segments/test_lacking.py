"""Parameters of zeros and ones that the candidate lacks are named; equal counts are fine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare

pytestmark = pytest.mark.usefixtures("settings_of_jax")

D = 6
X = np.random.default_rng(0).normal(size=(3, 5, D)).astype(np.float32)


class Fresh(torch.nn.Module):
    """Layers as they are before training: biases are zeros, norms are ones and zeros."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(D) for _ in range(3)])
        self.qkv, self.out = torch.nn.Linear(D, 3 * D), torch.nn.Linear(D, D)
        self.again, self.head = self.out, torch.nn.Linear(D, 3)
        for layer in (self.qkv, self.out, self.head):
            torch.nn.init.zeros_(layer.bias)

    def forward(self, x):
        q, k, v = self.qkv(self.norms[0](x)).split(D, -1)
        x = x + self.again(self.out(torch.softmax(q @ k.mT, -1) @ v))
        return self.head(self.norms[2](torch.tanh(self.norms[1](x))))


def parameters_of(model):
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


def norm(x, weight=None, bias=None):
    x = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def dense(p, name, x):
    x = x @ p[f"{name}.weight"].T
    return x + p[f"{name}.bias"] if f"{name}.bias" in p else x


def port(p, x):
    """Leaves out what is not in the parameters."""
    norms = [(p.get(f"norms.{i}.weight"), p.get(f"norms.{i}.bias")) for i in range(3)]
    q, k, v = jnp.split(dense(p, "qkv", norm(x, *norms[0])), 3, -1)
    x = x + dense(p, "out", dense(p, "out", jax.nn.softmax(q @ k.mT) @ v))
    return dense(p, "head", norm(jnp.tanh(norm(x, *norms[1])), *norms[2]))


def stacked(p, x):
    norms = {f"norms.{i}.{n}": p[n][i] for i in range(3) for n in ("weight", "bias")}
    return port({"out.weight": p["out"], "out.bias": p["zeros"], **norms, **p["rest"]}, x)


def one_plus(p, x):
    """Scales are stored without their one, as in Gemma."""
    return port({n: a + 1 if n[:1] == "n" and n.endswith("weight") else a for n, a in p.items()}, x)


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize(
    "names",
    [
        ("out.bias",),
        ("norms.1.weight",),
        ("norms.2.bias",),
        ("norms.0.weight", "norms.0.bias"),
        tuple(f"norms.{i}.{name}" for i in range(3) for name in ("weight", "bias")),
    ],
)
def test_what_the_candidate_lacks_is_named(names, backward):
    model = Fresh()
    params = {n: a for n, a in parameters_of(model).items() if n not in names}
    report = compare(model, (port, params), X, backward=backward)
    assert report.verdict == "incomplete", str(report)
    (line,) = report.incomplete
    assert line.startswith(f"the candidate lacks {len(names) * D} of the numbers of "), line
    if backward:
        listed = line.partition("numbers of ")[2].partition(" of the reference")[0]
        assert set(listed.partition(" and ")[0].split(", ")) <= set(names)


@pytest.mark.parametrize("backward", [True, False])
def test_equal_counts_are_fine_in_any_form(backward):
    model = Fresh()
    params = parameters_of(model)
    weights, biases = (
        np.stack([params[f"norms.{i}.{name}"] for i in range(3)]) for name in ("weight", "bias")
    )
    split = {
        "rest": {name: a for name, a in params.items() if name.startswith(("qkv", "head"))},
        "out": params["out.weight"], "zeros": params["out.bias"], "weight": weights, "bias": biases,
    }  # fmt: skip
    less = {n: a - 1 if n[:1] == "n" and n.endswith("weight") else a for n, a in params.items()}
    held = {n: a for n, a in params.items() if n.startswith(("qkv", "out", "head"))}
    rest = {n: a for n, a in params.items() if n not in held}
    for candidate in (
        (port, params),
        (stacked, split),
        (one_plus, less),
        # What the code holds is no parameter, and remarked.
        (lambda p, x: port({**p, **rest}, x), held),
    ):
        report = compare(model, candidate, X, backward=backward)
        assert report.verdict == "rounding", str(report)


def test_a_fresh_batch_norm_is_whole():
    model = torch.nn.Sequential(torch.nn.Linear(D, 7), torch.nn.BatchNorm1d(7)).eval()
    params = {n: a.numpy() for n, a in model.state_dict().items() if a.is_floating_point()}

    def candidate(p, x):
        x = (dense(p, "0", x) - p["1.running_mean"]) / jnp.sqrt(p["1.running_var"] + 1e-5)
        return x * p["1.weight"] + p["1.bias"]

    report = compare(model, (candidate, params), X[0])
    assert report.verdict == "rounding", str(report)


class Adapter(torch.nn.Module):
    """Ends in zeros, so that it starts as nothing."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.down, self.up = torch.nn.Linear(D, 4), torch.nn.Linear(4, D)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return x + self.up(torch.tanh(self.down(x)))


def test_what_zeros_hide_is_named_where_gradients_are_not_compared():
    model = Adapter()

    def candidate(p, x, function=jnp.tanh):
        return x + dense(p, "up", function(dense(p, "down", x)))

    def wrong(p, x):
        return candidate(p, x, jnp.sin)

    params = parameters_of(model)
    assert compare(model, (candidate, params), X, backward=False).verdict == "rounding"
    assert compare(model, (wrong, params), X).verdict == "bug"
    report = compare(model, (wrong, params), X, backward=False)
    assert report.verdict == "incomplete", str(report)
    assert "of up reads was not found equal, and its weights are zeros" in report.incomplete[0]
