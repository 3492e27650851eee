"""Hugging Face's ``bart`` and its kin: encoders and decoders with one embedding, tied to the head.

- ``bart`` (arXiv 1910.13461) normalises after each branch and learns positions, one table for each
  stack, whose first two rows no position reads.
- ``mbart`` (arXiv 2001.08210) normalises before, and after the last layer.
- ``marian`` (arXiv 1804.00344) normalises after, and has sinusoids.
- ``pegasus`` (arXiv 1912.08777) normalises before, and has those sinusoids.
- ``m2m_100`` (arXiv 2010.11125) normalises before, and has XGLM's sinusoids. transformers gives
  padding, by its id, no position: pass ``source_positions`` that count real tokens where padding
  stands before them. While training it drops whole layers, which is not done here.
- ``blenderbot`` (arXiv 2004.13637) normalises before, and learns positions.

``*ForCausalLM`` of all but M2M-100 is the decoder alone, a language model. Its files hold the
attention to a source too, which nothing there uses: leave it out by ``--ignore``.

The bias of the logits is a buffer in transformers, which no optimizer moves. Here it is trained.
So is the row of the padding token where it is looked up, which PyTorch leaves out
(``padding_idx``): Marian's and Pegasus's targets begin with it. All other gradients are the same.
"""

import dataclasses
from typing import Any

import numpy as np

from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.porting.dialects.common.halves import decoder_mapping
from jaxformer.porting.dialects.common.hugging_face import language_model
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    ATTENTION_DROPOUT,
    scaled_embedding,
)
from jaxformer.porting.dialects.common.stacks import stack_rules
from jaxformer.porting.mapping.adapter import Buffer, StateDictAdapter
from jaxformer.porting.mapping.packings import AsRow, Shape
from jaxformer.porting.mapping.position_tables import install_table
from jaxformer.porting.mapping.rules import Rule, Rules, names, under
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    Conversion,
    Mapped,
    Repeated,
    Required,
    Row,
    Values,
    fixed,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.positions import SinusoidalPositions

