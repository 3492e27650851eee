"""What lies beside the weights: optimizers under other keys, ids of special tokens, buffers.

Also the dtypes of both."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    CLIPConfig,
    CLIPModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from jaxformer import load
from jaxformer.cli.main import main
from jaxformer.config import OptimizerConfig
from jaxformer.errors import UsageError
from jaxformer.inspection.checkpoint_tree import describe
from jaxformer.parameters import get_parameters
from jaxformer.porting import from_torch, train_state_from_torch, train_state_to_torch
from jaxformer.porting.checkpoint import open_checkpoint
from jaxformer.training.state_arrays import moments_of
from tests.support.tiers import full_after
from tests.support.trainers import are_equal, moments_by_name

IDS = {"bos_token_id": 5, "eos_token_id": 6, "pad_token_id": 7}


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=31, hidden_size=24, intermediate_size=40, num_hidden_layers=1,
            num_attention_heads=3, max_position_embeddings=16, **IDS,
        )
    )  # fmt: skip


def after_a_step(model, ids):
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    return optimizer


@pytest.fixture
def saved(tmp_path):
    """Writes a Llama with what lies beside its state dict."""

    def save(**beside):
        model = llama()
        optimizer = after_a_step(model, torch.arange(6)[None]).state_dict()
        beside = {name: make(optimizer) for name, make in beside.items()}
        state = {"model": model.state_dict(), "config": model.config.to_dict(), **beside}
        torch.save(state, tmp_path / "model.pt")
        return tmp_path / "model.pt"

    return save


@pytest.mark.parametrize(
    "beside",
    [
        {"optim": lambda state: state},
        {"optimizer_states": lambda state: [state]},
        {"optimizer": lambda state: state, "old_optimizer": lambda state: state},
    ],
)
def test_an_optimizer_under_any_key_is_read(saved, beside):
    checkpoint = open_checkpoint(saved(**beside))
    found = checkpoint.optimizer_state(checkpoint.plan())
    assert found is not None
    assert found.count == 1
    assert not checkpoint.raw.unread_optimizer


def test_several_optimizers_are_left_out_and_named(saved, tmp_path, capsys):
    path = saved(first=lambda state: state, others=lambda state: [state, state])
    assert main(["port", str(path), str(tmp_path / "out")]) == 0
    error = capsys.readouterr().err
    assert "left out: there are several, in 'first', 'others'" in error


def test_what_else_is_in_the_file_is_said_not_to_be_read(saved, tmp_path, capsys):
    path = saved(
        optimizer=lambda state: state,
        ema=lambda state: llama().state_dict(),
        scheduler=lambda state: {"last_epoch": 3},
        scaler=lambda state: {"scale": 65536.0},
        epoch=lambda state: 3,
    )
    assert main(["port", str(path), str(tmp_path / "out")]) == 0
    assert "not read     ema, scheduler, scaler, beside the weights" in capsys.readouterr().err
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_text())
    assert certificate["source"]["not_read"] == ["ema", "scheduler", "scaler"]


def test_a_state_dict_under_an_unknown_key_is_rejected_with_those_that_are_known(tmp_path, refuse):
    torch.save({"net": llama().state_dict()}, tmp_path / "net.pt")
    refuse(
        ["port", tmp_path / "net.pt", tmp_path / "out"], 4,
        "'net' are no arrays", "model, state_dict, model_state_dict, weights",
    )  # fmt: skip


def test_the_optimizer_that_accelerate_saves_is_read(tmp_path, capsys):
    model = llama()
    optimizer = after_a_step(model, torch.arange(6)[None])
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").rename(tmp_path / "config.json")
    torch.save(optimizer.state_dict(), tmp_path / "hf" / "optimizer.bin")
    (tmp_path / "hf" / "random_states_0.pkl").touch()
    weights, config = tmp_path / "hf" / "model.safetensors", tmp_path / "config.json"
    run = str(tmp_path / "run")
    assert main(["port", str(weights), run, "--config", str(config)]) == 0
    shown = capsys.readouterr().err
    assert "AdamW after 1 steps" in shown
    assert "random_states_0.pkl, beside the weights" in shown
    stored = open_checkpoint(run).raw.optimizer.moments
    assert are_equal(stored, moments_by_name(model, optimizer))


def test_ids_of_special_tokens_come_from_any_config(saved, tmp_path):
    path = saved()
    assert open_checkpoint(path).token_ids == IDS
    given = {**llama().config.to_dict(), "pad_token_id": 9}
    assert open_checkpoint(path, config=given).token_ids == {**IDS, "pad_token_id": 9}


def test_an_untied_head_is_not_said_to_be_tied(saved):
    checkpoint = open_checkpoint(saved())
    assert "tied" not in describe(checkpoint)


def test_a_buffer_that_is_a_parameter_here_has_no_moments_there():
    torch.manual_seed(0)
    model = BartForConditionalGeneration(
        BartConfig(
            vocab_size=31, d_model=24, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=20,
            decoder_ffn_dim=20, encoder_attention_heads=3, decoder_attention_heads=3,
            max_position_embeddings=16, dropout=0.0,
        )
    )  # fmt: skip
    optimizer = after_a_step(model, torch.arange(6)[None])
    config = OptimizerConfig(beta2=0.999, weight_decay=0.0, warmup_steps=0)
    module, state = train_state_from_torch(model, optimizer, config)
    assert not moments_of(state.optimizer_state)["mu"]["lm_head.bias"].any()
    _, back = train_state_to_torch(module, state, model, optimizer)
    optimizer.load_state_dict(
        {
            **back,
            "state": {
                n: {k: torch.as_tensor(v) for k, v in e.items()} for n, e in back["state"].items()
            },
        }
    )
    optimizer.step()


@pytest.mark.parametrize("dtype", full_after(1, [torch.bfloat16, torch.float32, torch.float16]))
def test_a_computed_table_has_the_dtype_of_the_weights(dtype, tmp_path):
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=11, d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8,
        decoder_ffn_dim=8, encoder_attention_heads=2, decoder_attention_heads=2, num_mel_bins=4,
        max_source_positions=10, max_target_positions=6, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).to(dtype)
    model.save_pretrained(tmp_path / "hf")
    assert main(["port", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    assert main(["port", str(tmp_path / "run"), str(tmp_path / "back"), "--to", "hf"]) == 0
    table = load_file(tmp_path / "back" / "model.safetensors")[
        "model.encoder.embed_positions.weight"
    ]
    assert table.dtype == dtype
    wanted = model.model.encoder.embed_positions.weight
    torch.testing.assert_close(table, wanted.detach(), rtol=0, atol=torch.finfo(dtype).eps)


def test_weights_in_which_nothing_is_computed_are_rejected(tmp_path, capsys, refuse):
    llama().to(torch.float8_e4m3fn).save_pretrained(tmp_path / "hf")
    words = "is float8_e4m3fn", "jaxformer port --dtype float32"
    with pytest.raises(UsageError, match="float8_e4m3fn"):
        load(tmp_path / "hf")
    capsys.readouterr()
    refuse(["port", tmp_path / "hf", tmp_path / "run"], 2, *words)
    refuse(["sample", tmp_path / "hf", "--prompt-ids", "3,4"], 2, *words)
    assert main(["port", str(tmp_path / "hf"), str(tmp_path / "back"), "--to", "hf"]) == 0
    wide = ["port", str(tmp_path / "hf"), str(tmp_path / "run"), "--dtype", "float32"]
    assert main(wide) == 0
    found = get_parameters(load(tmp_path / "run").module)["token_embedding.embedding"]
    stored = load_file(tmp_path / "back" / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(found, stored.float().numpy())


def test_a_head_in_the_memory_of_the_table_is_tied():
    """transformers 5 ties T5's head whatever tie_word_embeddings says, which then is of the scale.

    A state dict has two names for it."""
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=31, d_model=24, d_kv=8, d_ff=40, num_layers=1, num_heads=3,
            tie_word_embeddings=False, decoder_start_token_id=0,
        )
    )  # fmt: skip
    assert model.lm_head.weight is model.shared.weight
    made = from_torch(model.state_dict(), "t5", model.config.to_dict())
    assert get_parameters(made).keys() == get_parameters(from_torch(model)).keys()


@pytest.mark.parametrize(
    ("form", "flags"),
    [
        ("run", []),
        pytest.param("file.safetensors", ["--as", "jaxformer"], marks=pytest.mark.tier("full")),
        pytest.param("file.safetensors", [], marks=pytest.mark.tier("full")),
        ("file.pt", ["--as", "jaxformer"]),
        pytest.param("file.pt", [], marks=pytest.mark.tier("full")),
    ],
)
def test_settings_of_both_halves_and_of_caches_come_back(tmp_path, form, flags):
    """They change no number here, and transformers goes by them when it trains or writes."""
    half = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "projection_dim": 8, "initializer_range": 0.07,
        "initializer_factor": 3.0,
    }  # fmt: skip
    texts = {"vocab_size": 31, "max_position_embeddings": 16, "use_cache": False, **IDS}
    model = CLIPModel(
        CLIPConfig(
            text_config={**half, **texts},
            vision_config={**half, "image_size": 8, "patch_size": 4},
            projection_dim=8,
            logit_scale_init_value=1.5,
            initializer_factor=4.0,
        )
    )
    model.save_pretrained(tmp_path / "hf")
    assert main(["port", str(tmp_path / "hf"), str(tmp_path / form), *flags]) == 0
    assert main(["port", str(tmp_path / form), str(tmp_path / "back"), "--to", "hf"]) == 0
    before, after = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("hf", "back")
    )
    del before["transformers_version"]
    for part in ("text_config", "vision_config"):
        own = before.pop(part)
        assert {name: after[part].get(name) for name in own} == own
    assert {name: after.get(name) for name in before} == before


def test_a_file_with_names_of_jaxformer_goes_back_to_the_type_that_it_came_from(tmp_path):
    """Several types hold the same model."""
    config = MistralConfig(
        vocab_size=31, hidden_size=24, intermediate_size=40, num_hidden_layers=1,
        num_attention_heads=3, num_key_value_heads=3, sliding_window=None, use_cache=False,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(tmp_path / "hf")
    for name in ("a.safetensors", "a.pt"):
        file = str(tmp_path / name)
        assert main(["port", str(tmp_path / "hf"), file, "--as", "jaxformer"]) == 0
        assert main(["port", file, str(tmp_path / f"{name}-back"), "--to", "hf"]) == 0
        written = json.loads((tmp_path / f"{name}-back" / "config.json").read_text())
        assert (written["model_type"], written["use_cache"]) == ("mistral", False)


@pytest.mark.parametrize(
    "origin",
    [{"dialect": ["gpt2"]}, {"dialect": "llama", "order": [3]}, {"settings": {"a": torch.ones(2)}}],
)
def test_an_origin_that_jaxformer_does_not_write_is_not_read(tmp_path, origin):
    llama().save_pretrained(tmp_path / "hf")
    file = tmp_path / "a.pt"
    assert main(["port", str(tmp_path / "hf"), str(file), "--as", "jaxformer"]) == 0
    torch.save({**torch.load(file), "origin": origin}, file)
    assert open_checkpoint(file).raw.record.get("origin") is None
    assert main(["port", str(file), str(tmp_path / "back"), "--to", "hf"]) == 0
