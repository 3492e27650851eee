"""What has no effect in the candidate is named, unless nothing is missing beside it."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare
from tests.support.ports.torch_models import perturbed

pytestmark = pytest.mark.usefixtures("settings_of_jax")

X = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)


class Masked(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 5)

    def forward(self, x, mask, unread=None):
        return self.layer(x) * mask[:, None]


def masked(p, x, mask, unread=None):
    return (x @ p["layer.weight"].T + p["layer.bias"]) * mask[:, None]


def unmasked(p, x, mask, unread=None):
    return masked(p, x, jnp.ones(4))


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("kind", [bool, np.int64])
@pytest.mark.parametrize("is_named", [True, False])
def test_an_input_that_only_the_reference_reads_is_named(kind, backward, is_named):
    model = perturbed(Masked())
    params = {name: p.detach().numpy() for name, p in model.named_parameters()}
    inputs = {"x": X, "mask": np.ones(4, kind), "unread": np.ones(4, kind)}
    given = inputs if is_named else list(inputs.values())[:2]
    report = compare(model, (unmasked, params), given, backward=backward)
    assert report.verdict == "incomplete", str(report)
    name = "mask" if is_named else "1"
    text = f"the input {name} has no effect on the results of the candidate"
    assert report.incomplete == (text,)
    report = compare(model, (masked, params), given, backward=backward)
    assert report.verdict in ("exact", "rounding"), str(report)


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5)

    def forward(self, x):
        return self.norm(self.layer(x))


def net(x, is_training):
    x = hk.Linear(5, name="layer")(x)
    return hk.BatchNorm(True, True, 0.9, eps=1e-5, name="norm")(x, is_training)


@pytest.mark.parametrize("is_fresh", [True, False])
def test_state_for_training_alone_is_no_gap(is_fresh):
    model = Normed() if is_fresh else perturbed(Normed())
    if not is_fresh:
        model.norm.running_mean.normal_()
        model.norm.running_var.uniform_(0.5, 2)
    arrays = {name: a.detach().numpy() for name, a in model.state_dict().items()}
    apply = hk.without_apply_rng(hk.transform_with_state(net))
    _, state = apply.init(jax.random.key(0), X, True)
    params = {
        "layer": {"w": arrays["layer.weight"].T, "b": arrays["layer.bias"]},
        "norm": {"scale": arrays["norm.weight"][None], "offset": arrays["norm.bias"][None]},
    }
    for own, name in (("mean", "running_mean"), ("var", "running_var")):
        mean = arrays[f"norm.{name}"][None]
        state[f"norm/~/{own}_ema"] = {
            "average": mean, "hidden": 0.9 * mean, "counter": jnp.array(5),
        }  # fmt: skip

    def candidate(given, x):
        return apply.apply(*given, x, False)[0]

    report = compare(model, (candidate, (params, state)), X)
    assert report.verdict == "rounding", str(report)
    assert any("mean_ema.hidden" in remark for remark in report.remarks)


def test_a_parameter_without_effect_is_a_gap_where_the_reference_uses_as_many():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.LayerNorm(6), torch.nn.LayerNorm(6))
    params = {name: p.detach().numpy() for name, p in model.named_parameters()}

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)

    def candidate(p, x, second="2"):
        x = norm(x @ p["0.weight"].T + p["0.bias"]) * p["1.weight"] + p["1.bias"]
        return norm(x) * p[f"{second}.weight"] + p["2.bias"]

    assert compare(model, (candidate, params), X).verdict == "rounding"
    report = compare(model, (lambda p, x: candidate(p, x, "1"), params), X, backward=False)
    assert (
        "the parameter 2.weight of the candidate has no effect on its results" in report.incomplete
    )
