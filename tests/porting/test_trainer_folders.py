"""The folders of transformers' Trainer: read with the optimizer's state, and written to go on."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from jaxformer.cli.main import main
from jaxformer.porting.checkpoint import open_checkpoint
from jaxformer.porting.mapping.optimizer_state import write_optimizer
from tests.support.hugging_face.building import build_case
from tests.support.hugging_face.cases import CASES
from tests.support.tiers import full_after, full_except
from tests.support.trainers import are_equal, moments_by_name, save_trainer, trainer_of

# The first case of each of these types. T5 has a matrix that the Trainer does not decay by its
# name, Mixtral other arrays in its files than in its class, gpt_oss vectors that decay.
TYPES = ("gpt2", "llama", "t5", "bert", "bart", "mixtral", "gpt_oss", "vit")
FIRST = {case.dialect: name for name, case in reversed(CASES.items())}
NAMES = [FIRST[model_type] for model_type in TYPES]


def gpt2():
    config = GPT2Config(
        vocab_size=13, n_positions=8, n_embd=12, n_head=2, n_layer=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


class Tokens(torch.utils.data.Dataset):
    """Windows of tokens, which a language model is trained on."""

    def __len__(self):
        return 12

    def __getitem__(self, i):
        ids = torch.randint(11, (6,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids}


def train(model, folder, resume=None, **settings):
    """Trains a model with the Trainer for 6 steps, and saves after 3; returns the Trainer."""
    arguments = TrainingArguments(
        folder, max_steps=6, save_steps=3, per_device_train_batch_size=2, learning_rate=1e-2,
        warmup_steps=2, weight_decay=0.1, report_to=[], disable_tqdm=True, use_cpu=True, **settings,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Tokens())
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize("name", full_except(NAMES, lambda name: name in NAMES[:3]))
def test_moments_belong_to_their_parameters_both_ways(name, tmp_path, capsys):
    """The optimizer itself knows which parameter is which; the file knows only their sizes."""
    torch.manual_seed(0)
    model = build_case(CASES[name]).float()
    trainer = trainer_of(model)
    save_trainer(trainer, tmp_path / "hf")
    checkpoint = open_checkpoint(tmp_path / "hf")
    found = checkpoint.optimizer_state(checkpoint.plan())
    assert found.count == 1
    assert are_equal(found.moments, moments_by_name(model, trainer.optimizer))

    assert main(["port", str(tmp_path / "hf"), str(tmp_path / "out"), "--to", "trainer"]) == 0
    assert "AdamW after 1 steps" in capsys.readouterr().err
    again = trainer_of(build_case(CASES[name]).float())
    written = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    again.optimizer.load_state_dict(written)
    names = {id(p): n for n, p in again.model.named_parameters()}
    own = {names[id(p)]: kept for p, kept in again.optimizer.state.items()}
    for parameter, value in model.named_parameters():
        kept = trainer.optimizer.state[value]
        for moment in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(own[parameter][moment], kept[moment]), parameter


@pytest.mark.parametrize("optim", full_after(1, ["adamw_torch", "sgd"]))
def test_the_trainer_goes_on_from_a_run_as_if_it_had_not_been_one(optim, tmp_path, capsys):
    """There and back in the middle, bit for bit."""
    torch.manual_seed(0)
    first = gpt2()
    start = {name: value.clone() for name, value in first.state_dict().items()}
    settings = {"optim": optim, "logging_steps": 2}
    if optim == "sgd":
        settings["optim_args"] = "momentum=0.9"
    train(first, tmp_path / "whole", **settings)
    middle = tmp_path / "whole" / "checkpoint-3"
    assert main(["port", str(middle), str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().err
    assert re.search(r"optimizer +\w+ after 3 steps", shown)
    assert re.search(r"not read +scheduler.pt, rng_state.pth, beside the weights", shown)
    back = tmp_path / "back" / "checkpoint-3"
    assert main(["port", str(tmp_path / "run"), str(back), "--to", "trainer"]) == 0
    assert "save_steps=3, logging_steps=2, eval_steps=500, which the Trainer" in (
        " ".join(capsys.readouterr().err.split())
    )
    second = gpt2()
    second.load_state_dict(start)
    trainer = train(second, tmp_path / "back", resume=str(back), **settings)
    assert trainer.state.global_step == 6
    assert [row["step"] for row in trainer.state.log_history if "loss" in row] == [4, 6]
    assert (trainer.state.save_steps, trainer.state.train_batch_size) == (3, 2)
    wanted = load_file(tmp_path / "whole" / "checkpoint-6" / "model.safetensors")
    found = load_file(tmp_path / "back" / "checkpoint-6" / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


def save_adapters(model, folder, targets):
    """Saves a model, and adapters whose moments are what the adapters themselves are."""
    peft = pytest.importorskip("peft")
    model.save_pretrained(folder / "base")
    settings = peft.LoraConfig(r=3, target_modules=targets, init_lora_weights="gaussian")
    trainer = trainer_of(peft.get_peft_model(model, settings))
    for parameter, kept in trainer.optimizer.state.items():
        kept["exp_avg"].copy_(parameter.detach())
        kept["exp_avg_sq"].copy_(parameter.detach())
    save_trainer(trainer, folder / "adapter")
    return folder / "adapter"


# PEFT asks transformers by a name that is going away.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_have_their_moments(tmp_path, capsys):
    base, run = tmp_path / "base", tmp_path / "run"
    config = LlamaConfig(
        vocab_size=13, hidden_size=12, intermediate_size=20, num_hidden_layers=11,
        num_attention_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    adapter = save_adapters(LlamaForCausalLM(config), tmp_path, ["down_proj", "q_proj", "o_proj"])
    assert main(["port", str(adapter), str(run), "--base", str(base)]) == 0
    assert "AdamW after 1 steps" in capsys.readouterr().err
    raw = open_checkpoint(run).raw
    for moments in raw.optimizer.moments.values():
        assert len(moments) == 11 * 3 * 2
        assert all((m.read() == raw.tensors[name].read()).all() for name, m in moments.items())
    files = json.loads((run / "certificate.json").read_text())["source"]["files"]
    named = {Path(file["path"]).name for file in files}
    assert {"model.safetensors", "adapter_model.safetensors", "optimizer.pt"} <= named


@pytest.mark.tier("full")
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters_are_named_as_peft_names_them(tmp_path):
    """In its model, where the name of the adapter is in that of each array."""
    peft = pytest.importorskip("peft")
    model = build_case(CASES[FIRST["llama"]]).float()
    model.save_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights="gaussian")
    adapted = peft.get_peft_model(model, settings)
    trained = [(n, p) for n, p in adapted.named_parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(reversed(trained), weight_decay=0.0)
    for _, parameter in trained:
        kept = parameter.detach().clone()
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0), "exp_avg": kept, "exp_avg_sq": kept,
        }  # fmt: skip
    adapted.save_pretrained(tmp_path / "adapter")
    torch.save(optimizer.state_dict(), tmp_path / "adapter" / "optimizer.pt")
    checkpoint = open_checkpoint(tmp_path / "adapter", base=tmp_path / "base")
    plan = checkpoint.plan()
    moments = checkpoint.optimizer_state(plan).moments["mu"]
    assert all((m.read() == plan.tensors[name].read()).all() for name, m in moments.items())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out:UserWarning")
def test_moments_of_an_adapter_of_several_layers_are_rejected(tmp_path, capsys, refuse):
    adapter = save_adapters(gpt2(), tmp_path, ["c_attn"])
    capsys.readouterr()
    given = ["port", adapter, tmp_path / "run", "--base", tmp_path / "base"]
    refuse(given, 2, "c_attn", "which adapt several layers at once")
    assert main([*map(str, given), "--weights-only"]) == 0


def test_what_the_trainer_takes_from_its_folder_stays_where_a_file_tells_it(folder, tmp_path):
    """Elsewhere it has the Trainer's defaults, which the port names."""
    known = {"save_steps": 7, "eval_steps": 0, "logging_steps": "3", "train_batch_size": 4}
    file = folder / "trainer_state.json"
    file.write_text(json.dumps({"global_step": 1, **known}))
    assert main(["port", str(folder), str(tmp_path / "run")]) == 0
    assert main(["port", str(tmp_path / "run"), str(tmp_path / "out"), "--to", "trainer"]) == 0
    found = json.loads((tmp_path / "out" / "trainer_state.json").read_text())
    wanted = {"save_steps": 7, "eval_steps": 500, "logging_steps": 500, "train_batch_size": 4}
    assert {name: found[name] for name in wanted} == wanted


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    save_trainer(trainer_of(gpt2()), tmp_path / "hf")
    return tmp_path / "hf"


