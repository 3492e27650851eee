"""Hugging Face's ``llama``, ``mistral``, ``ministral``, ``qwen2`` and ``qwen3``: one stack."""

from collections.abc import Callable
from typing import Any

from jaxformer.porting.dialects.common.buffers import inverse_frequencies
from jaxformer.porting.dialects.common.hugging_face import language_model, rotated, stack_rules
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ATTENTION_DROPOUT,
    FEED_FORWARD_WIDTH,
    GATED_ACTIVATIONS,
    KEY_VALUE_HEADS,
    SlidingWindow,
    even_head_width,
)
from jaxformer.porting.dialects.common.rotary_settings import RotaryPositions
from jaxformer.porting.mapping.adapter import Buffer, StateDictAdapter
from jaxformer.porting.mapping.rules import Rules, names
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    Checked,
    Fixed,
    Mapped,
    Required,
    Row,
    Values,
    fixed,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.transformer_lm import TransformerLM

# In every layer of old checkpoints.
OLD_BUFFERS = (
    Buffer("layers.*.self_attn.rotary_emb.inv_freq", inverse_frequencies, written=False),
)
GATED_FEED_FORWARD = names(gate_proj="gate_proj", up_proj="up_proj", down_proj="down_proj")


def body(
    module: TransformerLM,
    *,
    q_norm: str = "q_norm",
    k_norm: str = "k_norm",
    neighbours: bool = False,
    qkv: Rules | None = None,
    feed_forward: Rules = GATED_FEED_FORWARD,
    **norms: str,
) -> Rules:
    """Returns the rules of the stack.

    Args:
        module: the target.
        q_norm: what the source calls the norm of queries.
        k_norm: and that of keys.
        neighbours: see ``rotated``.
        qkv: of the projections to queries, keys and values where they are no three of their own.
        feed_forward: of the feed-forward.
        norms: those of its blocks: target = source.
    """
    same = {"q_proj": "q_proj", "k_proj": "k_proj"}
    queries_and_keys = {**same, "q_norm": q_norm, "k_norm": k_norm}
    if qkv is None:
        qkv = (
            *rotated(module, queries_and_keys, neighbours=neighbours),
            *names(v_proj="v_proj"),
        )
    return stack_rules(
        "layers.*",
        ("self_attn", (*qkv, *names(o_proj="o_proj"))),
        ("mlp", feed_forward),
        norms,
        token_embedding="embed_tokens",
        final_norm="norm",
    )


def two_norm_body(module: TransformerLM, **more: Any) -> Rules:
    """Returns the rules of the stack whose blocks normalise what enters their two branches.

    Args:
        module: the target.
        more: see ``body``.
    """
    return body(
        module,
        attention_norm="input_layernorm",
        feed_forward_norm="post_attention_layernorm",
        **more,
    )


def _default_head_width(source_model: SourceModel, values: Values) -> int:
    return even_head_width(values)


HEAD_WIDTH = Mapped("head_dim", "head_dim", _default_head_width, written_from="head_width")
ATTENTION_BIAS = Mapped("attention_bias", ("output_bias", "qkv_bias"), False, BOOLEAN)
# transformers' class has no such setting: where a config.json has it, it changes nothing there.
NO_ATTENTION_BIAS = (
    Mapped("attention_bias", "output_bias", is_read=False),
    *fixed(qkv_bias=False, output_bias=False),
)
NO_FEED_FORWARD_BIAS = (
    Mapped("mlp_bias", "feed_forward_bias", is_read=False),
    Fixed("feed_forward_bias", False),
)


ROTARY = RotaryPositions()


def stack(
    head_width: Mapped,
    *attention_bias: Row,
    eps: str = "rms_norm_eps",
    rotary: Row | None = ROTARY,
) -> tuple[Row, ...]:
    """Returns the rows that these families and their kin have alike.

    Args:
        head_width: the row of the width of a head.
        attention_bias: the rows of the biases of an attention.
        eps: the name of what norms add to the variance.
        rotary: the row of rotary positions; None where it is to follow others.
    """
    return (
        Mapped("hidden_size", "d_model"),
        Mapped("num_attention_heads", "num_heads"),
        KEY_VALUE_HEADS,
        head_width,
        Mapped("num_hidden_layers", "num_layers"),
        Mapped("max_position_embeddings", "context_length"),
        FEED_FORWARD_WIDTH,
        Mapped(eps, "norm_eps", 1e-6),
        *attention_bias,
        ATTENTION_DROPOUT,
        *([] if rotary is None else [rotary]),
        Fixed("norm", "rms_norm"),
    )


def _all_sliding(source_model: SourceModel, num_layers: int) -> list[str]:
    return ["sliding_attention"] * num_layers


def _full_layers_first(source_model: SourceModel, num_layers: int) -> list[str]:
    """Returns Qwen's types of layers: the first ones see all."""
    first = source_model.setting("max_window_layers", default=28)
    return [
        "full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)
    ]


GATED = Mapped("hidden_act", "activation", translation=GATED_ACTIVATIONS)
LLAMA = (
    *stack(HEAD_WIDTH, ATTENTION_BIAS),
    Checked(even_head_width),
    GATED,
    Mapped("mlp_bias", "feed_forward_bias", False, BOOLEAN),
    # How many slices the products were once computed in.
    Inert(("pretraining_tp", "max_sequence_length")),
)
MISTRAL = (
    *stack(HEAD_WIDTH, *NO_ATTENTION_BIAS),
    GATED,
    *NO_FEED_FORWARD_BIAS,
    # null says that there is none.
    Mapped("sliding_window", "sliding_window", 4096, is_nullable=True),
    # Only transformers' ministral has layers of several types.
    Inert(("layer_types",)),
)
MINISTRAL = (
    *stack(HEAD_WIDTH, *NO_ATTENTION_BIAS),
    GATED,
    *NO_FEED_FORWARD_BIAS,
    SlidingWindow(_all_sliding),
)
QWEN2 = (
    *stack(
        HEAD_WIDTH,
        Mapped("attention_bias", "output_bias", is_read=False),
        Fixed("qkv_bias", True),
        Fixed("output_bias", False),
    ),
    GATED,
    *NO_FEED_FORWARD_BIAS,
    SlidingWindow(_full_layers_first, has_switch=True),
    Inert(("max_window_layers",)),
    Required("use_mrope", False),
)
QWEN3 = (
    *stack(Mapped("head_dim", "head_dim", 128, written_from="head_width"), ATTENTION_BIAS),
    GATED,
    *NO_FEED_FORWARD_BIAS,
    Fixed("query_key_norm", True),
    SlidingWindow(_full_layers_first, has_switch=True),
    Inert(("max_window_layers",)),
)


def llama_adapter(
    name: str,
    settings: tuple[Row, ...],
    rules: Callable[[TransformerLM], Rules] = two_norm_body,
    *,
    buffers: tuple[Buffer, ...] = OLD_BUFFERS,
    translated: frozenset[str] = frozenset({"interleaved"}),
) -> StateDictAdapter:
    """Returns the adapter of a family with LLaMA's names.

    Args:
        name: the ``model_type``.
        settings: its rows.
        rules: of its body, from the target module.
        buffers: of its body.
        translated: see ``ModuleMapping``.
    """
    return language_model(name, settings, rules, buffers=buffers, translated=translated)


DIALECTS = (
    llama_adapter("llama", LLAMA),
    llama_adapter("mistral", MISTRAL),
    llama_adapter("ministral", MINISTRAL),
    llama_adapter("qwen2", QWEN2),
    llama_adapter("qwen3", QWEN3),
)
