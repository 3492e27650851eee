"""Runs with the optimizers beside AdamW: saved, resumed, planned, and carried to PyTorch."""

import dataclasses

import jax
import numpy as np
import pytest
import torch

import torch_ref.config
import torch_ref.train_step
import torch_ref.transformer_lm
from jaxformer.checkpoints import CheckpointFolder
from jaxformer.cli.main import main
from jaxformer.config import OptimizerConfig
from jaxformer.config_optimizers import OPTIMIZERS
from jaxformer.optimizers import make_optimizer
from jaxformer.parameters import abstract
from jaxformer.planning.step_model import estimate_step
from jaxformer.training.config import TrainConfig
from jaxformer.training.memory import count_matrices, least_bytes
from jaxformer.training.run_folder import stored_config
from jaxformer.transformer_lm import TransformerLM
from tests.support import meshes
from tests.support.tiers import full_after
from tests.support.tiny import resume, same_run, train

OTHERS = ["muon", "lion", "adafactor", "sgd"]
MORE = ["--steps", 20, "--decay-steps", 20]


@pytest.fixture
def run(text, capsys):
    def make(out, *more):
        assert train(text, out, *MORE, *more) == 0
        capsys.readouterr()

    return make


@pytest.mark.parametrize("name", full_after(0, OTHERS, slow_after=2))
def test_ten_steps_and_ten_more_are_twenty(name, run):
    run("whole", "--optimizer", name)
    run("cut", "--optimizer", name, "--steps", 10)
    assert resume("cut", "--steps", 20) == 0
    same_run("cut", "whole", 20)
    arrays, _ = CheckpointFolder("whole/checkpoints").restore(20)
    assert arrays.keys() == {"parameters", "step", *OPTIMIZERS[name].moments}
    assert stored_config("whole").optimizer.optimizer == name


def test_a_run_keeps_its_optimizer(run, refuse):
    run("out", "--optimizer", "sgd", "--steps", 10)
    words = ["a resumed run must keep optimizer.optimizer (sgd -> lion)"]
    refuse(["train", "--resume", "--out", "out", "--optimizer", "lion"], 2, *words)


@pytest.mark.tier("full")
def test_the_state_of_another_optimizer_is_not_continued(run, text, capsys):
    run("out", "--optimizer", "muon", "--steps", 10)
    start = ["train", "--init-from", "out", "--data", str(text), "--devices", "1"]
    start += ["--sample-tokens", "0", "--out", "next", "--steps"]
    assert main([*start, "12"]) == 2
    expected = "out holds the state of Muon: continue with --optimizer muon, or take its weights"
    assert expected in capsys.readouterr().err
    assert main([*start, "12", "--optimizer", "muon"]) == 0
    assert main([*start[:-3], "--out", "fresh", "--steps", "1", "--fresh-optimizer"]) == 0


def batches(number):
    random = np.random.default_rng(number)
    windows = random.integers(0, 9, (1, 4, 9))
    return torch.from_numpy(windows[..., :-1]), torch.from_numpy(windows[..., 1:])


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", full_after(1, ["muon", "lion", "sgd"]))
def test_a_run_goes_to_torch_goes_on_there_and_comes_back(name, run):
    run("out", "--optimizer", name, "--steps", 10)
    assert main(["port", "out", "out.pt", "--to", "torch"]) == 0
    saved = torch.load("out.pt", weights_only=True)
    config = torch_ref.config.OptimizerConfig(**dataclasses.asdict(stored_config("out").optimizer))
    model = torch_ref.transformer_lm.TransformerLM(
        torch_ref.config.TransformerLMConfig(**saved["config"])
    )
    model.load_state_dict(saved["model"])
    state = torch_ref.train_step.TrainState.create(model, config)
    state.optimizer_state.load_state_dict(saved["optimizer"])
    state.step = saved["step"]
    for number in range(2):
        state, _ = torch_ref.train_step.train_step(state, batches(number), optimizer=config)
    # Its own state dict, as a PyTorch user saves it, without the names of parameters.
    saved |= {"model": model.state_dict(), "step": state.step}
    saved["optimizer"] = state.optimizer_state.state_dict()
    for group in saved["optimizer"]["param_groups"]:
        group.pop("param_names", None)
    torch.save(saved, "later.pt")
    assert main(["port", "later.pt", "back", "--to", "jax"]) == 0
    arrays, manifest = CheckpointFolder("back/checkpoints").restore(12)
    assert manifest["optimizer"]["optimizer"] == name
    moments = OPTIMIZERS[name].moments
    assert arrays.keys() == {"parameters", "step", *moments}
    kept = {p: state.optimizer_state.state[p] for p in model.parameters()}
    for moment, torch_name in moments.items():
        total = sum(float(np.square(a).sum()) for a in arrays[moment].values())
        found = [s[torch_name] for s in kept.values() if torch_name in s]
        expected = sum(float(array.square().sum()) for array in found)
        assert total == pytest.approx(expected, rel=1e-5)
        assert total > 0
    kernel = "blocks.0.attention.q_proj.kernel"
    weight = model.blocks[0].attention.q_proj.weight
    first = next(iter(moments))
    np.testing.assert_array_equal(arrays[first][kernel].T, kept[weight][moments[first]])


