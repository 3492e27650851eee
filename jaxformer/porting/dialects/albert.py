"""Hugging Face's ``albert``, ``mpnet`` and ``roformer``: encoders that differ from BERT in a part.

- ``albert`` (arXiv 1909.11942): layers share their weights, in groups, and embeddings are narrower.
- ``mpnet`` (arXiv 2004.09297): beside learned positions, each head has a number for each span of
  distances, the same in all layers. transformers gives padding, by its id, no position: pass
  ``positions`` that count real tokens where a text has some.
- ``roformer`` (arXiv 2104.09864): rotary positions, which turn neighbours. With ``is_decoder`` it
  is causal and writes text.
"""

from typing import Any

import numpy as np

from jaxformer.porting.dialects.bert import (
    BERT_HEAD,
    GELU_HEAD,
    KIN,
    MASKED_LM,
    POST_NORM,
    ROBERTA_HEAD,
    body,
    has_pooler,
    masked_lm_head,
)
from jaxformer.porting.dialects.common.buffers import rotaries
from jaxformer.porting.dialects.common.hugging_face import language_model
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    FEED_FORWARD_WIDTH,
    SIZES,
    even_head_width,
    narrow_embedding,
)
from jaxformer.porting.dialects.common.stacks import stack_rules
from jaxformer.porting.mapping.adapter import Buffer
from jaxformer.porting.mapping.packings import Shape
from jaxformer.porting.mapping.position_tables import install_table
from jaxformer.porting.mapping.rules import Rules, names, under
from jaxformer.porting.mapping.settings import Conversion, Fixed, Mapped, Required, fixed
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.transformer_lm import TransformerLM


def _albert_body(module: TransformerLM) -> Rules:
    size = module.config.layers.layers_in_group
    projections = names(q_proj="query", k_proj="key", v_proj="value", o_proj="dense")
    block = (
        *under("attention", "attention", projections),
        *under("feed_forward", "", names(up_proj="ffn", down_proj="ffn_output")),
        *names(attention_norm="attention.LayerNorm", feed_forward_norm="full_layer_layer_norm"),
    )
    around = names(
        token_embedding="embeddings.word_embeddings",
        position_embedding="embeddings.position_embeddings",
        token_type_embedding="embeddings.token_type_embeddings",
        embedding_norm="embeddings.LayerNorm",
        embedding_projection="encoder.embedding_hidden_mapping_in",
        pooler="pooler",
    )
    groups = "encoder.albert_layer_groups"
    return around + tuple(
        rule
        for n in range(module.config.num_blocks)
        for rule in under(f"blocks.{n}", f"{groups}.{n // size}.albert_layers.{n % size}", block)
    )


