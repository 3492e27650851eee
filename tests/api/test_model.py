"""``load``, ``Model`` and ``train``: what a program does in a few lines."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxformer as jf
from jaxformer.cli.main import main
from jaxformer.errors import UsageError
from tests.support.tiny import TEXT

SIZES = {"num_layers": 1, "d_model": 16, "num_heads": 2, "context_length": 8}


@pytest.fixture
def gpt():
    return jf.TransformerLM(jf.TransformerLMConfig(vocab_size=11, **SIZES), rngs=nnx.Rngs(0))


def test_a_run_is_loaded_and_writes(whole):
    model = jf.load(whole)
    text = model.generate("the ", 20, seed=3)
    assert len(text) == 20
    assert text == model.generate("the ", 20, seed=3) == "".join(model.stream("the ", 20, seed=3))
    assert text != model.generate("the ", 20, seed=4)
    ids = model.tokenizer.encode("the ")
    made = model.generate(ids, 20, seed=3)
    assert (made.dtype, made.shape) == (np.int32, (20,))
    assert model.tokenizer.decode(made) == text
    assert model.generate(np.stack([ids, ids]), 5, greedy=True).shape == (2, 5)
    assert re.fullmatch(r"<Model: TransformerLM, [\d,]+ parameters, from .*run>", repr(model))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("again", {}),
        pytest.param("model.safetensors", {}, marks=pytest.mark.tier("full")),
        pytest.param("model.pt", {"dialect": "nanogpt"}, marks=pytest.mark.tier("full")),
    ],
)
def test_what_is_saved_is_the_model_as_it_is_now(whole, tmp_path, name, settings):
    model = jf.load(whole)
    model.module.blocks[0].attention.q_proj.kernel.set_value(
        model.module.blocks[0].attention.q_proj.kernel[...] + 0.5
    )
    path = model.save(tmp_path / name, **settings)
    again = jf.load(path)
    assert again.generate("the ", 30, greedy=True) == model.generate("the ", 30, greedy=True)
    with pytest.raises(UsageError, match="exists"):
        model.save(path, **settings)
    model.save(path, overwrite=True, **settings)


def test_a_module_of_ones_own_has_a_tokenizer(gpt, tmp_path):
    tokenizer = jf.CharTokenizer("abcdefghijk")
    model = jf.Model(gpt, tokenizer)
    assert set(model.generate("abc", 12)) <= set("abcdefghijk")
    assert jf.load(model.save(tmp_path / "x.safetensors")).generate("a", 9) == model.generate(
        "a", 9
    )
    assert main(["inspect", str(tmp_path / "x.safetensors")]) == 0


@pytest.mark.tier("full")
def test_a_hugging_face_folder_is_saved(tmp_path):
    config = jf.presets.llama_style().model.replace(vocab_size=11, **SIZES, num_kv_heads=1, d_ff=24)
    llama = jf.Model(jf.TransformerLM(config, rngs=nnx.Rngs(0)), jf.CharTokenizer("abcdefghijk"))
    again = jf.load(llama.save(tmp_path / "folder", "hf", dialect="llama"))
    assert again.generate("abc", 20, seed=1) == llama.generate("abc", 20, seed=1)


def test_what_a_model_cannot_do_is_said(gpt):
    with pytest.raises(UsageError, match=r"no tokenizer: load it with meta="):
        jf.Model(gpt).generate("abc")
    assert jf.Model(gpt).generate([1, 2], 3).shape == (3,)
    with pytest.raises(UsageError, match="got FeedForward"):
        jf.Model(jf.FeedForward(4, 8, rngs=nnx.Rngs(0)))
    config = gpt.config.replace(causal=False)
    with pytest.raises(UsageError, match="only a causal language model"):
        jf.Model(jf.TransformerLM(config, rngs=nnx.Rngs(0))).generate([1])


def test_a_model_shows_its_settings_and_size(gpt):
    assert repr(gpt) == f"<TransformerLM, 3,616 parameters: {gpt.config}>"


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ([1, 2, 3], r"integer ids with shape \(B, T\), such as jnp.array.*got list"),
        ("text", "got str"),
        (np.ones(3, int), r"int64 with shape \(3,\)"),
        (jnp.ones((1, 3)), r"float32 with shape \(1, 3\)"),
    ],
)
def test_a_model_says_what_it_reads(gpt, tokens, said):
    with pytest.raises(ValueError, match=said):
        gpt(tokens)


def test_the_twin_says_what_it_reads(gpt):
    import torch

    from torch_ref.config import TransformerLMConfig
    from torch_ref.transformer_lm import TransformerLM

    twin = TransformerLM(TransformerLMConfig(**gpt.config.settings()))
    for tokens in ([1, 2, 3], torch.ones(3, dtype=torch.long), torch.ones(1, 3)):
        with pytest.raises(ValueError, match=r"integer ids with shape \(B, T\)"):
            twin(tokens)


def test_text_is_no_prompt_of_ids(gpt):
    with pytest.raises(ValueError, match=r"this is text: encode it, or call jaxformer.load"):
        jf.generate(gpt, "text", 10)


def test_a_run_from_a_program(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    config = jf.TrainConfig(
        model=jf.TransformerLMConfig(**SIZES),
        optimizer=jf.OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        data=str(tmp_path / "text.txt"),
        batch_size=8, steps_per_call=7, eval_interval=10, checkpoint_interval=10, sample_tokens=0,
    )  # fmt: skip
    result = jf.train(config, tmp_path / "run", steps=10, devices=1)
    assert result.config.steps == 10
    assert result.val_loss < result.metrics[0]["train_loss"]
    assert repr(result).startswith(f"<TrainResult: {tmp_path / 'run'}, 10 steps, training loss ")
    assert 'src="data:image/png;base64,' in result._repr_html_()
    assert len(result.model.generate("the ", 5)) == 5
    longer = jf.train(out=tmp_path / "run", resume=True, steps=20)
    assert [r["step"] for r in longer.metrics if "train_loss" in r] == list(range(1, 21))


def test_wrong_arguments_of_train(tmp_path):
    with pytest.raises(UsageError, match="preset nanno is unknown: choose among nano"):
        jf.train("nanno", tmp_path)
    with pytest.raises(UsageError, match="no setting num_layers: the settings of a model"):
        jf.train("nano", tmp_path / "run", num_layers=3)
    with pytest.raises(UsageError, match="tokenizer="):
        jf.train("gpt2-small", tmp_path / "run")
    assert not (tmp_path / "run").exists()
