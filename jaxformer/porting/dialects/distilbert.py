"""Hugging Face's ``distilbert``: DistilBERT (arXiv 1910.01108), BERT without types and pooler."""

from jaxformer.porting.dialects.bert import MASKED_LM, POSITION_IDS, POST_NORM, masked_lm_head
from jaxformer.porting.dialects.common.hugging_face import language_model, stack_rules
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    ATTENTION_DROPOUT,
    even_head_width,
)
from jaxformer.porting.mapping.rules import names
from jaxformer.porting.mapping.settings import Fixed, Mapped, Required
from jaxformer.porting.mapping.unread_settings import Inert

BODY = stack_rules(
    "transformer.layer.*",
    ("attention", names(q_proj="q_lin", k_proj="k_lin", v_proj="v_lin", o_proj="out_lin")),
    ("ffn", names(up_proj="lin1", down_proj="lin2")),
    {"attention_norm": "sa_layer_norm", "feed_forward_norm": "output_layer_norm"},
    token_embedding="embeddings.word_embeddings",
    position_embedding="embeddings.position_embeddings",
    embedding_norm="embeddings.LayerNorm",
)
SETTINGS = (
    Mapped(("dim", "hidden_size"), "d_model"),
    Mapped(("n_heads", "num_attention_heads"), "num_heads"),
    Required("head_dim", even_head_width),
    Mapped(("n_layers", "num_hidden_layers"), "num_layers"),
    Mapped("max_position_embeddings", "context_length"),
    Mapped("hidden_dim", "d_ff", written_from="feed_forward_width"),
    Mapped("activation", "activation", translation=ACTIVATIONS),
    ATTENTION_DROPOUT,
    Mapped("dropout", ("feed_forward_dropout", "embedding_dropout"), 0.0),
    Fixed("norm_eps", 1e-12),
    *MASKED_LM,
    *POST_NORM,
    # What the table of positions starts with; two rates of heads for other tasks.
    Inert(("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_")),
)


DIALECTS = (
    language_model(
        "distilbert",
        SETTINGS,
        BODY,
        head=masked_lm_head("vocab_transform", "vocab_layer_norm", "vocab_projector"),
        outside=("vocab_",),
        buffers=(POSITION_IDS,),
    ),
)
