"""Hugging Face's ``llama``, ``mistral``, ``qwen2`` and ``qwen3``: one stack in four settings."""

from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.hugging_face import (
    GATED_ACTIVATIONS,
    activation,
    check_even,
    head_width,
    inverse_frequencies,
    language_model,
    rotary,
    source_activation,
    source_rotary,
    turned_names,
)
from jaxformer.porting.mapping.adapter import Buffer, StateDictAdapter
from jaxformer.porting.mapping.rules import Rules, names, under
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.transformer_lm import TransformerLM

# In every layer of old checkpoints.
OLD_BUFFERS = (
    Buffer("layers.*.self_attn.rotary_emb.inv_freq", inverse_frequencies, written=False),
)
GATED_FEED_FORWARD = names(gate_proj="gate_proj", up_proj="up_proj", down_proj="down_proj")


def body(module: TransformerLM, **norms: str) -> Rules:
    """The rules of the stack, whose blocks have these norms: ours = theirs."""
    turned = {name: name for name in ("q_proj", "k_proj", "q_norm", "k_norm")}
    attention = (*turned_names(module, turned), *names(v_proj="v_proj", o_proj="o_proj"))
    block = (
        *under("attention", "self_attn", attention),
        *under("feed_forward", "mlp", GATED_FEED_FORWARD),
        *names(norms),
    )
    return (
        *names(token_embedding="embed_tokens", final_norm="norm"),
        *under("blocks.*", "layers.*", block),
    )


def _body(module: TransformerLM) -> Rules:
    return body(
        module, attention_norm="input_layernorm", feed_forward_norm="post_attention_layernorm"
    )


def _settings(name: str) -> Any:
    def of(source_model: SourceModel) -> dict[str, Any]:
        d_model = source_model.setting("hidden_size")
        num_heads = source_model.setting("num_attention_heads")
        if name == "llama":
            check_even(d_model, num_heads)
        # qwen3 has a default of its own, the others the usual width.
        head_dim = source_model.setting("head_dim", default=128 if name == "qwen3" else None)
        # The other two have no say in it.
        free = name in ("llama", "qwen3")
        bias = free and bool(source_model.setting("attention_bias", default=False))
        return {
            "d_model": d_model,
            "num_heads": num_heads,
            "num_kv_heads": source_model.setting("num_key_value_heads", default=num_heads),
            "head_dim": head_dim or head_width(source_model, d_model, num_heads),
            "num_layers": source_model.setting("num_hidden_layers"),
            "context_length": source_model.setting("max_position_embeddings"),
            "d_ff": source_model.setting("intermediate_size"),
            "activation": activation(source_model, "hidden_act", table=GATED_ACTIVATIONS),
            "norm": "rms_norm",
            "norm_eps": source_model.setting("rms_norm_eps", default=1e-6),
            "qkv_bias": True if name == "qwen2" else bias,
            "output_bias": bias,
            "feed_forward_bias": name == "llama"
            and bool(source_model.setting("mlp_bias", default=False)),
            "query_key_norm": name == "qwen3",
            "attention_dropout": source_model.setting("attention_dropout", default=0.0),
            **rotary(source_model),
            **_window(source_model, name),
        }

    return of


def _window(source_model: SourceModel, name: str) -> dict[str, Any]:
    """The sliding window, and the layers without it."""
    # null says that there is none.
    window = source_model.config.get("sliding_window", 4096)
    if name == "llama" or window is None:
        return {}
    if name == "mistral":
        return {"sliding_window": window}
    if not source_model.setting("use_sliding_window", default=False):
        return {}
    num_layers = source_model.setting("num_hidden_layers")
    first = source_model.setting("max_window_layers", default=28)
    kinds = source_model.setting("layer_types", default=None)
    return {
        "sliding_window": window,
        "full_attention_layers": full_layers(kinds, num_layers, first),
    }


def full_layers(kinds: Any, num_layers: int, first: int) -> tuple[int, ...]:
    """The layers without a sliding window: those called so, or those before the ``first``."""
    if kinds is None:
        return tuple(range(min(first, num_layers)))
    return tuple(n for n, kind in enumerate(kinds) if kind == "full_attention")


def layer_types(config: TransformerLMConfig) -> list[str]:
    """Their ``layer_types``."""
    everywhere = config.sliding_window is None
    return [
        "full_attention" if everywhere or n in config.full_attention_layers else "sliding_attention"
        for n in range(config.num_layers)
    ]


def source_stack(config: TransformerLMConfig) -> dict[str, Any]:
    """The settings that all of these and Gemma write alike."""
    return {
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_width,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.context_length,
        "intermediate_size": config.feed_forward_width,
        "rms_norm_eps": config.norm_eps,
        "attention_bias": config.output_bias,
        "attention_dropout": config.attention_dropout,
        **source_rotary(config),
    }


def _source_settings(name: str) -> Any:
    def of(config: TransformerLMConfig) -> dict[str, Any]:
        window = config.sliding_window
        settings = {
            **source_stack(config),
            "hidden_act": source_activation(config.activation, GATED_ACTIVATIONS),
            "mlp_bias": config.feed_forward_bias,
        }
        if name == "mistral":
            settings["sliding_window"] = window
        if name.startswith("qwen"):
            settings |= {"use_sliding_window": window is not None, "sliding_window": window}
            settings["layer_types"] = layer_types(config)
        return settings

    return of


def _dialect(name: str, start: str) -> StateDictAdapter:
    return language_model(
        name,
        _settings(name),
        _source_settings(name),
        _body,
        classes=(f"{start}ForCausalLM", f"{start}Model"),
        prefix="model.",
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        tied_by_default=False,
        buffers=OLD_BUFFERS,
        translated=frozenset({"interleaved"}),
    )


DIALECTS = (
    _dialect("llama", "Llama"),
    _dialect("mistral", "Mistral"),
    _dialect("qwen2", "Qwen2"),
    _dialect("qwen3", "Qwen3"),
)
