"""Hugging Face's ``bert``: BERT (arXiv 1810.04805), its encoder and its masked-LM head.

``BertForMaskedLM`` has no pooler. The files of the first BERTs hold more than either class has:
read them with ``ignore=["bert.pooler.*", "cls.seq_relationship.*"]``, or ``ignore=["cls.*"]`` for
the encoder.
"""

from typing import Any

import numpy as np

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.hugging_face import (
    activation,
    demand,
    head_width,
    language_model,
    source_activation,
)
from jaxformer.porting.mapping.adapter import Buffer
from jaxformer.porting.mapping.rules import Shape, names, under
from jaxformer.porting.mapping.source_model import SourceModel
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


def _settings(source_model: SourceModel) -> dict[str, Any]:
    d_model = source_model.setting("hidden_size")
    num_heads = source_model.setting("num_attention_heads")
    head_width(source_model, d_model, num_heads)
    demand(
        source_model,
        is_decoder=False,
        add_cross_attention=False,
        position_embedding_type="absolute",
    )
    dropout = source_model.setting("hidden_dropout_prob", default=0.0)
    return {
        "d_model": d_model,
        "num_heads": num_heads,
        "num_layers": source_model.setting("num_hidden_layers"),
        "context_length": source_model.setting("max_position_embeddings"),
        "num_token_types": source_model.setting("type_vocab_size", default=2),
        "d_ff": source_model.setting("intermediate_size"),
        "activation": activation(source_model, "hidden_act"),
        "norm_eps": source_model.setting("layer_norm_eps", default=1e-12),
        "block": "post_norm",
        "embedding_norm": True,
        "final_norm": False,
        "causal": False,
        "head": "masked_lm",
        "head_bias": True,
        "pooler": source_model.kind == "BertModel" and source_model.has("pooler"),
        "embedding_dropout": dropout,
        "attention_dropout": source_model.setting("attention_probs_dropout_prob", default=0.0),
        "residual_dropout": dropout,
    }


def _source_settings(config: TransformerLMConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.context_length,
        # Theirs cannot be without.
        "type_vocab_size": max(config.num_token_types, 1),
        "intermediate_size": config.feed_forward_width,
        "hidden_act": source_activation(config.activation),
        "layer_norm_eps": config.norm_eps,
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "attention_probs_dropout_prob": config.attention_dropout,
        "hidden_dropout_prob": config.residual_dropout,
    }


def _position_ids(module: TransformerLM, shape: Shape | None) -> np.ndarray:
    return np.arange(module.config.context_length)[None]


def _token_type_ids(module: TransformerLM, shape: Shape | None) -> np.ndarray:
    return np.zeros((1, module.config.context_length), np.int64)


DIALECTS = (
    language_model(
        "bert",
        _settings,
        _source_settings,
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
        tied_by_default=True,
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
