"""The models whose generated tokens are compared, and functions that run both sides."""

import functools

import jax.numpy as jnp
import numpy as np
import torch

from jaxformer.config import TransformerLMConfig
from jaxformer.parameters import abstract, merge
from jaxformer.porting.mapping.naming import export_arrays
from jaxformer.transformer_lm import TransformerLM
from torch_ref import generation as torch_generation
from torch_ref.config import TransformerLMConfig as TorchTransformerLMConfig
from torch_ref.transformer_lm import TransformerLM as TorchTransformerLM

V, CONTEXT, TOKENS = 31, 24, 60
BASE = {"d_model": 36, "num_heads": 4, "d_ff": 23, "num_layers": 2}
BASE |= {"context_length": CONTEXT, "tie_embeddings": False}
MODELS = {
    "none": {"positions": "none"},
    "learned": {"positions": "learned", "num_kv_heads": 2},
    "sinusoidal": {
        "positions": "sinusoidal",
        "num_kv_heads": 1,
        "block": "post_norm",
        "embedding_scale": 4.0,
        "seed": 3,
    },
    "rotary": {
        "positions": "rotary",
        "num_kv_heads": 2,
        "head_dim": 10,
        "sliding_window": 5,
        "norm": "rms_norm",
        "activation": "swiglu",
    },
    "rotary_interleaved": {
        "positions": "rotary",
        "rotary_interleaved": True,
        "head_dim": 14,
        "rotary_fraction": 0.5714286,
        "rotary_scaling": "linear",
        "rotary_scaling_factor": 2.0,
        "query_key_norm": True,
    },
    "alibi": {"positions": "alibi", "num_heads": 6, "num_kv_heads": 3, "sliding_window": 9},
    "relative": {
        "positions": "relative",
        "max_relative_position": 5,
        "num_kv_heads": 2,
        "block": "parallel",
        "head_bias": True,
        "score_soft_cap": 4.0,
        "logit_soft_cap": 7.0,
    },
    "alternating_windows": {
        "positions": "rotary",
        "head_dim": 10,
        "num_layers": 3,
        "num_kv_heads": 2,
        "norm": "rms_norm",
        "norm_unit_offset": True,
        "branch_output_norm": True,
        "activation": "geglu_tanh",
        "sliding_window": 4,
        "full_attention_layers": (1,),
    },
    "offset": {
        "position_offset": 2,
        "block": "parallel",
        "shared_norm": True,
        "num_token_types": 2,
        "head": "masked_lm",
        "tie_embeddings": True,
        "head_bias": True,
        "seed": 5,
    },
    "shared_layers": {"positions": "learned", "num_layers": 4, "layer_groups": 2},
    "disentangled": {
        "positions": "disentangled",
        "distance_span": 6,
        "distance_limit": 15,
        "seed": 1,
    },
}


def build(seed=7, dtype=np.float64, **settings):
    """A model and its twin, with every parameter far from where it started."""
    config = TransformerLMConfig(**{"vocab_size": V, **BASE, **settings})
    definition, shapes = abstract(lambda rngs: TransformerLM(config, rngs=rngs))
    rng = np.random.default_rng(seed)
    parameters = {
        name: rng.normal(name.endswith("scale"), 0.4, shape.shape) for name, shape in shapes.items()
    }
    model = merge(definition, {n: jnp.asarray(value, dtype) for n, value in parameters.items()})
    model.eval()
    twin_config = TorchTransformerLMConfig(**config.settings())
    twin = TorchTransformerLM(twin_config).double().eval()
    arrays = export_arrays(parameters)
    twin.load_state_dict({name: torch.from_numpy(a) for name, a in arrays.items()}, strict=True)
    return model, twin


@functools.cache
def pair(name):
    """The model of that name and its twin, made once."""
    return build(**MODELS[name])


def prompts(batch=3, length=7, seed=3):
    return np.random.default_rng(seed).integers(0, V, (batch, length)).astype(np.int32)


def torch_generate(twin, prompt, *args, mask=None, **settings):
    mask = None if mask is None else torch.from_numpy(mask)
    prompt = torch.from_numpy(np.asarray(prompt))
    return torch_generation.generate(twin, prompt, *args, mask=mask, **settings).numpy()
