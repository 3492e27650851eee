import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxformer import generation
from jaxformer.config import TransformerLMConfig
from jaxformer.layers import dropout_modules, seed_dropout
from jaxformer.parameters import abstract, merge
from jaxformer.porting.naming import export_arrays
from jaxformer.transformer_lm import TransformerLM
from torch_ref import generation as torch_generation
from torch_ref.config import TransformerLMConfig as TorchTransformerLMConfig
from torch_ref.logits import filter_logits as torch_filter_logits
from torch_ref.transformer_lm import TransformerLM as TorchTransformerLM

V, CONTEXT, TOKENS = 31, 24, 60
BASE = {"d_model": 36, "num_heads": 4, "d_ff": 23, "num_layers": 2}
BASE |= {"context_length": CONTEXT, "tie_embeddings": False}
MODELS = {
    "none": {"positions": "none"},
    "learned": {"positions": "learned", "num_kv_heads": 2},
    "sinusoidal": {
        "positions": "sinusoidal",
        "num_kv_heads": 1,
        "block": "post_norm",
        "embedding_scale": 4.0,
        "seed": 3,
    },
    "rotary": {
        "positions": "rotary",
        "num_kv_heads": 2,
        "head_dim": 10,
        "sliding_window": 5,
        "norm": "rms_norm",
        "activation": "swiglu",
    },
    "rotary_interleaved": {
        "positions": "rotary",
        "rotary_interleaved": True,
        "head_dim": 14,
        "rotary_fraction": 0.5714286,
        "rotary_scaling": "linear",
        "rotary_scaling_factor": 2.0,
        "query_key_norm": True,
    },
    "alibi": {"positions": "alibi", "num_heads": 6, "num_kv_heads": 3, "sliding_window": 9},
    "relative": {
        "positions": "relative",
        "max_relative_position": 5,
        "num_kv_heads": 2,
        "block": "parallel",
        "head_bias": True,
        "score_soft_cap": 4.0,
        "logit_soft_cap": 7.0,
    },
    "alternating_windows": {
        "positions": "rotary",
        "head_dim": 10,
        "num_layers": 3,
        "num_kv_heads": 2,
        "norm": "rms_norm",
        "norm_unit_offset": True,
        "branch_output_norm": True,
        "activation": "geglu_tanh",
        "sliding_window": 4,
        "full_attention_layers": (1,),
    },
    "offset": {
        "position_offset": 2,
        "block": "parallel",
        "shared_norm": True,
        "num_token_types": 2,
        "head": "masked_lm",
        "tie_embeddings": True,
        "head_bias": True,
        "seed": 5,
    },
}


