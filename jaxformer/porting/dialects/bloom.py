"""Hugging Face's ``bloom``: BLOOM (arXiv 2211.05100), with ALiBi and a norm on the embeddings."""

from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.hugging_face import demand, head_width, language_model
from jaxformer.porting.dialects.common.hugging_face_parts import fused_block
from jaxformer.porting.mapping.rules import Rules, names, under
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.transformer_lm import TransformerLM


def _body(module: TransformerLM) -> Rules:
    return (
        *names(
            token_embedding="word_embeddings",
            embedding_norm="word_embeddings_layernorm",
            final_norm="ln_f",
        ),
        *under("blocks.*", "h.*", fused_block(module, "self_attention")),
    )


def _settings(source_model: SourceModel) -> dict[str, Any]:
    d_model = source_model.setting("hidden_size", "n_embed")
    num_heads = source_model.setting("n_head", "num_attention_heads")
    head_width(source_model, d_model, num_heads)
    demand(source_model, apply_residual_connection_post_layernorm=False)
    return {
        "d_model": d_model,
        "num_heads": num_heads,
        "num_layers": source_model.setting("n_layer", "num_hidden_layers"),
        # ALiBi has no table that would end; what the model was trained on is kept here.
        "context_length": source_model.setting("seq_length", default=2048),
        "d_ff": 4 * d_model,
        "activation": "gelu_bloom",
        "norm_eps": source_model.setting("layer_norm_epsilon", default=1e-5),
        "positions": "alibi",
        "embedding_norm": True,
        "attention_dropout": source_model.setting("attention_dropout", default=0.0),
        "residual_dropout": source_model.setting("hidden_dropout", default=0.0),
    }


def _source_settings(config: TransformerLMConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.d_model,
        "n_head": config.num_heads,
        "n_layer": config.num_layers,
        "seq_length": config.context_length,
        "layer_norm_epsilon": config.norm_eps,
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": config.attention_dropout,
        "hidden_dropout": config.residual_dropout,
    }


DIALECTS = (
    language_model(
        "bloom",
        _settings,
        _source_settings,
        _body,
        classes=("BloomForCausalLM", "BloomModel"),
        prefix="transformer.",
        tied={"lm_head.weight": "transformer.word_embeddings.weight"},
        tied_by_default=True,
    ),
)
