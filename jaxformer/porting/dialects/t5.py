"""Hugging Face's ``t5``, ``mt5`` and ``umt5``: T5, an encoder and decoder (arXiv 1910.10683).

Positions are numbers by buckets of distances, one table for all layers of a stack; each layer of
umT5 (arXiv 2304.09151) has its own. Scores are not scaled, and no projection has a bias.

transformers 4 multiplies what a tied head projects by 1 / sqrt(D), and ties where
``tie_word_embeddings`` says so. transformers 5 ties where a file has no ``lm_head``, whatever the
config says, and scales T5's logits where ``scale_decoder_outputs`` says so, mT5's never and umT5's
always. What is written means the same to both, but for a umT5 whose head is not tied.
"""

from dataclasses import dataclass, replace
from typing import Any

from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.porting.dialects.common.halves import encoder_mapping
from jaxformer.porting.dialects.common.hugging_face import language_model
from jaxformer.porting.dialects.common.hugging_face_settings import ACTIVATIONS, GATED_ACTIVATIONS
from jaxformer.porting.dialects.common.stacks import stack_rules
from jaxformer.porting.dialects.common.task_heads import TOKENS_OF_ENCODER
from jaxformer.porting.dialects.common.transformers_types import TRANSFORMERS_TYPES
from jaxformer.porting.mapping.adapter import StateDictAdapter
from jaxformer.porting.mapping.rules import Rules, names, under
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
from jaxformer.transformer_lm import TransformerLM

SHARED_TABLE = "relative_attention_bias"
ATTENTION = names(q_proj="q", k_proj="k", v_proj="v", o_proj="o", position=SHARED_TABLE)


def body(module: EncoderDecoder) -> Rules:
    """Returns the rules of both stacks and of the one embedding."""
    return (
        *names(target_embedding="shared"),
        *under("encoder", "encoder", _stack(module, 1)),
        *under("decoder", "decoder", _stack(module, 2)),
        *under(
            "decoder.blocks.*.cross_attention", "decoder.block.*.layer.1.EncDecAttention", ATTENTION
        ),
    )


def _stack(module: Any, last: int) -> Rules:
    """Returns the rules of a stack; ``last`` is the number of the feed-forward in a block."""
    feed_forward = (
        names(gate_proj="wi_0", up_proj="wi_1", down_proj="wo")
        if module.config.feed_forward.is_gated
        else names(up_proj="wi", down_proj="wo")
    )
    return stack_rules(
        "block.*",
        ("layer.0.SelfAttention", ATTENTION),
        (f"layer.{last}.DenseReluDense", feed_forward),
        {
            "attention_norm": "layer.0.layer_norm",
            "cross_attention_norm": "layer.1.layer_norm",
            "feed_forward_norm": f"layer.{last}.layer_norm",
        },
        position=f"block.0.layer.0.SelfAttention.{SHARED_TABLE}",
        final_norm="final_layer_norm",
    )


def encoder_body(module: TransformerLM) -> Rules:
    """Returns the rules of the encoder alone, which is a language model without a head."""
    return (*names(token_embedding="shared"), *under("", "encoder", _stack(module, 1)))


@dataclass(frozen=True)
class FeedForwardKind(Row):
    """The activation and whether it is gated: of two settings, or of the one that names both.

    Attributes:
        default: that one, where a config has none.
    """

    default: str

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the activation."""
        kind = str(source_model.setting("feed_forward_proj", default=self.default))
        named = "gelu_new" if kind == "gated-gelu" else kind.split("-")[-1]
        activation = source_model.nullable("dense_act_fn", named)
        is_gated = source_model.nullable("is_gated_act", kind.startswith("gated-"))
        known = GATED_ACTIVATIONS if is_gated else ACTIVATIONS
        setting = "dense_act_fn" if activation != named else "feed_forward_proj"
        if is_gated and activation not in known.table:
            setting = f"{setting} with is_gated_act"
        return {"activation": known.to_target(setting, activation, values)}

    def write(self, config: Any) -> dict[str, Any]:
        """Gives all three settings."""
        activation, is_gated = config.feed_forward.activation, config.feed_forward.is_gated
        if activation == "geglu_tanh":
            kind, name = "gated-gelu", "gelu_new"
        elif is_gated:
            # "gated-gelu" is the approximation.
            name = {"geglu": "gelu_python", "swiglu": "silu"}[activation]
            kind = f"gated-{name}"
        else:
            kind = name = ACTIVATIONS.to_source(activation, config)
        return {"feed_forward_proj": kind, "dense_act_fn": name, "is_gated_act": is_gated}


@dataclass(frozen=True)
class Head(Row):
    """Whether the head is the embedding, and whether logits are multiplied by 1 / sqrt(D).

    Attributes:
        scaled_in_5: what transformers 5 does: a ``setting`` says it, ``never``, or ``always``.
    """

    scaled_in_5: str

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the tie and the scale.

        Raises:
            UsageError: the versions of transformers scale otherwise.
        """
        is_said = source_model.setting("tie_word_embeddings", default=True) is not False
        is_scaled = False
        if self.scaled_in_5 != "never":
            is_given = source_model.config.get("scale_decoder_outputs") is not None
            is_scaled = bool(source_model.nullable("scale_decoder_outputs", is_said))
            if self.scaled_in_5 == "always" and not is_said and not is_given:
                raise unsupported(
                    "tie_word_embeddings",
                    "be true, or scale_decoder_outputs say whether logits are scaled, which "
                    "transformers 5 does and transformers 4 does not",
                    False,
                )
        return {
            "tie_embeddings": _is_tied(source_model, is_said and is_scaled),
            "logit_scale": values["d_model"] ** -0.5 if is_scaled else None,
        }

    def write(self, config: Any) -> dict[str, Any]:
        """Gives the settings that mean this to every version."""
        is_scaled = config.head.logit_scale is not None or config.head.head == "none"
        if self.scaled_in_5 == "never":
            return {"tie_word_embeddings": False}
        is_tied = config.head.tie_embeddings and is_scaled
        if self.scaled_in_5 == "always" and is_tied:
            return {"tie_word_embeddings": True}
        return {"tie_word_embeddings": is_tied, "scale_decoder_outputs": is_scaled}