ATTENTION = names(q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", o_proj="out_proj")
HEAD = (
    Rule(("lm_head.bias",), ("final_logits_bias",), AsRow(), is_buffer=True),
    Rule(("lm_head.kernel",), ("lm_head.weight",)),
)


STACK = stack_rules(
    "layers.*",
    ("self_attn", ATTENTION),
    ("", names(up_proj="fc1", down_proj="fc2")),
    {
        "attention_norm": "self_attn_layer_norm",
        "cross_attention_norm": "encoder_attn_layer_norm",
        "feed_forward_norm": "final_layer_norm",
    },
    final_norm="layer_norm",
)
BODY = (
    *names(
        target_embedding="shared",
        source_position_embedding="encoder.embed_positions",
        position_embedding="decoder.embed_positions",
        source_embedding_norm="encoder.layernorm_embedding",
        target_embedding_norm="decoder.layernorm_embedding",
    ),
    *under("encoder", "encoder", STACK),
    *under("decoder", "decoder", STACK),
    *under("decoder.blocks.*.cross_attention", "decoder.layers.*.encoder_attn", ATTENTION),
)
# Of the decoder alone: its layers' attention to a source is never used, and left out.
DECODER = (
    *names(
        token_embedding="embed_tokens",
        position_embedding="embed_positions",
        embedding_norm="layernorm_embedding",
    ),
    *STACK,
)


def own_of_encoder(
    name: str | tuple[str, ...], target: str, of_decoder: str, written: Any
) -> Mapped:
    """Returns the row of a setting of the encoder, which is None where the decoder has the same."""
    return Mapped(
        name,
        target,
        lambda source_model, values: values[of_decoder],
        Conversion(
            lambda value, values: None if value == values[of_decoder] else value,
            lambda value, config: written(config.encoder),
        ),
    )


class Unforced(Row):
    """No token is forced: the default of transformers would end the text of any vocabulary."""

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives nothing: it says nothing of the model."""
        return {}

    def write(self, config: Any) -> dict[str, Any]:
        """Writes null; a model that came with such a token keeps it."""
        return {"forced_eos_token_id": None}


def _settings(*more: Row, is_scaled: bool = False, **kind: Any) -> tuple[Row, ...]:
    """Returns the table of a type.

    Args:
        more: rows that it alone has.
        is_scaled: whether embeddings are scaled where a config does not say.
        kind: fields that it always has.
    """
    return (
        *_of_each_stack(is_scaled),
        own_of_encoder(
            ("encoder_attention_heads", "num_attention_heads"),
            "encoder_num_heads",
            "num_heads",
            lambda encoder: encoder.attention.num_heads,
        ),
        own_of_encoder(
            "encoder_ffn_dim",
            "encoder_d_ff",
            "d_ff",
            lambda encoder: encoder.feed_forward_width,
        ),
        Mapped(("encoder_layers", "num_hidden_layers"), "num_encoder_layers"),
        Mapped("decoder_layers", "num_decoder_layers"),
        Required("is_encoder_decoder", True, is_written=True),
        # Without it transformers 5 has three embeddings, and transformers 4 one.
        Required("tie_word_embeddings", True, is_written=True),
        *fixed(causal=True, tie_embeddings=True, shared_embedding=True, **kind),
        *more,
    )


def _of_each_stack(is_scaled: bool) -> tuple[Row, ...]:
    """Returns the rows of a decoder, with an encoder or alone."""
    return (
        Mapped(("d_model", "hidden_size"), "d_model"),
        Mapped("decoder_attention_heads", "num_heads"),
        Mapped("decoder_ffn_dim", "d_ff", written_from="feed_forward_width"),
        Mapped("max_position_embeddings", "context_length"),
        Mapped("activation_function", "activation", translation=ACTIVATIONS),
        scaled_embedding(is_scaled),
        ATTENTION_DROPOUT,
        Mapped("dropout", ("residual_dropout", "embedding_dropout"), 0.1),
        Mapped("activation_dropout", "hidden_dropout", 0.0),
        # Of the first files; no version reads them.
        Inert(
            (
                "add_bias_logits", "add_final_layer_norm", "classif_dropout", "extra_layer_norm",
                "do_blenderbot_90_layernorm", "extra_pos_embeddings", "layernorm_variant",
                "force_bos_token_to_be_generated", "normalize_before", "normalize_embedding",
                "static_position_embeddings",
            )
        ),
    )  # fmt: skip


def _decoder_settings(*more: Row, **kind: Any) -> tuple[Row, ...]:
    """Returns the table of a decoder alone: see ``_settings``."""
    return (
        *_of_each_stack(False),
        Mapped("decoder_layers", "num_layers"),
        Mapped("vocab_size", "vocab_size"),
        Mapped("tie_word_embeddings", "tie_embeddings", True, BOOLEAN),
        Required("decoder_layerdrop", 0.0),
        Unforced(),
        # Of the encoder, which is not there. The class changes the last three as it needs them.
        Inert(
            (
                "encoder_layers", "num_hidden_layers", "encoder_attention_heads",
                "num_attention_heads", "encoder_ffn_dim", "encoder_layerdrop",
                "share_encoder_decoder_embeddings", "is_encoder_decoder", "is_decoder",
            )
        ),
        *fixed(**kind),
        *more,
    )  # fmt: skip


# Of training alone: the share of whole layers that are dropped.
NO_LAYER_DROP = (Required("encoder_layerdrop", 0.0), Required("decoder_layerdrop", 0.0), Unforced())
LAYER_DROP = Inert(("encoder_layerdrop", "decoder_layerdrop"))
LEARNED: dict[str, Any] = {"positions": "learned", "shared_positions": False}
MARIAN: dict[str, Any] = {
    "positions": "sinusoidal",
    "sinusoid_halves": True,
    "sinusoid_exact": True,
}
POST_NORM: dict[str, Any] = {"block": "post_norm", "final_norm": False}
PRE_NORM: dict[str, Any] = {"block": "pre_norm", "final_norm": True}
NORMED: dict[str, Any] = {"position_offset": 2, "embedding_norm": True}
BART = _settings(
    *NO_LAYER_DROP, **LEARNED, **POST_NORM, position_offset=2, embedding_norm=True, head_bias=True
)
MBART = _settings(
    *NO_LAYER_DROP, **LEARNED, **PRE_NORM, position_offset=2, embedding_norm=True, head_bias=True
)
BLENDERBOT = _settings(*NO_LAYER_DROP, **LEARNED, **PRE_NORM, head_bias=True)
PEGASUS = _settings(*NO_LAYER_DROP, **MARIAN, **PRE_NORM, head_bias=True)
M2M_100 = _settings(
    LAYER_DROP,
    # The row of this id is zero in the table of sinusoids.
    Mapped(
        "pad_token_id",
        "position_offset",
        1,
        Conversion(lambda pad, values: pad + 1, lambda offset, config: offset - 1),
    ),
    is_scaled=True,
    **PRE_NORM,
    positions="sinusoidal",
    sinusoid_halves=True,
    head_bias=False,
)
VOCABULARY = (Mapped("vocab_size", ("source_vocab_size", "target_vocab_size")),)
MARIAN_VOCABULARY = (
    *VOCABULARY,
    Repeated("decoder_vocab_size", "target_vocab_size"),
    Required("share_encoder_decoder_embeddings", True, is_written=True),
)


def sinusoids(stack: str, of: str = "position_embedding") -> Buffer:
    """Returns the table of sinusoids that a stack keeps among its parameters.

    Args:
        stack: what the source calls it.
        of: which of the target's modules computes it.
    """

    def values(module: Any, shape: Shape | None) -> np.ndarray | None:
        rows = getattr(module, of)
        return rows.rows() if isinstance(rows, SinusoidalPositions) else None

    def install(module: Any, array: np.ndarray) -> None:
        install_table([getattr(module, of)], "table", array)

    # Of a model that was bfloat16 before it has its rounding.
    return Buffer(f"{stack}.embed_positions.weight", values, install=install, rounding=2.0**-8)


TABLES = (sinusoids("encoder"), sinusoids("decoder"))


def _adapter(
    name: str,
    settings: tuple[Row, ...],
    decoder: tuple[str, tuple[Row, ...]] | None = None,
    *,
    vocabulary: tuple[Row, ...] = VOCABULARY,
    head: Rules = HEAD,
    buffers: tuple[Buffer, ...] = (),
) -> StateDictAdapter:
    whole = language_model(
        name,
        settings,
        BODY,
        model=EncoderDecoder,
        vocabulary=vocabulary,
        head=head,
        outside=("lm_head.", "final_logits_bias"),
        shared={
            "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
        },
        buffers=buffers,
        superfluous=("*.version",),
    )
    if decoder is None:
        return whole
    kind, own = decoder
    alone = decoder_mapping(
        name,
        kind,
        own,
        DECODER,
        buffers=tuple(
            dataclasses.replace(each, source=f"model.{each.source}")
            for each in buffers
            if each.source.startswith("decoder.")
        ),
    )
    return dataclasses.replace(whole, module_mappings=(*whole.module_mappings, alone))


ROWS: dict[str, Any] = {"positions": "learned"}
DIALECTS = (
    _adapter("bart", BART, ("BartForCausalLM", _decoder_settings(**ROWS, **POST_NORM, **NORMED))),
    _adapter("mbart", MBART, ("MBartForCausalLM", _decoder_settings(**ROWS, **PRE_NORM, **NORMED))),
    _adapter(
        "marian",
        _settings(*NO_LAYER_DROP, **MARIAN, **POST_NORM, head_bias=True),
        (
            "MarianForCausalLM",
            _decoder_settings(Repeated("decoder_vocab_size", "vocab_size"), **MARIAN, **POST_NORM),
        ),
        vocabulary=MARIAN_VOCABULARY,
        buffers=TABLES,
    ),
    _adapter(
        "pegasus",
        PEGASUS,
        ("PegasusForCausalLM", _decoder_settings(**MARIAN, **PRE_NORM)),
        buffers=TABLES,
    ),
    _adapter("m2m_100", M2M_100, head=names(lm_head="lm_head")),
    _adapter(
        "blenderbot", BLENDERBOT, ("BlenderbotForCausalLM", _decoder_settings(**ROWS, **PRE_NORM))
    ),
)
