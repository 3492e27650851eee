"""What the dialects of the five families reject: in one message, with all that is wrong."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx

from jaxformer.attention import MultiHeadAttention
from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.errors import CheckpointError, JaxformerError, UsageError
from jaxformer.feed_forward import FeedForward
from jaxformer.porting.api import from_torch, to_torch
from jaxformer.positions import Rotary, SinusoidalPositions
from jaxformer.transformer_lm import TransformerLM
from parity_tests.families import charlm, encdec, prepost, unified
from parity_tests.family_cases import MODULE_ROWS, SETTINGS
from tests.porting.test_family_dialects import make, told
from tests.support.ported_modules import same_bits, state_of
from tests.support.tiers import full_after

pytestmark = pytest.mark.usefixtures("float64")

D, N, F = 24, 4, 34
WITH_ARRAYS = [row for row in MODULE_ROWS if len(list(make(row, {}).parameters())) > 2]


@pytest.mark.parametrize("row", WITH_ARRAYS, ids=str)
def test_all_that_is_missing_or_unexpected_is_listed(row):
    source = make(row, {})
    names = [name for name, _ in source.named_parameters()]
    for first, second in ((0, 1), (len(names) // 2, -1), (-2, 0)):
        state = state_of(source)
        gone, renamed = names[first], names[second]
        del state[gone]
        state[f"{renamed}_"] = state.pop(renamed)
        for alias in ("head.weight", "output_proj.weight"):
            if {gone, renamed} & {"tok_emb.weight", "token_embedding.weight"}:
                state.pop(alias, None)
        with pytest.raises(CheckpointError) as refusal:
            from_torch(state, row.family, told(row, source))
        message = str(refusal.value)
        assert f"missing {gone} (target " in message
        assert f"missing {renamed} (target " in message
        assert f"(is it {renamed}_?)" in message
        assert f"unexpected {renamed}_" in message


@pytest.mark.parametrize("row", full_after(8, WITH_ARRAYS), ids=str)
def test_no_array_may_have_another_shape(row):
    source = make(row, {})
    # Of each list the first, and a decoder's beside an encoder's.
    names = [name for name, _ in source.named_parameters() if not re.search(r"\.[1-9]\d*\.", name)]
    for name in {re.sub(r"W_[vo]|w_[vo]|[KV]_weights", "", name): name for name in names}.values():
        state = state_of(source)
        state[name] = np.concatenate((state[name], state[name][..., :1]), axis=-1)
        with pytest.raises(JaxformerError):
            from_torch(state, row.family, told(row, source))


def test_all_that_is_wrong_is_listed_with_both_shapes():
    state = state_of(encdec.EncoderLayer(D, N, F))
    state["norm2.bias"] = state["norm2.bias"][:-1]
    state["self_attn.W_k.weight"] = state["self_attn.W_k.weight"][:, :-3]
    state["norm1.gamma"] = state.pop("norm1.weight")
    state["more"] = np.zeros(3)
    config = {"class": "EncoderLayer", "num_heads": N}
    with pytest.raises(CheckpointError) as refusal:
        from_torch(state, "encdec", config)
    assert "missing norm1.weight" in str(refusal.value)
    assert "unexpected norm1.gamma; unexpected more" in str(refusal.value)
    state["norm1.weight"] = state.pop("norm1.gamma")
    with pytest.raises(CheckpointError) as refusal:
        from_torch(state, "encdec", config)
    assert str(refusal.value) == (
        "the arrays are not those of EncoderLayer: unexpected more; "
        "norm2.bias has shape (23,), not (24,) (target feed_forward_norm.bias of (24,)); "
        "self_attn.W_k.weight has shape (24, 21), not (24, 24) "
        "(target attention.k_proj.kernel of (24, 24))"
    )
    from_torch({**state_of(encdec.EncoderLayer(D, N, F)), "more": np.zeros(3)}, "encdec", config,
               ignore=("mo*",))  # fmt: skip


def spoil(state: dict[str, np.ndarray], name: str, index: tuple[int, ...], value: float) -> Any:
    state[name] = state[name].copy()
    state[name][index] += value
    return state


@pytest.mark.parametrize(
    ("family", "source", "name", "index", "value"),
    [
        ("encdec", encdec.PositionalEncoding(D, 19), "pe", (0, 3, 2), 1e-5),
        ("encdec", encdec.Transformer(7, 11, D, N, 1, 1, F, 19), "positional_encoding.pe",
         (0, 3, 2), 1e-5),
        ("unified", unified.RoPE(10, 19), "cos", (0, 0, 3, 2), 1e-5),
        ("unified", unified.Transformer(7, D, N, 1, max_len=19, pos_enc_cls=unified.RoPE),
         "pos_enc.sin", (0, 0, 3, 2), 1e-5),
        ("charlm", charlm.Block(SETTINGS["config"]), "multi_head.heads.2.casual_attention_mask",
         (3, 4), 1.0),
        ("charlm", charlm.AttentionHead(SETTINGS["config"]), "casual_attention_mask", (3, 3), -1.0),
        ("charlm", charlm.AttentionHead(SETTINGS["config"]), "casual_attention_mask", (3, 3),
         np.nan),
    ],
)  # fmt: skip
def test_a_buffer_must_hold_what_we_would_compute(family, source, name, index, value):
    state = state_of(source)
    settings = {"class": type(source).__name__, "num_heads": N}
    from_torch(dict(state), family, settings)
    with pytest.raises(CheckpointError, match=f"the buffer {re.escape(name)} differs by"):
        from_torch(spoil(state, name, index, value), family, settings)


def test_a_mask_may_be_of_booleans_or_integers():
    state = state_of(charlm.AttentionHead(SETTINGS["config"]))
    for dtype in (np.bool_, np.int64, np.uint8, np.float16):
        as_such = {**state, "casual_attention_mask": state["casual_attention_mask"].astype(dtype)}
        same_bits(to_torch(from_torch(as_such, "charlm")), as_such)
    state["casual_attention_mask"] = state["casual_attention_mask"].T.astype(bool)
    with pytest.raises(CheckpointError, match="does not hold the computed values"):
        from_torch(state, "charlm")


@pytest.mark.parametrize(
    ("family", "source", "alias", "name"),
    [
        ("encdec", encdec.GPT(7, D, N, 1, F, 19), "output_proj.weight", "token_embedding.weight"),
        ("unified", unified.Transformer(7, D, N, 1), "head.weight", "tok_emb.weight"),
    ],
)
def test_a_tied_head_must_be_equal_and_may_be_missing(family, source, alias, name):
    state, settings = state_of(source), {"num_heads": N}
    for gone in (alias, name):
        one = {key: array for key, array in state.items() if key != gone}
        same_bits(to_torch(from_torch(one, family, settings)), state)
    with pytest.raises(CheckpointError, match=f"{alias} must equal {name}"):
        from_torch(spoil(state, alias, (3, 5), 1e-6), family, settings)


def test_settings_that_arrays_do_not_tell_are_named():
    state = state_of(unified.MultiHeadAttention(D, N))
    with pytest.raises(UsageError, match=r"give it as config=\{\"num_heads\""):
        from_torch(state, "unified")
    assert from_torch(state, "unified", {"head_dim": 6}).num_heads == 4
    block = state_of(prepost.PreNormTransformerBlock(D, N, F))
    with pytest.raises(UsageError, match=r"give it as config=\{\"pre_norm\""):
        from_torch(block, "prepost", {"num_heads": N})
    for kind in ("PreNorm", "PostNorm"):
        config = {"class": f"{kind}TransformerBlock", "num_heads": N}
        assert type(from_torch(block, "prepost", config)).__name__ == f"{kind}Block"
    with pytest.raises(UsageError, match="d_model must be divisible by num_heads"):
        from_torch(state, "unified", {"class": "MultiHeadAttention", "num_heads": 5})
    with pytest.raises(UsageError, match="charlm has no class Nope: it has AttentionHead, Multi"):
        from_torch(state, "charlm", {"class": "Nope"})
    with pytest.raises(UsageError, match="unified has no class Linear"):
        from_torch(torch.nn.Linear(3, 5), "unified")


def changed(source: torch.nn.Module, **attributes: Any) -> torch.nn.Module:
    """The module with other attributes, ``__`` for the dots of their paths."""
    for path, value in attributes.items():
        *owners, name = path.split("__")
        owner = source.get_submodule(".".join(owners))
        setattr(owner, name, value)
    return source


@pytest.mark.parametrize(
    ("family", "source", "message"),
    [
        ("prepost", changed(prepost.TransformerBlock(D, N, F), ff__1=torch.nn.GELU()),
         "ff.1 of TransformerBlock must be relu: got gelu"),
        ("prepost", changed(prepost.TransformerBlock(D, N, F), ff__1=torch.nn.Tanh()),
         "unsupported: activation must be .*: got Tanh"),
        ("charlm", changed(charlm.FeedForward(SETTINGS["config"]),
                           linear_layers__1=torch.nn.GELU(approximate="tanh")),
         "linear_layers.1 of FeedForward must be gelu: got gelu_tanh"),
        ("encdec", changed(encdec.GPT(7, D, N, 3, F, 19), blocks__2__norm1__eps=1e-3,
                           blocks__2__norm2__eps=1e-3), "number 2 differ in norm_eps"),
        ("encdec", changed(encdec.GPT(7, D, N, 3, F, 19), blocks__2__norm1__eps=1e-3),
         "0.001 at norm1, 1e-05 at norm2"),
        ("encdec", changed(encdec.Transformer(7, 9, D, N, 1, 1, F, 19),
                           decoder__layers__0__cross_attn__num_heads=6), "differ in num_heads"),
        ("unified", changed(unified.FeedForward(D, F, 0.2), net__4__p=0.3),
         "FeedForward drops at the rates 0.2 and 0.3"),
        ("unified", changed(unified.Transformer(7, D, N, 1), pos_enc=torch.nn.ReLU()),
         "unsupported: pos_enc must be .*: got .ReLU"),
        ("unified", changed(unified.Transformer(7, D, N, 2), layers__1__pre_norm=False),
         "a pre-norm Transformer has a final_norm"),
    ],
)  # fmt: skip
def test_a_module_that_computes_something_else_is_refused(family, source, message):
    with pytest.raises(UsageError, match=message):
        from_torch(source, family)


# Made when a test asks for them, as making them takes time.
def language_model(**settings: Any) -> Callable[[], TransformerLM]:
    config = {"d_model": D, "num_heads": N, "num_layers": 1, "context_length": 19, "vocab_size": 7}
    return lambda: TransformerLM(TransformerLMConfig(**{**config, **settings}), rngs=nnx.Rngs(0))


def encoder_decoder(**settings: Any) -> Callable[[], EncoderDecoder]:
    sizes = {"source_vocab_size": 7, "target_vocab_size": 9, "num_encoder_layers": 1,
             "num_decoder_layers": 1}  # fmt: skip
    config = {"d_model": D, "num_heads": N, "context_length": 19, **sizes, **settings}
    return lambda: EncoderDecoder(EncoderDecoderConfig(**config), rngs=nnx.Rngs(0))


def attention(**settings: Any) -> Callable[[], MultiHeadAttention]:
    return lambda: MultiHeadAttention(D, N, **settings, rngs=nnx.Rngs(0))


def feed_forward(**settings: Any) -> Callable[[], FeedForward]:
    return lambda: FeedForward(D, F, **settings, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("dialect", "module", "messages"),
    [
        ("unified", language_model(causal=False, activation="relu"),
         ["activation is 'relu' in jaxformer and 'gelu' in "]),
        ("unified", language_model(causal=True), ["causal is True in jaxformer and False in "]),
        ("unified", language_model(causal=False, positions="rotary", norm_eps=1e-6),
         ["interleaved is False in jaxformer and True in ",
          "eps is 1e-06 in jaxformer and 1e-05 in "]),
        ("unified", language_model(causal=False, tie_embeddings=False),
         ["no place for lm_head.kernel"]),
        ("unified", language_model(causal=False, sliding_window=3),
         ["sliding_window is 3 in jaxformer"]),
        ("unified", language_model(causal=False, embedding_scale=3.0), ["embedding_scale is 3.0"]),
        ("unified", language_model(causal=False, qkv_bias=False),
         ["q_proj.bias is None in jaxformer"]),
        ("encdec", language_model(), ["activation is 'gelu' in jaxformer and 'relu' in "]),
        ("encdec", language_model(activation="relu", positions="sinusoidal"), ["position"]),
        ("encdec", encoder_decoder(causal=False),
         ["embedding_scale is None in jaxformer and 4.89"]),
        ("encdec", encoder_decoder(causal=True, embedding_scale=D**0.5),
         ["causal is True in jaxformer"]),
        ("prepost", attention(head_dim=5),
         ["q_proj.kernel is (24, 20) in jaxformer and (24, 24) in "]),
        ("prepost", attention(num_kv_heads=2), ["num_kv_heads is 2 in jaxformer and 4 in "]),
        ("prepost", attention(use_bias=False), ["k_proj.bias is None in jaxformer and (24,) in "]),
        ("prepost", attention(scale=1.0), ["scale is 1.0 in jaxformer"]),
        ("minimal", attention(), ["the shape of q_proj.bias is (24,) in jaxformer and None in "]),
        ("encdec", attention(position=Rotary(6, 19)), ["position is 'Rotary' in jaxformer"]),
        ("minimal", feed_forward(activation="relu"),
         ["activation is 'relu' in jaxformer and 'gelu' in "]),
        ("charlm", feed_forward(), ["(24, 34) in jaxformer and (24, 96) in "]),
        ("charlm", language_model(), ["charlm has nothing that computes what TransformerLM does"]),
        ("prepost", lambda: SinusoidalPositions(19, D), ["prepost has nothing that computes"]),
    ],
)  # fmt: skip
def test_what_a_class_cannot_hold_is_not_exported(dialect, module, messages):
    with pytest.raises(UsageError) as refusal:
        to_torch(module(), dialect)
    for message in messages:
        assert message in str(refusal.value)


def test_a_module_with_another_eps_goes_back_where_it_came_from_and_nowhere_else():
    source = changed(prepost.TransformerBlock(D, N, F), norm1__eps=1e-6, norm2__eps=1e-3)
    target = from_torch(source, "prepost")
    assert (target.attention_norm.eps, target.feed_forward_norm.eps) == (1e-6, 1e-3)
    same_bits(to_torch(target), state_of(source))
    with pytest.raises(UsageError, match="eps is 1e-06 in jaxformer and 1e-05 in "):
        to_torch(target, "encdec")
