"""An attention of your own in PyTorch and in JAX, and the proof that both compute the same.

    uv run --extra torch python examples/custom_attention_with_twin.py

The attention is that of cosines (arXiv 2010.04245): queries and keys are normalised, and a learnt
factor for each head takes the place of 1 / sqrt(head_dim). Nothing of it is in jaxformer. The two
sides are compared operator by operator, in float64, forward and backward; no names are given.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.nn import functional

import jaxformer as jf

D, N = 12, 3


class CosineAttention(torch.nn.Module):
    """Causal attention by the cosine of queries and keys, in PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(D, 3 * D)
        self.out = torch.nn.Linear(D, D)
        self.factor = torch.nn.Parameter(torch.linspace(4.0, 9.0, N))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns (B, T, D) of (B, T, D)."""
        B, T, _ = x.shape
        q, k, v = (part.view(B, T, N, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
        scores = self.factor[:, None, None] * (q @ k.transpose(-1, -2))
        may_attend = torch.ones(T, T, dtype=torch.bool).tril()
        weights = scores.masked_fill(~may_attend, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(B, T, D))


def cosine_attention(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Returns what ``CosineAttention`` does, in JAX."""
    B, T, _ = x.shape
    qkv = x @ params["qkv"] + params["qkv_bias"]
    q, k, v = (part.reshape(B, T, N, -1) for part in jnp.split(qkv, 3, -1))
    q, k = (part / jnp.linalg.norm(part, axis=-1, keepdims=True) for part in (q, k))
    scores = params["factor"][:, None, None] * jnp.einsum("btnh,bsnh->bnts", q, k)
    weights = jax.nn.softmax(jnp.where(jnp.tri(T, dtype=bool), scores, -jnp.inf))
    mixed = jnp.einsum("bnts,bsnh->btnh", weights, v).reshape(B, T, D)
    return mixed @ params["out"] + params["out_bias"]


def with_bug(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Returns the attention of a port that has left the learnt factor out."""
    return cosine_attention({**params, "factor": jnp.ones(N)}, x)


def main() -> None:
    """Compares the right port, and then one with a bug."""
    torch.manual_seed(0)
    reference = CosineAttention()
    arrays = {name: array.numpy() for name, array in reference.state_dict().items()}
    params = {
        "qkv": arrays["qkv.weight"].T,
        "qkv_bias": arrays["qkv.bias"],
        "out": arrays["out.weight"].T,
        "out_bias": arrays["out.bias"],
        "factor": arrays["factor"],
    }
    x = np.random.default_rng(0).normal(size=(2, 7, D))

    report = jf.assert_parity(reference, (cosine_attention, params), x)
    print("cosine_attention:", report.verdict)

    report = jf.compare(reference, (with_bug, params), x)
    print("with_bug:", report.verdict)
    print(report)


if __name__ == "__main__":
    main()
