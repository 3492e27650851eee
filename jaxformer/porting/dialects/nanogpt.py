"""Dialect ``nanogpt``: Karpathy's nanoGPT, whose ckpt.pt has the arrays and ``model_args``."""

from typing import Any

import numpy as np
from flax import nnx

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.reading import alike, demand_activation, layer_norm, one_eps
from jaxformer.porting.mapping.adapter import Buffer, ModuleMapping, StateDictAdapter
from jaxformer.porting.mapping.packings import Fused, Shape
from jaxformer.porting.mapping.rules import Rule, names, under
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.transformer_lm import TransformerLM

BLOCK = (
    Rule(("attention.q_proj", "attention.k_proj", "attention.v_proj"), ("attn.c_attn",), Fused()),
    *names(
        {
            "attention.o_proj": "attn.c_proj",
            "feed_forward.up_proj": "mlp.c_fc",
            "feed_forward.down_proj": "mlp.c_proj",
        },
        attention_norm="ln_1",
        feed_forward_norm="ln_2",
    ),
)
RULES = under(
    "",
    "transformer",
    (
        *names(token_embedding="wte", position_embedding="wpe", final_norm="ln_f"),
        *under("blocks.*", "h.*", BLOCK),
    ),
)


def _layer_settings(source_model: SourceModel) -> dict[str, Any]:
    attention, mlp = source_model.child("attn"), source_model.child("mlp")
    d_model = attention.shape("c_proj.weight", 2)[1]
    return {
        "d_model": d_model,
        "num_heads": attention.num_heads(d_model),
        "activation": demand_activation(mlp, "gelu", "gelu"),
        "norm_eps": one_eps(source_model, "ln_1", "ln_2"),
        "attention_dropout": source_model.child("attn.attn_dropout").dropout(),
        "output_dropout": source_model.child("attn.resid_dropout").dropout(),
        "feed_forward_dropout": mlp.dropout(),
    }


def _model(source_model: SourceModel, rngs: nnx.Rngs) -> TransformerLM:
    layers = source_model.child("transformer").children("h")
    settings = alike(layers, _layer_settings)
    d_model = source_model.number("n_embd") or settings["d_model"]
    # One setting decides on all biases; old checkpoints have biases and no such setting.
    found = any(
        name.endswith(("ln_1.bias", "ln_f.bias", "c_fc.bias")) for name in source_model.shapes
    )
    use_bias = bool(source_model.setting("bias", default=found))
    config = TransformerLMConfig(
        **{**settings, "d_model": d_model},
        vocab_size=source_model.number("vocab_size")
        or source_model.shape("transformer.wte.weight", 2)[0],
        context_length=(
            source_model.number("block_size") or source_model.shape("transformer.wpe.weight", 2)[0]
        ),
        num_layers=source_model.number("n_layer") or source_model.count("transformer.h"),
        norm_bias=use_bias,
        qkv_bias=use_bias,
        output_bias=use_bias,
        feed_forward_bias=use_bias,
        embedding_dropout=source_model.child("transformer.drop").dropout(),
    )
    model = TransformerLM(config, rngs=rngs)
    model.final_norm = layer_norm(source_model, "transformer.ln_f", use_bias=use_bias)
    return model


def _settings(module: TransformerLM) -> dict[str, Any]:
    """Returns the ``model_args``."""
    config = module.config
    return {
        "n_layer": config.num_layers,
        "n_head": config.attention.num_heads,
        "n_embd": config.d_model,
        "block_size": config.context_length,
        "bias": config.norm.norm_bias,
        "vocab_size": config.vocab_size,
        "dropout": config.embedding.embedding_dropout,
    }


def _mask(module: TransformerLM, shape: Shape | None) -> np.ndarray:
    """Returns the causal mask that layers keep where PyTorch has no fused attention."""
    length = module.config.context_length
    return np.tril(np.ones((1, 1, length, length), np.float32))


DIALECTS = (
    StateDictAdapter(
        "nanogpt",
        (
            ModuleMapping(
                ("GPT",),
                TransformerLM,
                _model,
                RULES,
                aliases={"lm_head.weight": "transformer.wte.weight"},
                buffers=(Buffer("transformer.h.*.attn.bias", _mask, written=False),),
                settings=_settings,
            ),
        ),
    ),
)
