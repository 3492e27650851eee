"""FlaxLlama turns queries and keys with base 10,000, whatever the configuration says.

    pip install transformers==4.55.4 torch jax flax && python llama_rotary_base.py

The largest difference of the logits, over the largest logit, for three configurations:

    rope_theta 10,000:              1e-6
    rope_theta 500,000 (Llama 3):   0.3
    rope_scaling linear, factor 4:  1.2

`create_sinusoidal_positions(num_pos, dim)` in transformers/models/llama/modeling_flax_llama.py
writes the number 10000 into `inv_freq = 1.0 / (10000 ** (np.arange(0, dim, 2) / dim))` and never
sees the configuration. It must get `config.rope_theta`, and divide by the factor of
`config.rope_scaling` or reject it: as it is, a checkpoint of Llama 3 loads without a word.
"""

import tempfile

import jax.numpy as jnp
import numpy as np
import torch

clip = jnp.clip


def clip_as_before(array, *args, a_min=None, a_max=None, **kwargs):
    """Takes the keywords that jax.numpy.clip had when this version was published."""
    bounds = {"min": a_min, "max": a_max}
    return clip(array, *args, **kwargs, **{n: b for n, b in bounds.items() if b is not None})


jnp.clip = clip_as_before

from transformers import FlaxLlamaForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

CASES = {
    "rope_theta 10,000": {},
    "rope_theta 500,000 (Llama 3)": {"rope_theta": 500_000.0},
    "rope_scaling linear, factor 4": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
}


def main():
    """Prints the difference of each configuration."""
    ids = np.random.default_rng(0).integers(5, 61, (2, 9))
    for name, changes in CASES.items():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=61, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, intermediate_size=40, max_position_embeddings=32,
            initializer_range=0.3, **changes,
        )  # fmt: skip
        model = LlamaForCausalLM(config).eval()
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            flax = FlaxLlamaForCausalLM.from_pretrained(folder, from_pt=True)
        with torch.no_grad():
            right = model(torch.tensor(ids)).logits.numpy()
        own = np.asarray(flax(ids).logits)
        print(f"{name}: {np.abs(own - right).max() / np.abs(right).max():.1e}")


if __name__ == "__main__":
    main()
