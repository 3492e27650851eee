"""Adapters of an encoder and decoder: trained alone, the same numbers as PEFT's, there and back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

import jaxformer
from jaxformer.checkpoints import CheckpointFolder
from jaxformer.cli.main import main
from jaxformer.parameters import merge, split
from tests.support.tiny import losses, manifest, resume
from tests.support.tokens import write_t5
from tests.training.test_pairs import FLAGS, write_answers

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.tier("full"),
    # PEFT asks transformers by a name that is going away.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]
LORA = ["--lora-rank", 3, "--lora-alpha", 5.0, "--lora-targets", "q_proj,v_proj,down_proj"]


def run(*arguments, code=0):
    assert main([str(argument) for argument in arguments]) == code


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("pair_adapters")
    torch.manual_seed(0)
    write_t5(path / "t5")
    write_answers(path / "answers.jsonl")
    command = ["tokenize", path / "answers.jsonl", "--tokenizer", path / "t5"]
    run(*command, "--val-fraction", 0.2, "--out", path / "tokens")
    return path


def train(folder, out, *more):
    start = ["train", "--init-from", folder / "t5", "--data", folder / "tokens", "--out", out]
    run(*start, *FLAGS, "--sample-tokens", 0, *LORA, *more)


@pytest.fixture(scope="module")
def trained(folder):
    train(folder, folder / "run", "--steps", 10)
    return folder / "run"


def restore(out, step):
    return CheckpointFolder(out / "checkpoints").restore(step)[0]


def test_adapters_of_both_stacks_alone_are_trained_and_resumed(folder, trained, tmp_path):
    first, last = restore(trained, 0), restore(trained, 10)
    adapters = {name for name in last["parameters"] if ".lora_" in name}
    places = {name.split(".lora_")[0] for name in adapters}
    for place in ("encoder.blocks.0.attention.q_proj", "decoder.blocks.0.cross_attention.v_proj",
                  "decoder.blocks.0.feed_forward.down_proj"):  # fmt: skip
        assert place in places
    assert last["mu"].keys() == adapters
    for name, value in last["parameters"].items():
        assert np.array_equal(value, first["parameters"][name]) is (name not in adapters), name
    found = losses(trained, "val_loss")
    assert found[10] < found[0]
    train(folder, tmp_path / "cut", "--steps", 4, "--decay-steps", 10)
    assert resume(tmp_path / "cut", "--steps", 10) == 0
    states = [manifest(path, 10)["state_sha256"] for path in (tmp_path / "cut", trained)]
    assert states[0] == states[1]


def ids_of(seed, count):
    return np.random.default_rng(seed).integers(3, 9, (2, count))


def test_peft_computes_the_same_and_reads_and_writes_the_same(folder, trained, tmp_path):
    adapter, merged, again = tmp_path / "adapter", tmp_path / "merged", tmp_path / "again"
    run("port", trained, adapter, "--to", "peft")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["task_type"] == "SEQ_2_SEQ_LM"
    plain = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder / "t5")
    model = peft.PeftModel.from_pretrained(plain, adapter, is_trainable=True).eval()
    source, target = ids_of(0, 7), ids_of(1, 5)
    given = {"input_ids": torch.as_tensor(source), "decoder_input_ids": torch.as_tensor(target)}
    expected = model(**given).logits
    own = jaxformer.load(trained).module
    own.eval()
    definition, parameters = split(own)

    def total(parameters):
        logits = merge(definition, parameters)(jnp.asarray(source), jnp.asarray(target))
        return jnp.sum(jnp.sin(logits)), logits

    (_, found), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(parameters)
    scale = float(expected.detach().abs().max())
    assert np.abs(found - expected.detach().numpy()).max() <= 1e-5 * scale

    expected.sin().sum().backward()
    # The same array under both names; PEFT's is (out, in).
    names = {np.asarray(value).tobytes(): name for name, value in parameters.items()}
    adapted = [p for p in model.parameters() if p.grad is not None]
    assert len(adapted) == len([name for name in gradients if ".lora_" in name])
    largest = max(float(p.grad.abs().max()) for p in adapted)
    for parameter in adapted:
        name = names[np.ascontiguousarray(parameter.detach().numpy().T).tobytes()]
        difference = np.abs(np.asarray(gradients[name]) - parameter.grad.numpy().T)
        assert difference.max() <= 2e-5 * largest, name

    run("port", trained, merged, "--to", "hf")
    whole = transformers.AutoModelForSeq2SeqLM.from_pretrained(merged)
    assert np.abs((whole(**given).logits - expected).detach().numpy()).max() <= 1e-5 * scale

    model.save_pretrained(again)
    run("port", again, tmp_path / "back", "--base", folder / "t5")
    first, last = restore(trained, 10)["parameters"], restore(tmp_path / "back", 0)["parameters"]
    assert first.keys() == last.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(value, last[name], err_msg=name)
    run("port", tmp_path / "back", tmp_path / "third", "--to", "peft")
    one, two = (load_file(p / "adapter_model.safetensors") for p in (adapter, tmp_path / "third"))
    assert one.keys() == two.keys()
    assert all(np.array_equal(value, two[name]) for name, value in one.items())


def test_a_run_with_adapters_writes_targets(trained, capsys):
    capsys.readouterr()
    run("sample", trained, "--prompt", "list value", "--greedy", "--tokens", 5)
    assert capsys.readouterr().out.strip()