ALBERT = (
    # Before the number of layers, which counts all that run.
    Mapped("inner_group_num", "layers_in_group", 1),
    Mapped(
        "num_hidden_groups",
        "layer_groups",
        1,
        Conversion(
            lambda groups, values: groups,
            lambda groups, config: config.num_layers if groups is None else groups,
        ),
    ),
    Mapped("hidden_size", "d_model"),
    Mapped("num_attention_heads", "num_heads"),
    Required("head_dim", even_head_width),
    Mapped(
        "num_hidden_layers",
        "num_layers",
        translation=Conversion(
            lambda number, values: number * values["layers_in_group"],
            lambda number, config: number // config.layers.layers_in_group,
        ),
    ),
    Mapped("max_position_embeddings", "context_length"),
    Mapped("embedding_size", "embedding_width", written_from="embedding_width"),
    Mapped(
        "type_vocab_size",
        "num_token_types",
        2,
        Conversion(lambda number, values: number, lambda number, config: max(number, 1)),
    ),
    FEED_FORWARD_WIDTH,
    Mapped("hidden_act", "activation", translation=ACTIVATIONS),
    Mapped("layer_norm_eps", "norm_eps", 1e-12),
    Mapped("attention_probs_dropout_prob", "attention_dropout", 0.0),
    # What a feed-forward adds is not dropped, whatever the paper says.
    Mapped("hidden_dropout_prob", ("output_dropout", "embedding_dropout"), 0.0),
    Required("position_embedding_type", "absolute", is_written=True),
    *MASKED_LM,
    *POST_NORM,
    *fixed(causal=False),
    Fixed("pooler", has_pooler),
    # Of the first files, and of heads for other tasks; no version reads them.
    Inert(
        (
            "classifier_dropout_prob", "down_scale_factor", "gap_size", "layers_to_keep",
            "net_structure_type", "num_memory_blocks",
        )
    ),
)  # fmt: skip
MPNET_BODY = stack_rules(
    "encoder.layer.*",
    ("attention.attn", names(q_proj="q", k_proj="k", v_proj="v", o_proj="o")),
    ("", names(up_proj="intermediate.dense", down_proj="output.dense")),
    {"attention_norm": "attention.LayerNorm", "feed_forward_norm": "output.LayerNorm"},
    token_embedding="embeddings.word_embeddings",
    position_embedding="embeddings.position_embeddings",
    embedding_norm="embeddings.LayerNorm",
    position="encoder.relative_attention_bias",
    pooler="pooler.dense",
)
MPNET = (
    *SIZES[:-1],
    # Two rows are of padding, whatever its id is.
    Mapped(
        "max_position_embeddings",
        "context_length",
        translation=Conversion(lambda rows, values: rows - 2, lambda length, config: length + 2),
    ),
    FEED_FORWARD_WIDTH,
    Mapped("hidden_act", "activation", translation=ACTIVATIONS),
    Mapped("layer_norm_eps", "norm_eps", 1e-12),
    # transformers has a table of so many rows, and always 32 spans.
    Required("relative_attention_num_buckets", 32, is_written=True),
    Mapped("attention_probs_dropout_prob", "attention_dropout", 0.1),
    Mapped("hidden_dropout_prob", ("residual_dropout", "embedding_dropout"), 0.1),
    *MASKED_LM,
    *POST_NORM,
    GELU_HEAD,
    *fixed(
        causal=False,
        positions="relative_buckets",
        learned_rows=True,
        position_offset=2,
        num_position_buckets=32,
        max_bucket_distance=128,
    ),
    Fixed("pooler", has_pooler),
)
ROFORMER_BODY = body(
    "attention.output.LayerNorm", "output.LayerNorm", embedding_projection="embeddings_project"
)
ROFORMER = (
    *SIZES,
    *KIN,
    *POST_NORM,
    narrow_embedding("embedding_size"),
    Required("rotary_value", False),
    *fixed(positions="rotary", rotary_interleaved=True),
    Inert(
        (
            "pooler_fc_size",
            "pooler_type",
            "summary_type",
            "summary_use_proj",
            "summary_activation",
            "summary_proj_to_labels",
            "summary_first_dropout",
            "summary_last_dropout",
        )
    ),
)


def _sines_and_cosines() -> Buffer:
    """Returns the table (max_length, H) that RoFormer keeps among its parameters."""

    def values(module: TransformerLM, shape: Shape | None) -> np.ndarray | None:
        found = rotaries(module)
        if not found:
            return None
        cos, sin = found[0].tables()
        return np.concatenate((sin, cos), axis=1)

    def install(module: TransformerLM, array: np.ndarray) -> None:
        for name, half in zip(("sin", "cos"), np.split(array, 2, axis=1), strict=True):
            install_table(rotaries(module), name, half)

    # Of a model that was bfloat16 before it has its rounding.
    return Buffer("encoder.embed_positions.weight", values, install=install, rounding=2.0**-8)


def _copies(bias: str, head: Rules) -> dict[str, Any]:
    """Returns what is said of the second name of the bias of the logits."""
    copies = {bias: f"{head[-1].source[0]}.bias"}
    return {"copies": copies, "untied_names": frozenset(copies)}


ALBERT_HEAD = masked_lm_head("predictions.dense", "predictions.LayerNorm", "predictions.decoder")
DIALECTS = (
    language_model(
        "albert",
        ALBERT,
        _albert_body,
        head=ALBERT_HEAD,
        outside=("predictions.",),
        # Published files are of AlbertForPreTraining.
        superfluous=("albert.pooler.*", "sop_classifier.*"),
        equivalents={"AlbertForPreTraining": "AlbertForMaskedLM"},
        **_copies("predictions.bias", ALBERT_HEAD),
    ),
    language_model(
        "mpnet",
        MPNET,
        MPNET_BODY,
        head=ROBERTA_HEAD,
        superfluous=("mpnet.pooler.*",),
        **_copies("lm_head.bias", ROBERTA_HEAD),
    ),
    language_model(
        "roformer",
        ROFORMER,
        ROFORMER_BODY,
        head=BERT_HEAD,
        outside=("cls.",),
        buffers=(_sines_and_cosines(),),
        **_copies("cls.predictions.bias", BERT_HEAD),
    ),
)
