"""Optimizers in PyTorch files: the names in their groups, their settings, and their steps.

Both moments of each parameter are the parameter itself, which shows whose they are."""

import math

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jaxformer.cli.main import main
from jaxformer.errors import CheckpointError, JaxformerError
from jaxformer.porting.checkpoint import open_checkpoint
from tests.support.tiers import full_after


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=7, hidden_size=4, intermediate_size=4, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=8,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def optimizer_of(model, start="", **settings):
    """The state of AdamW, which has the parameters in reverse and whose groups name them."""
    named = {name: p.detach() for name, p in reversed([*model.named_parameters()])}
    members = (
        [n for n, p in named.items() if p.ndim > 1],
        [n for n, p in named.items() if p.ndim < 2],
    )
    order = [name for names in members for name in names]
    state = {
        place: {"step": torch.tensor(3.0), "exp_avg": named[name], "exp_avg_sq": named[name]}
        for place, name in enumerate(order)
    }
    groups = [
        {
            "lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, **settings,
            "params": [order.index(name) for name in names],
            "param_names": [start + name for name in names],
        }
        for names in members
    ]  # fmt: skip
    return {"state": state, "param_groups": groups}


@pytest.fixture
def read(model, tmp_path):
    """Reads an optimizer beside the weights, whose names get a prefix, and other entries."""

    def save_and_read(optimizer, *, start="", **beside):
        weights = {start + name: value for name, value in model.state_dict().items()}
        config = model.config.to_dict()
        torch.save(
            {"model": weights, "optimizer": optimizer, "config": config, **beside},
            tmp_path / "model.pt",
        )
        checkpoint = open_checkpoint(tmp_path / "model.pt")
        plan = checkpoint.plan()
        found = checkpoint.optimizer_state(plan)
        for moments in found.moments.values():
            for name, tensor in plan.tensors.items():
                np.testing.assert_array_equal(moments[name].read(), tensor.read(), name)
        return found

    return save_and_read


@pytest.mark.parametrize(
    ("start", "of_weights"),
    full_after(3, [("net.", ""), ("", "model."), ("model.", "model."), ("module.net.", "model.")]),
)
def test_names_of_groups_are_used_whatever_is_before_them(read, model, start, of_weights):
    read(optimizer_of(model, start), start=of_weights)


def test_state_by_names_is_used_whatever_is_before_them(read, model):
    by_place = optimizer_of(model, "model.")
    names = [name for group in by_place["param_groups"] for name in group.pop("param_names")]
    state = {names[place]: entry for place, entry in by_place["state"].items()}
    for group in by_place["param_groups"]:
        group["params"] = [names[place] for place in group["params"]]
    read({"state": state, "param_groups": by_place["param_groups"]})


def wrong_name(groups):
    groups[0]["param_names"][0] = "head"


def twice(groups):
    groups[0]["param_names"][0] = groups[0]["param_names"][1]


def one_without_names(groups):
    del groups[1]["param_names"]


def too_few_names(groups):
    groups[0]["param_names"].pop()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wrong_name, "names parameters that the model does not have: head, without lm_head.weight"),
        (twice, "names model.layers.0.mlp.down_proj.weight more than once"),
        (one_without_names, "group 1 of the optimizer has 3 parameters and 0 param_names"),
        (too_few_names, "group 0 of the optimizer has 9 parameters and 8 param_names"),
    ],
)
def test_names_that_do_not_fit_are_rejected(read, model, change, message):
    optimizer = optimizer_of(model)
    change(optimizer["param_groups"])
    with pytest.raises(CheckpointError, match=message):
        read(optimizer)


@pytest.mark.parametrize("name", ["correct_bias", "bias_correction"])
def test_adam_without_bias_correction_is_rejected(read, model, name):
    read(optimizer_of(model, **{name: True}))
    with pytest.raises(JaxformerError, match=f"{name}=False"):
        read(optimizer_of(model, **{name: False}))


def test_settings_that_nobody_knows_are_named(read, model, tmp_path, capsys):
    other = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.OneCycleLR(other, 0.1, 10)
    settings = {k: v for k, v in other.param_groups[0].items() if k not in ("params", "lr")}
    known = {**settings, "weight_decay": 0.0, "name": "all"}
    assert not read(optimizer_of(model, **known)).note
    assert "caution" in read(optimizer_of(model, caution=True, alpha=0.0)).note
    assert main(["port", str(tmp_path / "model.pt"), str(tmp_path / "run")]) == 0
    assert "its groups set caution, which is not read" in capsys.readouterr().err


@pytest.mark.parametrize("step", full_after(2, [math.inf, 3.5, math.nan, 2.0**31, -3.0]))
def test_steps_that_cannot_be_are_rejected(read, model, step):
    optimizer = optimizer_of(model)
    optimizer["state"][0]["step"] = torch.tensor(step)
    with pytest.raises(CheckpointError, match=r"is damaged: lm_head.weight has made"):
        read(optimizer)


def without_steps(optimizer):
    for entry in optimizer["state"].values():
        del entry["step"]
    return optimizer


@pytest.mark.parametrize("step", [3, torch.tensor(3)])
def test_steps_are_counted_by_groups_too(read, model, step):
    assert read(without_steps(optimizer_of(model, step=step))).count == 3


@pytest.mark.parametrize(
    ("name", "value"),
    full_after(2, [("steps", 3), ("step", torch.tensor(3)), ("iter", 3.0), ("iteration", 3)]),
)
def test_steps_are_counted_beside_the_weights_too(read, model, name, value):
    assert read(without_steps(optimizer_of(model)), **{name: value}).count == 3


@pytest.mark.parametrize("beside", [{"epoch": 3}, {"step": torch.ones(2)}])
def test_unknown_steps_are_rejected(read, model, beside):
    with pytest.raises(CheckpointError, match=r"AdamW's state does not say .* save the number"):
        read(without_steps(optimizer_of(model)), **beside)