def _is_tied(source_model: SourceModel, is_sure: bool) -> bool:
    """Whether the head has no matrix of its own.

    Args:
        source_model: a module, or its arrays.
        is_sure: whether the settings leave no doubt.
    """
    module = source_model.module
    if hasattr(module, "lm_head"):
        return module.lm_head.weight is module.shared.weight
    storage = source_model.storages.get("shared.weight")
    if storage is not None and storage == source_model.storages.get("lm_head.weight"):
        return True
    return is_sure or "lm_head.weight" not in source_model.shapes


def _settings(default: str, scaled_in_5: str, **more: Any) -> tuple[Row, ...]:
    """Returns the table of a type.

    Args:
        default: see ``FeedForwardKind``.
        scaled_in_5: see ``Head``.
        more: fields that it always has.
    """
    return (
        *_of_each_stack(default),
        Mapped(("num_layers", "num_hidden_layers"), "num_encoder_layers"),
        Mapped(
            "num_decoder_layers",
            "num_decoder_layers",
            lambda source_model, values: values["num_encoder_layers"],
        ),
        Head(scaled_in_5),
        Required("is_encoder_decoder", True, is_written=True),
        *fixed(causal=True, shared_embedding=True, head_bias=False, **more),
    )


def _encoder_settings(default: str, **more: Any) -> tuple[Row, ...]:
    """Returns the table of a type's encoder alone."""
    return (
        *_of_each_stack(default),
        Mapped(("num_layers", "num_hidden_layers"), "num_layers"),
        Mapped("vocab_size", "vocab_size"),
        # Of the decoder and its head. A file of the whole model may be read as an encoder.
        Inert(
            (
                "num_decoder_layers", "tie_word_embeddings", "scale_decoder_outputs",
                "is_encoder_decoder",
            )
        ),
        *fixed(causal=False, head="none", **more),
    )  # fmt: skip


def _of_each_stack(default: str) -> tuple[Row, ...]:
    """Returns the rows that an encoder has alone too; see ``FeedForwardKind``."""
    return (
        Mapped(("d_model", "hidden_size"), "d_model"),
        Mapped(("num_heads", "num_attention_heads"), "num_heads"),
        Mapped(("d_kv", "head_dim"), "head_dim", 64, written_from="head_width"),
        Mapped("d_ff", "d_ff", written_from="feed_forward_width"),
        Mapped("relative_attention_num_buckets", "num_position_buckets", 32),
        Mapped("relative_attention_max_distance", "max_bucket_distance", 128),
        Mapped("layer_norm_epsilon", "norm_eps", 1e-6),
        Mapped(
            "dropout_rate",
            (
                "residual_dropout", "hidden_dropout", "attention_dropout", "embedding_dropout",
                "final_dropout",
            ),
            0.1,
        ),
        FeedForwardKind(default),
        # Of old files; nothing in the model has a length.
        Mapped("n_positions", "context_length", 512),
        *fixed(
            positions="relative_buckets",
            norm="rms_norm",
            block="pre_norm",
            qkv_bias=False,
            output_bias=False,
            feed_forward_bias=False,
            attention_scale=1.0,
        ),
    )  # fmt: skip


def _adapter(name: str, settings: tuple[Row, ...], encoder: tuple[Row, ...]) -> StateDictAdapter:
    whole = language_model(
        name,
        settings,
        body,
        model=EncoderDecoder,
        vocabulary=(Mapped("vocab_size", ("source_vocab_size", "target_vocab_size")),),
        shared={
            "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
        },
        head_names=frozenset({"lm_head.weight"}),
        # The first files of T5 have it, and no version reads it.
        superfluous=(f"decoder.block.0.layer.1.EncDecAttention.{SHARED_TABLE}.weight",),
    )
    known = TRANSFORMERS_TYPES[name]
    start = known.classes[1].removesuffix("Model")
    alone = encoder_mapping(name, f"{start}EncoderModel", encoder, encoder_body)
    tokens = encoder_mapping(
        name, f"{start}ForTokenClassification", encoder, encoder_body, TOKENS_OF_ENCODER
    )
    return replace(whole, module_mappings=(*whole.module_mappings, alone, tokens))


BY_LAYER: dict[str, Any] = {"shared_buckets": False}
DIALECTS = (
    _adapter("t5", _settings("relu", "setting"), _encoder_settings("relu")),
    _adapter("mt5", _settings("gated-gelu", "never"), _encoder_settings("gated-gelu")),
    _adapter(
        "umt5",
        _settings("gated-gelu", "always", **BY_LAYER),
        _encoder_settings("gated-gelu", **BY_LAYER),
    ),
)
