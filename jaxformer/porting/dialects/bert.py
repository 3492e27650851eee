"""Hugging Face's ``bert``: BERT (arXiv 1810.04805), its encoder and its masked-LM head.

``BertForMaskedLM`` has no pooler. The files of the first BERTs hold more than it has, a pooler and
a next-sentence head, which are left out; for the encoder with its pooler, give ``ignore=["cls.*"]``
and the class ``BertModel``.
"""

import numpy as np

from jaxformer.porting.dialects.common.hugging_face import language_model
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    FEED_FORWARD_WIDTH,
    SIZES,
    usual_sizes,
)
from jaxformer.porting.mapping.adapter import Buffer
from jaxformer.porting.mapping.rules import Shape, names, under
from jaxformer.porting.mapping.settings import Conversion, Fixed, Mapped, Required, Values
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.transformer_lm import TransformerLM

BLOCK = (
    *under(
        "attention",
        "attention",
        names(q_proj="self.query", k_proj="self.key", v_proj="self.value", o_proj="output.dense"),
    ),
    *under("feed_forward", "", names(up_proj="intermediate.dense", down_proj="output.dense")),
    *names(attention_norm="attention.output.LayerNorm", feed_forward_norm="output.LayerNorm"),
)
BODY = (
    *names(
        token_embedding="embeddings.word_embeddings",
        position_embedding="embeddings.position_embeddings",
        token_type_embedding="embeddings.token_type_embeddings",
        embedding_norm="embeddings.LayerNorm",
        pooler="pooler.dense",
    ),
    *under("blocks.*", "encoder.layer.*", BLOCK),
)
HEAD = (
    *under(
        "head_transform",
        "cls.predictions.transform",
        names(proj="dense", norm="LayerNorm"),
    ),
    *names(lm_head="cls.predictions.decoder"),
)


def _has_pooler(source_model: SourceModel, values: Values) -> bool:
    return source_model.kind == "BertModel" and source_model.has("pooler")


SETTINGS = (
    *SIZES,
    # BertModel always has at least one type.
    Mapped(
        "type_vocab_size",
        "num_token_types",
        2,
        Conversion(lambda number, values: number, lambda number, config: max(number, 1)),
    ),
    FEED_FORWARD_WIDTH,
    Mapped("hidden_act", "activation", translation=ACTIVATIONS),
    Mapped("layer_norm_eps", "norm_eps", 1e-12),
    Required("position_embedding_type", "absolute", is_written=True),
    Required("is_decoder", False, is_written=True),
    Required("add_cross_attention", False),
    Mapped("attention_probs_dropout_prob", "attention_dropout", 0.0),
    Mapped("hidden_dropout_prob", ("residual_dropout", "embedding_dropout"), 0.0),
    Fixed("block", "post_norm"),
    Fixed("embedding_norm", True),
    Fixed("final_norm", False),
    Fixed("causal", False),
    Fixed("head", "masked_lm"),
    Fixed("head_bias", True),
    Fixed("pooler", _has_pooler),
    # In which language it was trained, and a pooler of Google's own code.
    Inert(
        (
            "directionality", "pooler_fc_size", "pooler_num_attention_heads",
            "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type",
        )
    ),
)  # fmt: skip


def _position_ids(module: TransformerLM, shape: Shape | None) -> np.ndarray:
    return np.arange(module.config.context_length)[None]


def _token_type_ids(module: TransformerLM, shape: Shape | None) -> np.ndarray:
    return np.zeros((1, module.config.context_length), np.int64)


DIALECTS = (
    language_model(
        "bert",
        SETTINGS,
        BODY,
        classes=("BertForMaskedLM", "BertModel"),
        prefix="bert.",
        head=HEAD,
        outside=("cls.",),
        tied={
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            # One array by two names, even where the matrix is not tied: transformers then adds
            # the decoder's and leaves the other unused.
            "cls.predictions.bias": "cls.predictions.decoder.bias",
        },
        is_tied_by_default=True,
        # The published files are of BertForPreTraining, though they name the other class.
        superfluous=("bert.pooler.*", "cls.seq_relationship.*"),
        equivalents={"BertForPreTraining": "BertForMaskedLM"},
        untied_names=frozenset({"cls.predictions.bias"}),
        defaults={
            **usual_sizes(30522, 768, 3072, 12, 12, 512, "gelu"),
            "attention_probs_dropout_prob": 0.1,
            "hidden_dropout_prob": 0.1,
        },
        buffers=(
            Buffer("embeddings.position_ids", _position_ids, written=False),
            Buffer("embeddings.token_type_ids", _token_type_ids, written=False),
        ),
        old_names={
            r"\.LayerNorm\.gamma$": ".LayerNorm.weight",
            r"\.LayerNorm\.beta$": ".LayerNorm.bias",
        },
    ),
)