def test_sgd_that_counts_no_steps_is_rejected(run, capsys):
    run("out", "--optimizer", "sgd", "--steps", 1)
    assert main(["port", "out", "out.pt"]) == 0
    saved = torch.load("out.pt", weights_only=True)
    torch.save({name: value for name, value in saved.items() if name != "step"}, "no-step.pt")
    capsys.readouterr()
    assert main(["port", "no-step.pt", "back"]) == 4
    err = capsys.readouterr().err
    assert "SGD's state does not say how many steps it has made" in err
    assert err.count("\n") == 1
    assert main(["port", "no-step.pt", "back", "--weights-only"]) == 0


def test_pytorch_has_no_place_for_adafactor(run, capsys):
    run("out", "--optimizer", "adafactor", "--steps", 10)
    assert main(["port", "out", "out.pt"]) == 0
    assert "left out: PyTorch has no place for what jaxformer's Adafactor" in " ".join(
        capsys.readouterr().err.split()
    )
    assert "optimizer" not in torch.load("out.pt", weights_only=True)


@pytest.mark.tier("full")
def test_what_is_of_merged_adapters_is_left_out(run, text, capsys):
    run("base", "--steps", 1)
    start = ["train", "--init-from", "base", "--data", str(text), "--out", "out", "--steps", "1"]
    start += ["--fresh-optimizer", "--lora-rank", "2", "--devices", "1", "--sample-tokens", "0"]
    assert main(start) == 0
    assert main(["port", "out", "out.pt", "--as", "nanogpt"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "left out: it is that of the adapters, which are merged into the weights" in said


@pytest.mark.parametrize("name", ["adamw", *OTHERS])
def test_a_plan_counts_what_the_optimizer_keeps(name):
    model = meshes.LLAMA.replace(num_layers=3, d_model=128, d_ff=136)
    optimizer = OptimizerConfig(optimizer=name)
    config = TrainConfig(model=model, optimizer=optimizer, batch_size=8)
    whole = estimate_step(config, {"data": 1, "fsdp": 1, "tensor": 1}).moments
    _, shapes = abstract(lambda rngs: TransformerLM(model, rngs=rngs))
    state = jax.eval_shape(make_optimizer(optimizer).init, shapes)
    assert whole == sum(4 * leaf.size for leaf in jax.tree.leaves(state))
    parts = estimate_step(config, {"data": 1, "fsdp": 4, "tensor": 2}).moments
    assert parts < whole / 2 if name == "adafactor" else parts < whole / 7
    least = least_bytes(config, 1)["state"] - 8 * count_matrices(model)
    assert 0 <= least <= whole


@pytest.mark.parametrize("name", full_after(0, OTHERS, slow_after=3))
def test_many_devices_are_one(name):
    """On a mesh Adafactor's means of rows and columns lie whole on every device."""
    optimizer = dataclasses.replace(meshes.OPTIMIZER, optimizer=name)
    config = meshes.LLAMA.replace(d_model=128, d_ff=136)
    with jax.enable_x64(True):
        one, many = (
            meshes.run_with(meshes.make(config, mesh, optimizer=optimizer), config)
            for mesh in ((1, None, None), "data 2 x fsdp 2 x tensor 2")
        )
        np.testing.assert_allclose(many[0], one[0], rtol=0, atol=1e-10)