def test_a_folder_without_the_optimizer_is_no_place_to_go_on_from(folder, refuse, tmp_path):
    refuse(["port", folder, tmp_path / "out", "--to", "trainer", "--weights-only"], 2, "--to hf")
    (folder / "optimizer.pt").unlink()
    refuse(["port", folder, tmp_path / "out", "--to", "trainer"], 2, "the source has none")


def test_weights_alone_need_no_readable_optimizer(folder, refuse, tmp_path):
    (folder / "optimizer.pt").write_bytes(b"torn")
    refuse(["port", folder, tmp_path / "out"], 4, "optimizer.pt", "--weights-only")
    assert main(["port", str(folder), str(tmp_path / "out"), "--weights-only"]) == 0
    assert main(["port", str(folder), str(tmp_path / "hf2"), "--to", "hf"]) == 0


def test_groups_of_an_unknown_kind_are_rejected(folder, refuse, tmp_path):
    state = torch.load(folder / "optimizer.pt", weights_only=True)
    first, second = state["param_groups"]
    second["params"] = [first["params"].pop(), *second["params"]]
    torch.save(state, folder / "optimizer.pt")
    refuse(["port", folder, tmp_path / "out"], 4, "groups have", "param_names")


def test_the_rate_in_the_groups_is_that_of_the_next_step(folder):
    """The Trainer's schedule has set it when it saves; the Trainer takes it for its next step."""
    checkpoint = open_checkpoint(folder)
    plan = checkpoint.plan()
    found = checkpoint.optimizer_state(plan)
    for rate in (None, 0.25):
        state = dataclasses.replace(found, next_rate=rate)
        written = write_optimizer(state, plan, plan.order, for_trainer=True)
        assert [group["lr"] for group in written["param_groups"]] == 2 * [rate or 5e-5]
