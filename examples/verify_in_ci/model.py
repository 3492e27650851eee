"""The two sides that a project has: a PyTorch model, and its port to JAX."""

import jax
import jax.numpy as jnp
import torch

Params = dict[str, jax.Array]


class Classifier(torch.nn.Module):
    """A small reference: two layers with a norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 10)
        self.norm = torch.nn.LayerNorm(10)
        self.down = torch.nn.Linear(10, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns logits (B, 4) of (B, 6)."""
        return self.down(self.norm(torch.nn.functional.gelu(self.up(x))))


def classify(params: Params, x: jax.Array) -> jax.Array:
    """Returns what ``Classifier`` does."""
    hidden = jax.nn.gelu(x @ params["up.weight"].T + params["up.bias"], approximate=False)
    mean = hidden.mean(-1, keepdims=True)
    variance = ((hidden - mean) ** 2).mean(-1, keepdims=True)
    hidden = (hidden - mean) / jnp.sqrt(variance + 1e-5)
    hidden = hidden * params["norm.weight"] + params["norm.bias"]
    return hidden @ params["down.weight"].T + params["down.bias"]
