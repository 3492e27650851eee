"""``load``, ``Model`` and ``train``: what a program does in a few lines."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

import jaxformer as jf
from jaxformer.cli.main import main
from jaxformer.errors import UsageError
from tests.support.hugging_face.building import build_case, randomize
from tests.support.hugging_face.cases import CASES
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
    assert text != model.generate("the ", 20, seed=3 + 2**32)
    with pytest.raises(ValueError, match=r"seed must be in \[0, 2\^63\): got -1"):
        model.generate("the ", 20, seed=-1)
    ids = model.tokenizer.encode("the ")
    made = model.generate(ids, 20, seed=3)
    assert (made.dtype, made.shape) == (np.int32, (20,))
    assert model.tokenizer.decode(made) == text
    assert model.generate(np.stack([ids, ids]), 5, greedy=True).shape == (2, 5)
    greedy = model.generate("the ", 20, greedy=True)
    assert model.generate("the ", 20, greedy=True, draft=model, draft_tokens=2) == greedy
    assert re.fullmatch(r"<Model: TransformerLM, [\d,]+ parameters, from .*run>", repr(model))


@pytest.mark.tier("full")
def test_a_model_for_writing_has_narrow_weights(whole, tmp_path):
    model = jf.load(whole)
    narrow = model.for_writing("int8")
    text = narrow.generate("the ", 20, seed=3)
    assert dict(narrow.generate_many(["the "], 20, seed=3)) == {0: text}
    greedy = model.generate("the ", 20, greedy=True)
    assert model.generate("the ", 20, greedy=True, draft=narrow) == greedy
    cost = model.narrowing_cost("int8", TEXT[:50], tokens=20)
    assert cost.places == 49
    assert 0 < cost.largest_difference < 1
    assert cost.narrow_perplexity == pytest.approx(cost.own_perplexity, rel=0.1)
    assert cost.narrow_bytes < cost.own_bytes
    with pytest.raises(UsageError, match="save the model that had its own"):
        narrow.save(tmp_path / "narrow.safetensors")
    with pytest.raises(ValueError, match="got int4"):
        model.for_writing("int4")
    with pytest.raises(UsageError, match="needs two tokens: got 1"):
        model.narrowing_cost("int8", [3])


@pytest.mark.tier("full")
def test_many_prompts_get_the_text_of_each(whole, gpt):
    model = jf.load(whole)
    prompts = ["the ", "a", "", "the cat sat"]
    counts = [9, 1, 12, 5]
    found = dict(model.generate_many(prompts, counts, rows=2, seed=3))
    assert [found[n] for n in range(4)] == [
        model.generate(p, count, seed=3 + n)
        for n, (p, count) in enumerate(zip(prompts, counts, strict=True))
    ]
    ids = [model.tokenizer.encode(p) for p in ("the ", "a")]
    made = dict(model.generate_many(ids, 6, greedy=True))
    for number, each in enumerate(ids):
        np.testing.assert_array_equal(made[number], model.generate(each, 6, greedy=True))
    one = dict(model.generate_many(["a"], np.int64(3)))
    assert one == {0: model.generate("a", np.int64(3))} == {0: model.generate("a", 3)}
    for call in (model.generate, lambda text, count: model.generate_many([text], count)):
        with pytest.raises(ValueError, match="num_tokens must be an integer"):
            call("a", 5.5)
    with pytest.raises(ValueError, match="one for each prompt: got 2 for 1 prompts"):
        model.generate_many(["a"], [1, 2])
    encoder = jf.TransformerLM(gpt.config.replace(causal=False), rngs=nnx.Rngs(0))
    with pytest.raises(UsageError, match="only a causal language model"):
        jf.Model(encoder).generate_many([[1]])


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
    with pytest.raises(UsageError, match=r"no tokenizer: load it with meta,"):
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


@pytest.mark.curves
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


def test_settings_are_replaced_by_name():
    config = jf.presets.nano().replace(
        steps=7, num_layers=2, learning_rate=0.1, optimizer="muon", lora_rank=3
    )
    assert (config.steps, config.model.num_layers, config.model.lora.lora_rank) == (7, 2, 3)
    assert (config.optimizer.learning_rate, config.optimizer.optimizer) == (0.1, "muon")
    whole = config.replace(optimizer=jf.OptimizerConfig(), model=config.model.replace(num_layers=1))
    assert (whole.optimizer, whole.model.num_layers) == (jf.OptimizerConfig(), 1)
    # Both at once: neither alone would fit the other.
    longer = config.replace(context_length=256, block_size=256)
    assert longer.window == 256


@pytest.mark.tier("full")
def test_adapters_are_trained_and_saved_for_peft(tmp_path):
    """The adapters and the merged weights compute what the tuned model does."""
    (tmp_path / "text.txt").write_text(TEXT)
    common = {"data": str(tmp_path / "text.txt"), "devices": 1, "sample_tokens": 0}
    sizes = {**SIZES, "num_kv_heads": 2, "d_ff": 24}
    first = jf.train("llama-style", tmp_path / "first", steps=2, **sizes, **common)
    base = first.model.save(tmp_path / "base", "hf", dialect="llama")
    tuned = jf.train(
        out=tmp_path / "tuned", init_from=base, steps=5, lora_rank=2, learning_rate=0.1, **common
    )
    assert tuned.config.model.lora == jf.LoRAConfig(lora_rank=2)
    adapter = tuned.model.save(tmp_path / "adapter", format="peft")
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["r"]) == (str(base), 2)
    merged = tuned.model.save(tmp_path / "merged", format="hf")
    ids = tuned.model.tokenizer.encode("the cat")[None]
    expected = tuned.model.module(ids)
    np.testing.assert_array_equal(jf.load(adapter, base=base).module(ids), expected)
    np.testing.assert_allclose(jf.load(merged).module(ids), expected, rtol=0, atol=1e-5)
    assert np.abs(jf.load(base).module(ids) - expected).max() > 1e-2
    with pytest.raises(UsageError, match="this model has none"):
        first.model.save(tmp_path / "none", format="peft")


@pytest.mark.tier("full")
def test_a_new_optimizer_begins_at_step_0(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    common = {"data": str(tmp_path / "text.txt"), "devices": 1, "sample_tokens": 0}
    jf.train("nano", tmp_path / "first", steps=4, **SIZES, **common)
    start = {"init_from": tmp_path / "first", "steps": 3, **common}
    with pytest.raises(UsageError, match="has 4 steps behind it"):
        jf.train(out=tmp_path / "next", **start)
    result = jf.train(out=tmp_path / "next", fresh_optimizer=True, **start)
    assert [r["step"] for r in result.metrics if "train_loss" in r] == [1, 2, 3]


def test_wrong_arguments_of_train(tmp_path):
    with pytest.raises(
        UsageError, match=r"config=nanno is unknown \(did you mean nano\?\): choose among nano"
    ):
        jf.train("nanno", tmp_path)
    with pytest.raises(UsageError, match=r"settings: num_layer \(did you mean num_layers\?\)"):
        jf.train("nano", tmp_path / "run", num_layer=3)
    with pytest.raises(UsageError, match="num_heads"):
        jf.train("nano", tmp_path / "run", num_heads=3)
    for setting in ({"steps": "3"}, {"num_layers": 2.0}, {"learning_rate": "1e-3"}):
        ((name, value),) = setting.items()
        with pytest.raises(UsageError, match=f"{name} must be (int|float): got {value!r}"):
            jf.train("nano", tmp_path / "run", **setting)
    with pytest.raises(UsageError, match="fresh_optimizer goes with init_from"):
        jf.train("nano", tmp_path / "run", fresh_optimizer=True)
    with pytest.raises(UsageError, match="tokens of it with tokenizer "):
        jf.train("gpt2-small", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.tier("full")
def test_a_model_with_dynamic_scaling_is_cut_unless_its_context_is_longer(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
        num_attention_heads=3, max_position_embeddings=16, initializer_range=0.5,
        eos_token_id=None, bos_token_id=None,
        rope_parameters={"rope_type": "dynamic", "factor": 3.0, "rope_theta": 10000.0},
    )  # fmt: skip
    source = transformers.LlamaForCausalLM(config).eval()
    source.save_pretrained(tmp_path / "hf")
    ids = torch.arange(1, 6)[None]
    mask = torch.ones_like(ids)
    text = source.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    expected = text[0, 5:].tolist()

    model = jf.load(tmp_path / "hf")
    found = model.generate(ids.numpy(), 30, greedy=True)[0].tolist()
    assert found[:12] == expected[:12], "up to 16 tokens are read"
    assert found != expected
    longer = jf.TransformerLM(model.config.replace(context_length=64), rngs=nnx.Rngs(0))
    nnx.update(longer, nnx.state(model.module, nnx.Param))
    longer = jf.Model(longer)
    assert longer.generate(ids.numpy(), 30, greedy=True)[0].tolist() == expected
    with pytest.raises(UsageError, match="no model type of Hugging Face computes"):
        longer.save(tmp_path / "back", "hf")


@pytest.mark.tier("full")
def test_an_encoder_and_decoder_writes_what_transformers_writes(tmp_path):
    source = randomize(build_case(CASES["mbart"]), std=0.2, embeddings=0.05).float()
    forced = {"decoder_start_token_id": 2, "forced_bos_token_id": 7, "forced_eos_token_id": 9}
    for name, value in forced.items():
        setattr(source.generation_config, name, value)
    source.save_pretrained(tmp_path / "folder")
    model = jf.load(tmp_path / "folder")
    ids = np.array([[5, 8, 11, 3], [4, 30, 6, 12]])
    expected = source.generate(
        torch.as_tensor(ids), do_sample=False, num_beams=1, max_new_tokens=13
    )
    assert expected[:, 1].tolist() == [7, 7]
    assert expected[:, -1].tolist() == [9, 9]
    # The first new token of transformers is the forced one.
    assert np.array_equal(model.generate(ids, 12, greedy=True), expected[:, 2:].numpy())
    with pytest.raises(UsageError, match="has no tokenizer"):
        model.generate("text")
    with pytest.raises(UsageError, match="does not say what its targets begin with"):
        jf.Model(model.module).generate(ids, 3)


@pytest.mark.parametrize("rate", [-0.1, 1.0, 2.0])
def test_a_rate_of_dropout_is_below_one(rate):
    with pytest.raises(ValueError, match=rf"must be in \[0, 1\): got {rate}"):
        jf.Dropout(rate)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: jf.from_torch(None), r"arrays by name \(a state dict\): got NoneType$"),
        (lambda: jf.from_torch("gpt2"), "got str: jaxformer.load reads files"),
        (lambda: jf.to_torch(None), "give an NNX module of jaxformer: got NoneType"),
        (lambda: jf.load(None), "path must be the path of a file or a folder: got NoneType"),
    ],
)
def test_what_is_no_model_is_rejected(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_weights_are_saved_in_no_unknown_dtype(gpt, tmp_path):
    with pytest.raises(UsageError, match=r"dtype must be one of float32, .*: got 'int8'"):
        jf.Model(gpt).save(tmp_path / "model.pt", dtype="int8")
    assert not (tmp_path / "model.pt").exists()
