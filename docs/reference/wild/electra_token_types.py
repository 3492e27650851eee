"""FlaxElectra reads token type 1 where no token types are given; the PyTorch model reads type 0.

    pip install transformers==4.55.4 torch jax flax && python electra_token_types.py

The largest difference of the logits, over the largest logit:

    token types left to the models: 1.5
    token types given as zeros:     3e-7

`token_type_ids = jnp.ones_like(input_ids)` stands in every `__call__` of
transformers/models/electra/modeling_flax_electra.py that fills in what is not given. It must be
`jnp.zeros_like(input_ids)`, as in modeling_flax_bert.py and in modeling_electra.py.
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

from transformers import ElectraConfig, ElectraForMaskedLM, FlaxElectraForMaskedLM  # noqa: E402


def main():
    """Prints both differences."""
    torch.manual_seed(0)
    config = ElectraConfig(
        vocab_size=61, embedding_size=12, hidden_size=24, num_hidden_layers=2,
        num_attention_heads=3, intermediate_size=40, max_position_embeddings=32,
    )  # fmt: skip
    model = ElectraForMaskedLM(config).eval()
    with torch.no_grad():
        # Untrained, the two rows of token types are too small for the difference to show.
        model.electra.embeddings.token_type_embeddings.weight.normal_()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        flax = FlaxElectraForMaskedLM.from_pretrained(folder, from_pt=True)
    ids = np.random.default_rng(0).integers(5, 61, (2, 9))
    for name, given in (
        ("token types left to the models", {}),
        ("token types given as zeros", {"token_type_ids": np.zeros_like(ids)}),
    ):
        tensors = {n: torch.tensor(x) for n, x in given.items()}
        with torch.no_grad():
            right = model(torch.tensor(ids), **tensors).logits.numpy()
        own = np.asarray(flax(ids, **given).logits)
        print(f"{name}: {np.abs(own - right).max() / np.abs(right).max():.1e}")


if __name__ == "__main__":
    main()