def build(seed=7, dtype=np.float64, **settings):
    """A model and its twin, with every parameter far from where it started."""
    config = TransformerLMConfig(**{"vocab_size": V, **BASE, **settings})
    definition, shapes = abstract(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(seed)
    parameters = {
        name: rng.normal(name.endswith("scale"), 0.4, shape.shape) for name, shape in shapes.items()
    }
    model = merge(definition, {n: jnp.asarray(value, dtype) for n, value in parameters.items()})
    model.eval()
    twin_config = TorchTransformerLMConfig(**dataclasses.asdict(config))
    twin = TorchTransformerLM(twin_config).double().eval()
    arrays = export_arrays(parameters)
    twin.load_state_dict({name: torch.from_numpy(a) for name, a in arrays.items()}, strict=True)
    return model, twin


@pytest.fixture(scope="module")
def models():
    built = {}

    def get(name):
        if name not in built:
            built[name] = build(**MODELS[name])
        return built[name]

    return get


def prompts(batch=3, length=7, seed=3):
    return np.random.default_rng(seed).integers(0, V, (batch, length)).astype(np.int32)


def torch_generate(twin, prompt, *args, mask=None, **settings):
    mask = None if mask is None else torch.from_numpy(mask)
    prompt = torch.from_numpy(np.asarray(prompt))
    return torch_generation.generate(twin, prompt, *args, mask=mask, **settings).numpy()


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_is_the_same_with_and_without_cache_on_both_sides(models, name):
    model, twin = models(name)
    prompt = prompts()
    cached = generation.generate(model, prompt, TOKENS, greedy=True)
    assert cached.shape == (3, TOKENS)
    assert cached.dtype == np.int32
    distinct = [len(np.unique(row)) for row in cached]
    assert min(distinct) >= 5, "a model that repeats itself would hide a wrong window"
    others = {
        "recomputed": generation.generate(model, prompt, TOKENS, greedy=True, use_cache=False),
        "torch cached": torch_generate(twin, prompt, TOKENS, greedy=True),
        "torch recomputed": torch_generate(twin, prompt, TOKENS, greedy=True, use_cache=False),
    }
    for other, tokens in others.items():
        np.testing.assert_array_equal(tokens, cached, err_msg=other)


@pytest.mark.parametrize("name", MODELS)
def test_left_padded_rows_continue_as_they_would_alone(models, name):
    model, twin = models(name)
    prompt = prompts()
    lengths = np.array([4, 7, 1])
    mask = np.arange(7)[None, :] >= 7 - lengths[:, None]
    alone = np.concatenate(
        [
            torch_generate(twin, row[None, 7 - n :], TOKENS, greedy=True, use_cache=False)
            for row, n in zip(prompt, lengths, strict=True)
        ]
    )
    for use_cache in (True, False):
        settings = {"greedy": True, "use_cache": use_cache, "mask": mask}
        together = generation.generate(model, prompt, TOKENS, **settings)
        np.testing.assert_array_equal(together, alone)
        np.testing.assert_array_equal(torch_generate(twin, prompt, TOKENS, **settings), alone)
    # The same shapes as above, so nothing is compiled for it.
    first_row_alone = np.repeat(prompt[:1, 3:], 3, axis=0)
    tokens = generation.generate(model, first_row_alone, TOKENS, greedy=True)
    np.testing.assert_array_equal(tokens, np.repeat(alone[:1], 3, axis=0))


def test_text_follows_the_documented_window(models):
    _, twin = models("learned")
    prompt = prompts(batch=1)
    window, expected = list(prompt[0]), []
    for _ in range(TOKENS):
        if len(window) > CONTEXT:
            window = window[-(CONTEXT // 2) :]
        with torch.no_grad():
            logits = twin(torch.tensor([window]))[0, -1]
        expected.append(int(logits.argmax()))
        window.append(expected[-1])
    assert torch_generate(twin, prompt, TOKENS, greedy=True)[0].tolist() == expected


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT])
def test_prompts_up_to_the_context_are_kept_and_longer_ones_cut_to_half(models, length):
    model, twin = models("learned")
    prompt = prompts(length=length)
    kept = prompt if length <= CONTEXT else prompt[:, -(CONTEXT // 2) :]
    with torch.no_grad():
        expected = twin(torch.from_numpy(kept))[:, -1].argmax(dim=-1).numpy()
    tokens = generation.generate(model, prompt, 5, greedy=True)
    np.testing.assert_array_equal(tokens[:, 0], expected)
    np.testing.assert_array_equal(torch_generate(twin, prompt, 5, greedy=True), tokens)


@pytest.mark.parametrize("context", [1, 2, 3])
def test_the_smallest_contexts_work(context):
    model, twin = build(context_length=context, num_layers=1)
    prompt = prompts(length=2)
    tokens = generation.generate(model, prompt, 7, greedy=True)
    for use_cache in (True, False):
        settings = {"greedy": True, "use_cache": use_cache}
        np.testing.assert_array_equal(generation.generate(model, prompt, 7, **settings), tokens)
        np.testing.assert_array_equal(torch_generate(twin, prompt, 7, **settings), tokens)


def test_chunks_and_the_cache_do_not_change_what_is_sampled(models):
    model, twin = models("alibi")
    prompt = prompts()
    settings = {"temperature": 0.8, "top_k": 13, "top_p": 0.9}
    key = jax.random.key(5)
    whole = generation.generate(model, prompt, TOKENS, key=key, **settings)
    for chunk, use_cache in ((1, True), (7, True), (16, False)):
        parts = list(
            generation.stream(
                model, prompt, TOKENS, key=key, chunk=chunk, use_cache=use_cache, **settings
            )
        )
        assert max(part.shape[1] for part in parts) <= chunk
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    other = generation.generate(model, prompt, TOKENS, key=jax.random.key(6), **settings)
    assert (other != whole).any()

    def torch_parts(chunk):
        generator = torch.Generator().manual_seed(5)
        return list(
            torch_generation.stream(
                twin, torch.from_numpy(prompt), TOKENS, generator=generator, chunk=chunk, **settings
            )
        )

    torch.testing.assert_close(torch.cat(torch_parts(7), 1), torch.cat(torch_parts(TOKENS), 1))


def test_shorter_texts_are_the_beginning_of_longer_ones(models):
    model, _ = models("alibi")
    key = jax.random.key(1)
    longer = generation.generate(model, prompts(), 29, key=key)
    shorter = generation.generate(model, prompts(), 11, key=key)
    np.testing.assert_array_equal(shorter, longer[:, :11])


def test_a_cache_shorter_than_the_context_gives_the_same_text(models, monkeypatch):
    model, _ = models("learned")
    for use_cache in (True, False):
        settings = {"greedy": True, "use_cache": use_cache}
        longer = generation.generate(model, prompts(), 9, **settings)
        with monkeypatch.context() as patch:
            patch.setattr(generation, "SHORTEST_CACHE", generation.SHORTEST_PREFILL)
            shorter = generation.generate(model, prompts(), 9, **settings)
        np.testing.assert_array_equal(shorter, longer)


def test_no_tokens_is_an_empty_result(models):
    model, twin = models("alibi")
    assert generation.generate(model, prompts(), 0, greedy=True).shape == (3, 0)
    assert torch_generate(twin, prompts(), 0, greedy=True).shape == (3, 0)


def test_top_k_of_one_is_greedy(models):
    model, twin = models("alibi")
    greedy = generation.generate(model, prompts(), TOKENS, greedy=True)
    tokens = generation.generate(model, prompts(), TOKENS, top_k=1, key=jax.random.key(0))
    np.testing.assert_array_equal(tokens, greedy)
    np.testing.assert_array_equal(torch_generate(twin, prompts(), TOKENS, top_k=1), greedy)


def test_tokens_are_drawn_with_the_filtered_probabilities(models):
    model, twin = models("none")
    count = 5000
    prompt = np.repeat(prompts(batch=1), count, axis=0)
    settings = {"temperature": 5.0, "top_k": 17, "top_p": 0.8}
    with torch.no_grad():
        logits = twin(torch.from_numpy(prompt[:1]))[0, -1]
    p = torch_filter_logits(logits, **settings).softmax(dim=-1).numpy()
    assert 5 < np.count_nonzero(p) < 17
    drawn = {
        "jax": generation.generate(model, prompt, 1, key=jax.random.key(2), **settings),
        "torch": torch_generate(
            twin, prompt, 1, generator=torch.Generator().manual_seed(2), **settings
        ),
    }
    for side, tokens in drawn.items():
        frequency = np.bincount(tokens[:, 0], minlength=V) / count
        assert (frequency[p == 0] == 0).all(), side
        assert (np.abs(frequency - p) <= 4 * np.sqrt(p * (1 - p) / count)).all(), side


def test_another_prompt_length_or_count_compiles_nothing(caplog):
    model, _ = build(positions="learned", num_layers=1, context_length=64)

    def compiled(length, count, **settings):
        caplog.clear()
        with jax.log_compiles():
            generation.generate(model, prompts(length=length), count, **settings)
        return [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]

    key = jax.random.key(0)
    assert compiled(9, 5, key=key)
    for length, count in ((9, 5), (14, 30), (2, 1), (16, 40)):
        assert compiled(length, count, key=key) == []
    assert compiled(9, 5, key=key, temperature=0.5), "the check must see a compilation"


def test_the_model_stays_in_its_mode_and_is_used_in_evaluation_mode():
    rates = {"embedding_dropout": 0.3, "attention_dropout": 0.2, "residual_dropout": 0.4}
    model, twin = build(num_layers=1, **rates)
    expected = generation.generate(model, prompts(), 9, greedy=True)
    np.testing.assert_array_equal(torch_generate(twin, prompts(), 9, greedy=True), expected)

    model.train()
    seed_dropout(model, jax.random.key(0))
    model.embedding_dropout.deterministic = True
    before = {path: vars(d).copy() for path, d in dropout_modules(model).items()}
    np.testing.assert_array_equal(generation.generate(model, prompts(), 9, greedy=True), expected)
    assert {path: vars(d) for path, d in dropout_modules(model).items()} == before

    twin.train()
    twin.embedding_dropout.eval()
    modes = [module.training for module in twin.modules()]
    parts = []
    for part in torch_generation.stream(twin, torch.from_numpy(prompts()), 9, greedy=True, chunk=2):
        assert [module.training for module in twin.modules()] == modes
        assert torch.is_grad_enabled()
        assert not part.requires_grad
        parts.append(part)
    np.testing.assert_array_equal(torch.cat(parts, dim=1).numpy(), expected)


def test_bfloat16_models_generate():
    model, twin = build(positions="rotary", head_dim=10, num_layers=1, dtype=jnp.bfloat16)
    tokens = generation.generate(model, prompts(), TOKENS, key=jax.random.key(0))
    twin_tokens = torch_generate(twin.bfloat16(), prompts(), TOKENS)
    for drawn in (tokens, twin_tokens):
        assert drawn.shape == (3, TOKENS)
        assert drawn.min() >= 0
        assert drawn.max() < V


def test_caches_have_the_shape_and_dtype_asked_for():
    config = TransformerLMConfig(vocab_size=V, **{**BASE, "num_kv_heads": 2, "head_dim": 7})
    torch_config = TorchTransformerLMConfig(**dataclasses.asdict(config))
    caches = generation.make_cache(config, 3, 11, jnp.bfloat16)
    torch_caches = torch_generation.make_cache(torch_config, 3, 11, torch.bfloat16)
    assert len(caches) == len(torch_caches) == config.num_layers
    for cache, twin in zip(caches, torch_caches, strict=True):
        for name in ("k_BSKH", "v_BSKH"):
            assert getattr(cache, name).shape == tuple(getattr(twin, name).shape) == (3, 11, 2, 7)
            assert getattr(cache, name).dtype == jnp.bfloat16
            assert getattr(twin, name).dtype == torch.bfloat16
        assert int(cache.length) == twin.length == 0


REFUSED = {
    "temperature must be positive and finite: got 0": {"temperature": 0},
    "temperature must be positive and finite: got nan": {"temperature": float("nan")},
    "temperature must be positive and finite: got inf": {"temperature": float("inf")},
    "top_k must be at least 1: got 0": {"top_k": 0},
    "top_p must be in (0, 1]: got 0.0": {"top_p": 0.0},
    "top_p must be in (0, 1]: got 1.5": {"top_p": 1.5},
    "top_p must be in (0, 1]: got nan": {"top_p": float("nan")},
    "num_tokens must not be negative: got -1": {"num_tokens": -1},
    "chunk must be at least 1: got 0": {"chunk": 0},
    "must be (B, T) with B, T >= 1: got shape (2, 0)": {"prompt": np.zeros((2, 0), np.int32)},
    "must be (B, T) with B, T >= 1: got shape (5,)": {"prompt": np.zeros(5, np.int32)},
    "must hold integer ids": {"prompt": np.zeros((1, 3), np.float32)},
    "prompt ids must be in [0, 31): got 31": {"prompt": np.array([[0, 31, 1]])},
    "prompt ids must be in [0, 31): got -1": {"prompt": np.array([[0, 2], [-1, 1]])},
    "the mask must be boolean": {"mask": np.ones((3, 7), np.int32)},
    "with the prompt's shape (3, 7)": {"mask": np.ones((3, 6), bool)},
    "every row of the mask": {"mask": np.arange(7)[None, :].repeat(3, 0) < 5},
    "every row of the mask must be padding": {"mask": np.zeros((3, 7), bool)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_work_is_refused_before_anything_runs(models, message):
    model, twin = models("none")
    settings = {"prompt": prompts(), "num_tokens": 4, "mask": None, **REFUSED[message]}
    prompt, num_tokens, mask = (settings.pop(k) for k in ("prompt", "num_tokens", "mask"))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        generation.stream(model, prompt, num_tokens, greedy=True, mask=mask, **settings)
    assert "\n" not in str(error.value)
    torch_mask = None if mask is None else torch.from_numpy(mask)
    with pytest.raises(ValueError, match=re.escape(message)):
        torch_generation.stream(
            twin, torch.from_numpy(prompt), num_tokens, greedy=True, mask=torch_mask, **settings
        )


def test_sampling_needs_a_key(models):
    model, _ = models("none")
    with pytest.raises(ValueError, match="sampling needs a key"):
        generation.generate(model, prompts(), 4)


def test_a_layer_with_full_attention_sees_past_the_window_through_the_cache():
    settings = {**MODELS["alternating_windows"], "full_attention_layers": ()}
    prompt = prompts()
    windowed = generation.generate(build(**settings)[0], prompt, TOKENS, greedy=True)
    for layers in ((0,), (1,), (0, 1, 2)):
        model, twin = build(**{**settings, "full_attention_layers": layers})
        text = generation.generate(model, prompt, TOKENS, greedy=True)
        assert (text != windowed).any()
        np.testing.assert_array_equal(torch_generate(twin, prompt, TOKENS, greedy=True), text)


def test_a_model_without_a_head_cannot_generate():
    model, twin = build(num_layers=1, head="none")
    with pytest.raises(ValueError, match="only a model with a head can generate"):
        generation.stream(model, prompts(), 4, greedy=True)
    with pytest.raises(ValueError, match="only a model with a head can generate"):
        torch_generation.stream(twin, torch.from_numpy(prompts()), 4, greedy=True)


def test_a_model_that_sees_the_future_cannot_generate():
    model, twin = build(causal=False, num_layers=1)
    with pytest.raises(ValueError, match="only a causal model can generate"):
        generation.generate(model, prompts(), 4, greedy=True)
    with pytest.raises(ValueError, match="only a causal model can generate"):
        torch_generate(twin, prompts(), 4, greedy=True)
