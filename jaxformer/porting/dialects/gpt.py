"""The GPTs: ``openai-gpt``, ``gpt2``, ``gpt_bigcode``, ``gpt_neo``, ``gptj`` and ``codegen``.

- GPT-2's matrices are (in, out), as those of the GPT before it, which is post-norm. SantaCoder and
  StarCoder (arXiv 2301.03988, 2305.06161) have PyTorch's, and one key/value head for all.
- GPT-Neo has a window in some layers, and scores that are not scaled.
- GPT-J-6B and CodeGen (arXiv 2203.13474) have parallel branches with one norm, and rotate pairs of
  neighbours; CodeGen's queries, values and keys are in one array.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.errors import UsageError
from jaxformer.porting.dialects.common.buffers import causal_mask, masked_score
from jaxformer.porting.dialects.common.hugging_face import language_model
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    ACTIVATIONS_OF_TORCH,
    ATTENTION_DROPOUT,
    even_head_width,
)
from jaxformer.porting.dialects.common.stacks import rotated, stack_rules
from jaxformer.porting.mapping.adapter import Buffer, StateDictAdapter
from jaxformer.porting.mapping.packings import Fused, FusedByHead, Packing
from jaxformer.porting.mapping.rules import Rule, Rules, names, untransposed
from jaxformer.porting.mapping.settings import (
    Checked,
    Choices,
    Conversion,
    Flag,
    Mapped,
    Required,
    Row,
    Values,
    fixed,
    unsupported,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.transformer_lm import TransformerLM


def body(
    attention: Rules,
    path: str = "attn",
    *,
    up: str = "c_fc",
    down: str = "c_proj",
    tokens: str = "wte",
    **more: str,
) -> Rules:
    """Returns the rules of the stack.

    Args:
        attention: the rules of an attention.
        path: the name of that.
        up: the name of the first matrix of a feed-forward.
        down: that of the second.
        tokens: the name of the token embedding.
        more: those of other modules of the stack: target = source.
    """
    return stack_rules(
        "h.*",
        (path, attention),
        ("mlp", names(up_proj=up, down_proj=down)),
        {"attention_norm": "ln_1", "feed_forward_norm": "ln_2"},
        token_embedding=tokens,
        final_norm="ln_f",
        **more,
    )


def _fused(packing: Packing) -> Rules:
    qkv = Rule(("q_proj", "k_proj", "v_proj"), ("c_attn",), packing)
    return (qkv, *names(o_proj="c_proj"))


# The length of the context again, and a head for another task.
NOT_READ = Inert(
    (
        "n_ctx", "intermediate_size", "n_special", "predict_special_tokens", "summary_type",
        "summary_use_proj", "summary_activation", "summary_proj_to_labels",
        "summary_first_dropout",
    )
)  # fmt: skip
SIZES_AND_DROPOUTS = (
    Mapped(("n_embd", "hidden_size"), "d_model"),
    Mapped(("n_head", "num_attention_heads"), "num_heads"),
    Mapped(("n_layer", "num_hidden_layers"), "num_layers"),
    Mapped(("n_positions", "max_position_embeddings"), "context_length"),
    Mapped("layer_norm_epsilon", "norm_eps", 1e-5),
    Mapped("embd_pdrop", "embedding_dropout", 0.0),
    Mapped("attn_pdrop", "attention_dropout", 0.0),
    Mapped("resid_pdrop", ("feed_forward_dropout", "output_dropout"), 0.0),
    NOT_READ,
)
STACK = (
    *SIZES_AND_DROPOUTS,
    Mapped("n_inner", "d_ff", None),
    Mapped("activation_function", "activation", translation=ACTIVATIONS),
)
GPT2 = (
    Required("scale_attn_weights", True),
    Required("scale_attn_by_inverse_layer_idx", False),
    Required("add_cross_attention", False),
    *STACK,
    # In which dtype the scores are computed.
    Inert(("reorder_and_upcast_attn",)),
)
# OpenAI's gelu is the approximation.
FIRST_ACTIVATIONS = Choices({"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"})
OPENAI_GPT = (
    *SIZES_AND_DROPOUTS,
    Mapped("afn", "activation", translation=FIRST_ACTIVATIONS),
    *fixed(block="post_norm", final_norm=False),
)
MULTI_QUERY = Conversion(
    lambda is_shared, values: 1 if is_shared else values["num_heads"],
    lambda num_kv_heads, config: num_kv_heads == 1,
)
BIGCODE = (
    *STACK,
    Mapped("activation_function", "activation", translation=ACTIVATIONS_OF_TORCH),
    Mapped("multi_query", "num_kv_heads", True, MULTI_QUERY, written_from="key_value_heads"),
    Mapped("scale_attn_weights", "attention_scale", True, Flag(None, 1.0)),
    Required("add_cross_attention", False),
    # multi_query again, in which dtype the scores are computed, and how an early server ran.
    Inert(
        (
            "num_key_value_heads",
            "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner",
            "max_batch_size", "max_sequence_length", "pad_key_length", "pre_allocate_kv_cache",
            "validate_runner_input",
        )
    ),
)  # fmt: skip


@dataclass(frozen=True)
class AttentionTypes(Row):
    """Which layers see a window: ``local`` ones; ``global`` ones see all.

    ``attention_types`` has pairs of a pattern and how often it is repeated, ``attention_layers``
    the same for each layer.
    """

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the window and the layers without it, or nothing."""
        types = source_model.setting("attention_types", default=[[["global", "local"], 12]])
        window = source_model.setting("window_size", default=256)
        expanded = [kind for pattern, count in types for _ in range(count) for kind in pattern]
        layers = source_model.setting("attention_layers", default=expanded)
        if layers != expanded and "attention_types" in source_model.config:
            raise unsupported("attention_layers", "be what attention_types says", layers)
        if set(layers) - {"global", "local"} or len(layers) != values["num_layers"]:
            count = values["num_layers"]
            raise unsupported("attention_types", f"be global or local for {count} layers", types)
        if "local" not in layers:
            return {}
        full = tuple(n for n, kind in enumerate(layers) if kind == "global")
        return {"sliding_window": window, "full_attention_layers": full}

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives the window, and the shortest pattern of layers."""
        count, window = config.num_layers, config.attention.sliding_window
        kinds = ["global" if config.window(n) is None else "local" for n in range(count)]
        period = next(n for n in range(1, count + 1) if kinds == kinds[:n] * (count // n))
        return {
            "attention_types": [[kinds[:period], count // period]],
            "window_size": 256 if window is None else window,
        }


GPT_NEO = (
    Mapped("hidden_size", "d_model"),
    Mapped(("num_heads", "num_attention_heads"), "num_heads"),
    Checked(even_head_width),
    Mapped(("num_layers", "num_hidden_layers"), "num_layers"),
    Mapped("max_position_embeddings", "context_length"),
    Mapped("intermediate_size", "d_ff", None),
    Mapped("activation_function", "activation", translation=ACTIVATIONS),
    Mapped("layer_norm_epsilon", "norm_eps", 1e-5),
    AttentionTypes(),
    ATTENTION_DROPOUT,
    Mapped("embed_dropout", "embedding_dropout", 0.0),
    Mapped("resid_dropout", ("feed_forward_dropout", "output_dropout"), 0.0),
    NOT_READ,
    *fixed(attention_scale=1.0, qkv_bias=False),
)


# CodeGen was trained on this many devices, each of which has its share of the heads.
CODEGEN_SHARES = 4


def _fraction(width: int, values: Values) -> float:
    """Returns the share of a head that is turned, of which the head's width makes ``width``."""
    head_width = even_head_width(values)
    fraction = width / head_width
    return fraction if int(head_width * fraction) == width else math.nextafter(fraction, math.inf)


