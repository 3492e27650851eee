"""Hugging Face's ``deberta-v2``: DeBERTa V2 and V3 (arXiv 2006.03654, 2111.09543).

Contents meet trained rows of distances, which all layers share. The convolution of the largest V2
is not ported, and neither is the newer masked-LM head: where a folder has it, its body is.
"""

from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.bert import BERT_HEAD, MASKED_LM, POST_NORM
from jaxformer.porting.dialects.common.hugging_face import language_model
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    FEED_FORWARD_WIDTH,
    SIZES,
)
from jaxformer.porting.dialects.common.stacks import stack_rules
from jaxformer.porting.mapping.rules import names
from jaxformer.porting.mapping.settings import (
    Mapped,
    Required,
    Row,
    Values,
    fixed,
    unsupported,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert

KINDS = {"p2c": "position_to_content", "c2p": "content_to_position"}


class Distances(Row):
    """How contents meet distances, and whether learned rows are added to the embeddings."""

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the fields of positions."""
        is_relative = source_model.setting("relative_attention", default=False)
        has_rows = bool(source_model.setting("position_biased_input", default=True))
        given = source_model.setting("pos_att_type", default=[])
        limit = source_model.setting("max_relative_positions", default=-1)
        buckets = source_model.setting("position_buckets", default=-1)
        shares = bool(source_model.setting("share_att_key", default=False))
        norm = source_model.setting("norm_rel_ebd", default="none")
        kinds = given.lower().split("|") if isinstance(given, str) else given
        kinds = [str(kind).strip() for kind in kinds if kind]
        if set(kinds) - set(KINDS):
            raise unsupported("pos_att_type", f"be some of {', '.join(KINDS)}", given)
        has_norm = "layer_norm" in [part.strip() for part in str(norm).lower().split("|")]
        if not is_relative:
            if kinds or has_norm:
                raise unsupported(
                    "relative_attention", "be True with pos_att_type or norm_rel_ebd", is_relative
                )
            return {"positions": "learned" if has_rows else "none"}
        if not kinds:
            raise unsupported("pos_att_type", f"be some of {', '.join(KINDS)}", given)
        limit = values["context_length"] if limit < 1 else limit
        return {
            "positions": "disentangled",
            "learned_rows": has_rows,
            "distance_span": buckets if buckets > 0 else limit,
            "distance_limit": limit if buckets > 0 else None,
            "distance_norm": has_norm,
            "shared_distance_projections": shares,
            **{field: kind in kinds for kind, field in KINDS.items()},
        }

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives the settings."""
        own = config.position.disentangled
        if config.position.positions != "disentangled":
            has_rows = config.position.positions == "learned"
            return {"relative_attention": False, "position_biased_input": has_rows}
        limit = own.distance_limit
        return {
            "relative_attention": True,
            "position_biased_input": config.position.learned_rows,
            "pos_att_type": [kind for kind, field in KINDS.items() if getattr(own, field)],
            "max_relative_positions": own.distance_span if limit is None else limit,
            "position_buckets": -1 if limit is None else own.distance_span,
            "share_att_key": own.shared_distance_projections,
            "norm_rel_ebd": "layer_norm" if own.distance_norm else "none",
        }


BODY = stack_rules(
    "encoder.layer.*",
    (
        "attention",
        (
            *names(
                q_proj="self.query_proj",
                k_proj="self.key_proj",
                v_proj="self.value_proj",
                o_proj="output.dense",
            ),
            *names(
                {"position.k_proj": "self.pos_key_proj", "position.q_proj": "self.pos_query_proj"}
            ),
        ),
    ),
    ("", names(up_proj="intermediate.dense", down_proj="output.dense")),
    {"attention_norm": "attention.output.LayerNorm", "feed_forward_norm": "output.LayerNorm"},
    token_embedding="embeddings.word_embeddings",
    position_embedding="embeddings.position_embeddings",
    token_type_embedding="embeddings.token_type_embeddings",
    embedding_norm="embeddings.LayerNorm",
    position="encoder.rel_embeddings",
    **{"position.norm": "encoder.LayerNorm"},
)
SETTINGS = (
    *SIZES,
    FEED_FORWARD_WIDTH,
    Mapped("hidden_act", "activation", translation=ACTIVATIONS),
    Mapped("layer_norm_eps", "norm_eps", 1e-7),
    Mapped("type_vocab_size", "num_token_types", 0),
    Mapped("attention_probs_dropout_prob", "attention_dropout", 0.1),
    Mapped(
        "hidden_dropout_prob", ("residual_dropout", "embedding_dropout", "distance_dropout"), 0.1
    ),
    Distances(),
    Required("embedding_size", lambda values: values["d_model"]),
    Required("attention_head_size", lambda values: values["d_model"] // values["num_heads"]),
    Required("conv_kernel_size", 0),
    Required("legacy", True),
    *MASKED_LM,
    *POST_NORM,
    *fixed(causal=False, pooler=False),
    # Of heads for other tasks, and of a convolution that is not there.
    Inert(
        (
            "pooler_dropout", "pooler_hidden_act", "pooler_hidden_size", "conv_act", "conv_groups",
            "position_embedding_type",
        )
    ),
)  # fmt: skip
COPIES = {"cls.predictions.bias": "cls.predictions.decoder.bias"}
DIALECTS = (
    language_model(
        "deberta-v2",
        SETTINGS,
        BODY,
        head=BERT_HEAD,
        outside=("cls.",),
        copies=COPIES,
        untied_names=frozenset(COPIES),
    ),
)
