"""The language models of tunix (google-tunix), loaded from folders that transformers wrote."""

import importlib
import tempfile
from functools import partial

import numpy as np
import torch

from benchmarks.wild import inputs
from benchmarks.wild.hugging_face import First
from benchmarks.wild.settings import Pair, Setting, perturb

TEXT = {
    "vocab_size": inputs.VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10, "rope_theta": 1e6,
    "max_position_embeddings": 64, "pad_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip
SIZES = {
    "num_layers": 2, "embed_dim": 24, "hidden_dim": 40, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 10,
}  # fmt: skip
USUAL = SIZES | {"vocab_size": inputs.VOCAB, "rope_theta": 1_000_000, "norm_eps": 1e-6}
SMALLER_BASE = ({"rope_theta": 5e5}, USUAL | {"rope_theta": 500_000})
OTHER_EPS = {"tie_word_embeddings": True, "rms_norm_eps": 1e-3}
TIED = (OTHER_EPS, USUAL | {"use_tied_embedding": True, "norm_eps": 1e-3})
# Llama 3.1 and 3.2 have it; a configuration of tunix has no setting for it.
STRETCHED = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 1e6,
}  # fmt: skip
# Five layers that see a window, and one that sees all.
GEMMA = {
    "num_hidden_layers": 6, "query_pre_attn_scalar": 10, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
OWN_GEMMA = SIZES | {
    "num_layers": 6, "num_embed": inputs.VOCAB, "global_base_frequency": 1_000_000,
}  # fmt: skip
# The class of transformers, the module of tunix, and by setting what each side is given.
FAMILIES = {
    "Qwen2": ("Qwen2ForCausalLM", "qwen2.params", {
        "as usual": ({}, USUAL), "tied, eps 1e-3": TIED, "base 500,000": SMALLER_BASE,
    }),
    "Qwen3": ("Qwen3ForCausalLM", "qwen3.params", {
        "as usual": ({}, USUAL), "tied, eps 1e-3": TIED, "base 500,000": SMALLER_BASE,
    }),
    "Llama3": ("LlamaForCausalLM", "llama3.params", {
        "as usual": ({}, USUAL),
        "tied, eps 1e-3": (OTHER_EPS, USUAL | {"weight_tying": True, "norm_eps": 1e-3}),
        "base 500,000": SMALLER_BASE,
        "stretched as in Llama 3.2": ({"rope_parameters": STRETCHED}, USUAL),
    }),
    "Gemma3": ("Gemma3ForCausalLM", "gemma3.params_safetensors", {
        "as usual": (
            GEMMA | {"sliding_window": 64}, OWN_GEMMA | {"sliding_window_size": 64},
        ),
        "window of 4": (GEMMA | {"sliding_window": 4}, OWN_GEMMA | {"sliding_window_size": 4}),
    }),
}  # fmt: skip


def settings():
    """Yields every setting of tunix's models."""
    for family, (kind, module, choices) in FAMILIES.items():
        for name, (own, other) in choices.items():
            build = partial(_pair, kind, module, own, other)
            modes = {"forward": build}
            if name == "as usual":
                modes |= {f"padding {side}": partial(build, side) for side in ("right", "left")}
                modes["cache"] = partial(build, decodes=True)
            yield Setting("google-tunix", family, name, modes)


class Decode(torch.nn.Module):
    """Reads a prompt, and then one token at a time with a cache."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask):
        cache, start, found = None, 0, []
        for end in range(inputs.PROMPT, input_ids.shape[1] + 1):
            output = self.model(
                input_ids[:, start:end], attention_mask=attention_mask[:, :end],
                past_key_values=cache, use_cache=True,
            )  # fmt: skip
            cache, start = output.past_key_values, end
            found.append(output.logits)
        return found


def _pair(kind, module, own, other, side="", decodes=False):
    """Returns a model of transformers and the same of tunix, read from its folder."""
    import transformers
    from flax import nnx
    from tunix.generate.utils import build_positions_from_mask, make_causal_attn_mask

    params = importlib.import_module(f"tunix.models.{module}")
    cls = getattr(transformers, kind)
    model = perturb(cls(cls.config_class(**TEXT | own)))
    config = params.model_lib.ModelConfig(**other)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = params.create_model_from_safe_tensors(folder, config, dtype=np.float32)
    definition, state = nnx.split(loaded)
    ids, seen = inputs.padded_tokens(side)

    def call(state, input_ids, attention_mask):
        positions = build_positions_from_mask(attention_mask)
        mask = make_causal_attn_mask(attention_mask.astype(bool), input_ids.shape[1])
        return nnx.merge(definition, state)(input_ids, positions, None, mask)[0]

    def decode(state, input_ids, attention_mask):
        total = input_ids.shape[1]
        module = nnx.merge(definition, state)
        cache = _empty_cache(config, len(input_ids), total)
        found, start = [], 0
        for end in range(inputs.PROMPT, total + 1):
            positions = build_positions_from_mask(attention_mask)[:, start:end]
            mask = make_causal_attn_mask(attention_mask.astype(bool), total)[:, start:end]
            output, cache = module(input_ids[:, start:end], positions, cache, mask)
            found.append(output)
            start = end
        return found

    given = {"input_ids": ids, "attention_mask": seen}
    if decodes:
        return Pair(Decode(model), (decode, state), given)
    positions = np.maximum(np.cumsum(seen, 1) - 1, 0)
    return Pair(
        First(model), (call, state), {**given, "position_ids": positions}, given,
        None if seen.all() else seen == 1,
    )  # fmt: skip


def _empty_cache(config, rows, length):
    """Returns a cache of the form that the layers of tunix read and write."""
    import jax.numpy as jnp

    def empty():
        return jnp.zeros((rows, length, config.num_kv_heads, config.head_dim), np.float32)

    return {
        f"layer_{i}": {"k": empty(), "v": empty(), "end_index": jnp.zeros(rows, np.int32)}
        for i in range(config.num_layers)
    }
