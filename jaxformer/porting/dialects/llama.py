"""Hugging Face's ``llama``, ``mistral``, ``ministral``, ``qwen2`` and ``qwen3``: one stack."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxformer.porting.dialects.common.buffers import inverse_frequencies
from jaxformer.porting.dialects.common.hugging_face import language_model
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ATTENTION_DROPOUT,
    FEED_FORWARD_WIDTH,
    GATED_ACTIVATIONS,
    KEY_VALUE_HEADS,
    even_head_width,
)
from jaxformer.porting.dialects.common.layer_patterns import SlidingWindow
from jaxformer.porting.dialects.common.rotary_settings import RotaryPositions
from jaxformer.porting.dialects.common.stacks import rotated, stack_rules
from jaxformer.porting.mapping.adapter import Buffer, StateDictAdapter
from jaxformer.porting.mapping.rules import Rules, names
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    Checked,
    Fixed,
    Mapped,
    Required,
    Row,
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
# Of blocks that normalise what enters their two branches.
TWO_NORMS = {
    "attention_norm": "input_layernorm",
    "feed_forward_norm": "post_attention_layernorm",
}


def body(
    module: TransformerLM,
    norms: Mapping[str, str] = TWO_NORMS,
    *,
    q_norm: str = "q_norm",
    k_norm: str = "k_norm",
    neighbours: bool = False,
    qkv: Callable[[TransformerLM], Rules] | None = None,
    feed_forward: Rules = GATED_FEED_FORWARD,
) -> Rules:
    """Returns the rules of the stack.

    Args:
        module: the target.
        norms: those of its blocks: target = source.
        q_norm: what the source calls the norm of queries.
        k_norm: and that of keys.
        neighbours: see ``rotated``.
        qkv: of the projections to queries, keys and values where they are no three of their own.
        feed_forward: of the feed-forward.
    """
    same = {"q_proj": "q_proj", "k_proj": "k_proj"}
    queries_and_keys = {**same, "q_norm": q_norm, "k_norm": k_norm}
    if qkv is None:
        heads = (
            *rotated(module, queries_and_keys, neighbours=neighbours),
            *names(v_proj="v_proj"),
        )
    else:
        heads = qkv(module)
    return stack_rules(
        "layers.*",
        ("self_attn", (*heads, *names(o_proj="o_proj"))),
        ("mlp", feed_forward),
        norms,
        token_embedding="embed_tokens",
        final_norm="norm",
    )


def head_width(default: Any, *, is_nullable: bool = False) -> Mapped:
    """Returns the row of the width of a head, which is this where there is none.

    Args:
        default: see ``Mapped``.
        is_nullable: whether null says that the heads share the width of the model.
    """
    return Mapped(
        "head_dim", "head_dim", default, written_from="head_width", is_nullable=is_nullable
    )


HEAD_WIDTH = head_width(lambda source_model, values: even_head_width(values))
ATTENTION_BIAS = Mapped("attention_bias", ("output_bias", "qkv_bias"), False, BOOLEAN)
FEED_FORWARD_BIAS = Mapped("mlp_bias", "feed_forward_bias", False, BOOLEAN)
BIASES = (ATTENTION_BIAS, FEED_FORWARD_BIAS)
# transformers' class has no such setting: where a config.json has it, it changes nothing there.
NO_FEED_FORWARD_BIAS = (FEED_FORWARD_BIAS, Fixed("feed_forward_bias", False))
NO_BIASES = (*BIASES, *fixed(qkv_bias=False, output_bias=False, feed_forward_bias=False))
GATED = Mapped("hidden_act", "activation", translation=GATED_ACTIVATIONS)
ROTARY = RotaryPositions()


def stack(
    *differences: Row,
    heads: Row = HEAD_WIDTH,
    biases: tuple[Row, ...] = BIASES,
    activation: Row = GATED,
    eps: str = "rms_norm_eps",
    rotary: Row | None = ROTARY,
) -> tuple[Row, ...]:
    """Returns the rows of one of the kin: LLaMA's, and where it differs.

    Args:
        differences: further rows; a field is what the last row says.
        heads: the row of the width of a head.
        biases: the rows of the biases of attention and feed-forward.
        activation: the row of the activation.
        eps: the name of what norms add to the variance.
        rotary: the row of rotary positions; None where it is among the differences.
    """
    return (
        Mapped("hidden_size", "d_model"),
        Mapped("num_attention_heads", "num_heads"),
        KEY_VALUE_HEADS,
        heads,
        Mapped("num_hidden_layers", "num_layers"),
        Mapped("max_position_embeddings", "context_length"),
        FEED_FORWARD_WIDTH,
        activation,
        Mapped(eps, "norm_eps", 1e-6),
        *biases,
        ATTENTION_DROPOUT,
        *([] if rotary is None else [rotary]),
        Fixed("norm", "rms_norm"),
        *differences,
    )


def _all_sliding(source_model: SourceModel, num_layers: int) -> list[str]:
    return ["sliding_attention"] * num_layers


def _full_layers_first(source_model: SourceModel, num_layers: int) -> list[str]:
    """Returns Qwen's types of layers: the first ones see all."""
    first = source_model.setting("max_window_layers", default=28)
    return [
        "full_attention" if layer < first else "sliding_attention" for layer in range(num_layers)
    ]


LLAMA = stack(
    Checked(even_head_width),
    # How many slices the products were once computed in.
    Inert(("pretraining_tp", "max_sequence_length")),
)
MISTRAL = stack(
    # null says that there is none.
    Mapped("sliding_window", "sliding_window", 4096, is_nullable=True),
    # Only transformers' ministral has layers of several types.
    Inert(("layer_types",)),
    biases=NO_BIASES,
)
QWEN2 = stack(
    Fixed("qkv_bias", True),
    SlidingWindow(_full_layers_first, has_switch=True),
    Inert(("max_window_layers",)),
    Required("use_mrope", False),
    biases=NO_BIASES,
)
QWEN3 = stack(
    Fixed("query_key_norm", True),
    SlidingWindow(_full_layers_first, has_switch=True),
    Inert(("max_window_layers",)),
    heads=head_width(128),
    biases=(ATTENTION_BIAS, *NO_FEED_FORWARD_BIAS),
)


def llama_adapter(
    name: str,
    settings: tuple[Row, ...],
    *,
    neighbours: bool = False,
    buffers: tuple[Buffer, ...] = OLD_BUFFERS,
    translated: frozenset[str] = frozenset({"interleaved"}),
    **names_of_body: Any,
) -> StateDictAdapter:
    """Returns the adapter of one of the kin.

    Args:
        name: the ``model_type``.
        settings: its rows.
        neighbours: whether it rotates neighbours, and not the two halves of a head.
        buffers: of its body.
        translated: see ``ModuleMapping``.
        names_of_body: where its names are not LLaMA's, see ``body``.
    """
    rules = functools.partial(body, neighbours=neighbours, **names_of_body)
    rotation = (Fixed("rotary_interleaved", True),) if neighbours else ()
    return language_model(
        name, (*settings, *rotation), rules, buffers=buffers, translated=translated
    )


DIALECTS = (
    llama_adapter("llama", LLAMA),
    llama_adapter("mistral", MISTRAL),
    llama_adapter("ministral", stack(SlidingWindow(_all_sliding), biases=NO_BIASES)),
    llama_adapter("qwen2", QWEN2),
    llama_adapter("qwen3", QWEN3),
)