ROTARY_WIDTH = Conversion(_fraction, lambda fraction, config: int(config.head_width * fraction))
GPTJ = (
    *STACK,
    Mapped("rotary_dim", "rotary_fraction", translation=ROTARY_WIDTH),
    Required("rotary", True),
    Required("scale_attn_weights", True),
    *fixed(positions="rotary", rotary_interleaved=True, block="parallel", shared_norm=True),
    *fixed(qkv_bias=False, output_bias=False, head_bias=True),
)


def _check_shares(values: Values) -> None:
    if values["num_heads"] % CODEGEN_SHARES:
        raise UsageError(
            f"num_attention_heads must be divisible by {CODEGEN_SHARES}: got {values['num_heads']}"
        )


def _separate(module: TransformerLM) -> Rules:
    queries_and_keys = {"q_proj": "q_proj", "k_proj": "k_proj"}
    return (*rotated(module, queries_and_keys, neighbours=True), *names(v_proj="v_proj"))


def _shared_out(module: TransformerLM) -> Rules:
    return (Rule(("q_proj", "v_proj", "k_proj"), ("qkv_proj",), FusedByHead(CODEGEN_SHARES)),)


def _old_buffers(
    attention: str = "attn", mask: str | None = "bias", score: float = -1e4
) -> tuple[Buffer, ...]:
    """Returns the buffers of old files: of the causal mask, and the score of what it hides."""
    masks = () if mask is None else (Buffer(f"h.*.{attention}.{mask}", causal_mask, written=False),)
    return (*masks, Buffer(f"h.*.{attention}.masked_bias", masked_score(score), written=False))


def _parallel(
    name: str,
    settings: tuple[Row, ...],
    projections: Callable[[TransformerLM], Rules],
    mask: str,
    **more: Any,
) -> StateDictAdapter:
    """Returns the adapter of GPT-J or its kin, from the projections to queries, keys and values."""

    def rules(module: TransformerLM) -> Rules:
        attention = (*projections(module), *names(o_proj="out_proj"))
        return body(attention, up="fc_in", down="fc_out")

    return language_model(name, settings, rules, buffers=_old_buffers("attn", mask, -1e9), **more)


def _bigcode_body(module: TransformerLM) -> Rules:
    packing = FusedByHead(module.config.key_value_heads)
    return body(_fused(packing), position_embedding="wpe")


ONE_MATRIX = _fused(Fused())
FIRST_EMBEDDINGS = {"tokens": "tokens_embed", "position_embedding": "positions_embed"}
SEPARATE = names(q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", o_proj="out_proj")
DIALECTS = (
    language_model(
        "gpt2",
        GPT2,
        untransposed(body(ONE_MATRIX, position_embedding="wpe")),
        buffers=_old_buffers(),
    ),
    language_model(
        "openai-gpt",
        OPENAI_GPT,
        untransposed(body(ONE_MATRIX, **FIRST_EMBEDDINGS)),
        buffers=_old_buffers(),
    ),
    language_model("gpt_bigcode", BIGCODE, _bigcode_body),
    language_model(
        "gpt_neo",
        GPT_NEO,
        body(SEPARATE, "attn.attention", position_embedding="wpe"),
        buffers=_old_buffers("attn.attention", None, -1e9),
    ),
    _parallel("gptj", GPTJ, _separate, "bias", translated=frozenset({"interleaved"})),
    _parallel("codegen", (*GPTJ, Checked(_check_shares)), _shared_out, "causal_mask"),
)
