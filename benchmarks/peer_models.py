"""The model of benchmarks/peers.py, as users of PyTorch and of Flax NNX write it.

Both are GPT-2 with the settings of a preset, and read the same weights: a dict by the names that
``jaxformer.porting.export_arrays`` gives them.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

Weights = Mapping[str, np.ndarray]


def plain_gpt(config: Any, weights: Weights) -> Any:
    """Returns a plain PyTorch GPT with these weights.

    One product makes queries, keys and values, attention is torch's fused one, and the loss is
    ``cross_entropy``. Called as ``model(ids, targets)`` it returns the mean loss, as
    ``model.next_logits(ids, caches, start)`` the logits after the last token.
    """
    import torch
    from torch import nn
    from torch.nn import functional

    width, heads = config.d_model, config.attention.num_heads

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(width, 3 * width, bias=config.attention.qkv_bias)
            self.out = nn.Linear(width, width, bias=config.attention.output_bias)
            self.weights_dropout = config.attention.attention_dropout
            self.dropout = nn.Dropout(config.attention.output_dropout)

        def forward(self, x: torch.Tensor, cache: Any, start: Any) -> torch.Tensor:
            batch, length, _ = x.shape
            q, k, v = (
                part.reshape(batch, length, heads, -1).transpose(1, 2)
                for part in self.qkv(x).chunk(3, dim=-1)
            )
            if cache is None:
                p = self.weights_dropout if self.training else 0.0
                mixed = functional.scaled_dot_product_attention(
                    q, k, v, dropout_p=p, is_causal=True
                )
            else:
                keys, values, mask = cache.append(k, v, start)
                mixed = functional.scaled_dot_product_attention(
                    q, keys, values, attn_mask=mask, is_causal=mask is None and length > 1
                )
            return self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            bias = config.feed_forward.feed_forward_bias
            self.up = nn.Linear(width, 4 * width, bias=bias)
            self.down = nn.Linear(4 * width, width, bias=bias)
            self.dropout = nn.Dropout(config.feed_forward.feed_forward_dropout)
            self.approximate = "tanh" if config.feed_forward.activation == "gelu_tanh" else "none"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = functional.gelu(self.up(x), approximate=self.approximate)
            return self.dropout(self.down(hidden))

    def norm() -> nn.LayerNorm:
        return nn.LayerNorm(width, eps=config.norm.norm_eps, bias=config.norm.norm_bias)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm, self.attention = norm(), Attention()
            self.feed_forward_norm, self.feed_forward = norm(), FeedForward()

        def forward(self, x: torch.Tensor, cache: Any, start: Any) -> torch.Tensor:
            x = x + self.attention(self.attention_norm(x), cache, start)
            return x + self.feed_forward(self.feed_forward_norm(x))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = nn.Embedding(config.vocab_size, width)
            self.positions = nn.Embedding(config.context_length, width)
            self.dropout = nn.Dropout(config.embedding.embedding_dropout)
            self.blocks = nn.ModuleList(Block() for _ in range(config.num_layers))
            self.norm = norm()

        def hidden(
            self, ids: torch.Tensor, positions: torch.Tensor, caches: Any, start: Any
        ) -> Any:
            x = self.dropout(self.tokens(ids) + self.positions(positions))
            for block, cache in zip(self.blocks, caches, strict=True):
                x = block(x, cache, start)
            return self.norm(x)

        def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            positions = torch.arange(ids.shape[1], device=ids.device)
            x = self.hidden(ids, positions, [None] * len(self.blocks), None)
            logits = functional.linear(x, self.tokens.weight)
            return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

        def next_logits(self, ids: torch.Tensor, caches: Any, positions: torch.Tensor) -> Any:
            x = self.hidden(ids, positions, caches, positions)
            return functional.linear(x[:, -1], self.tokens.weight)

    model = GPT()
    model.load_state_dict({name: torch.from_numpy(a) for name, a in plain_names(weights).items()})
    return model


def plain_names(weights: Weights) -> dict[str, np.ndarray]:
    """Returns the weights under the names of ``plain_gpt``, with q, k and v in one."""
    ends = {
        "token_embedding": "tokens", "position_embedding": "positions", "final_norm": "norm",
        "o_proj": "out", "up_proj": "up", "down_proj": "down",
    }  # fmt: skip
    named = {}
    for name, array in weights.items():
        *path, kind = name.split(".")
        if path[-1] in ("k_proj", "v_proj"):
            continue
        if path[-1] == "q_proj":
            parts = [weights[".".join([*path[:-1], f"{p}_proj", kind])] for p in "qkv"]
            named[".".join([*path[:-1], "qkv", kind])] = np.concatenate(parts)
        else:
            named[".".join([*path[:-1], ends.get(path[-1], path[-1]), kind])] = array
    return named


def cache_shape(config: Any, batch: int, slots: int) -> tuple[int, int, int, int]:
    """Returns the shape of a layer's keys: rows, heads, slots, head width."""
    heads = config.attention.num_heads
    return batch, heads, slots, config.d_model // heads


class GrowingCache:
    """Keys and values in buffers that are read as far as they are written: for eager PyTorch."""

    def __init__(self, config: Any, batch: int, slots: int):
        import torch

        shape = cache_shape(config, batch, slots)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)
        self.length = 0

    def append(self, k: Any, v: Any, _: Any) -> tuple[Any, Any, None]:
        """Writes, and returns what there is, which needs no mask."""
        end = self.length + k.shape[2]
        self.keys[:, :, self.length : end], self.values[:, :, self.length : end] = k, v
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end], None


class StaticCache:
    """Keys and values in buffers that are always read in full: for what is compiled."""

    def __init__(self, keys: Any, values: Any):
        self.keys, self.values = keys, values

    def append(self, k: Any, v: Any, positions: Any) -> tuple[Any, Any, Any]:
        """Writes at ``positions``, and returns all, with a mask of what is visible."""
        import torch

        self.keys.index_copy_(2, positions, k)
        self.values.index_copy_(2, positions, v)
        slots = torch.arange(self.keys.shape[2], device=k.device)
        return self.keys, self.values, slots[None, :] <= positions[:, None]


def naive_nnx(config: Any, weights: Weights) -> Any:
    """Returns a GPT of Flax NNX's own layers with these weights, as its guides write models."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    width, heads = config.d_model, config.attention.num_heads
    tanh = config.feed_forward.activation == "gelu_tanh"
    rngs = nnx.Rngs(0)

    def norm() -> nnx.LayerNorm:
        return nnx.LayerNorm(
            width, epsilon=config.norm.norm_eps, use_bias=config.norm.norm_bias, rngs=rngs
        )

    class Block(nnx.Module):
        def __init__(self) -> None:
            self.attention_norm, self.feed_forward_norm = norm(), norm()
            self.attention = nnx.MultiHeadAttention(
                heads, width, use_bias=config.attention.qkv_bias, decode=False,
                dropout_rate=config.attention.attention_dropout, broadcast_dropout=False, rngs=rngs,
            )  # fmt: skip
            bias = config.feed_forward.feed_forward_bias
            self.up = nnx.Linear(width, 4 * width, use_bias=bias, rngs=rngs)
            self.down = nnx.Linear(4 * width, width, use_bias=bias, rngs=rngs)
            self.attention_dropout = nnx.Dropout(config.attention.output_dropout, rngs=rngs)
            self.feed_forward_dropout = nnx.Dropout(
                config.feed_forward.feed_forward_dropout, rngs=rngs
            )

        def __call__(self, x: jax.Array, mask: jax.Array | None) -> jax.Array:
            x = x + self.attention_dropout(self.attention(self.attention_norm(x), mask=mask))
            hidden = jax.nn.gelu(self.up(self.feed_forward_norm(x)), approximate=tanh)
            return x + self.feed_forward_dropout(self.down(hidden))

    class GPT(nnx.Module):
        def __init__(self) -> None:
            self.tokens = nnx.Embed(config.vocab_size, width, rngs=rngs)
            self.positions = nnx.Embed(config.context_length, width, rngs=rngs)
            self.dropout = nnx.Dropout(config.embedding.embedding_dropout, rngs=rngs)
            self.blocks = nnx.List([Block() for _ in range(config.num_layers)])
            self.norm = norm()

        def __call__(self, ids: jax.Array, positions: jax.Array, mask: Any = None) -> jax.Array:
            x = self.dropout(self.tokens(ids) + self.positions(positions))
            for block in self.blocks:
                x = block(x, mask)
            return self.tokens.attend(self.norm(x))

    model = GPT()
    for name, array in weights.items():
        *path, kind = name.split(".")
        module: Any = model
        short = {"token_embedding": "tokens", "position_embedding": "positions"}
        inner = {
            "q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "out",
            "up_proj": "up", "down_proj": "down", "final_norm": "norm",
        }  # fmt: skip
        for part in path:
            if part == "feed_forward":
                continue
            part = short.get(part, inner.get(part, part))
            module = module[int(part)] if part.isdigit() else getattr(module, part)
        is_matrix = kind == "weight" and array.ndim == 2
        if is_matrix and isinstance(module, nnx.Embed):
            module.embedding[...] = jnp.asarray(array)
        elif is_matrix:
            module.kernel[...] = jnp.asarray(array.T).reshape(module.kernel.shape)
        elif kind == "weight":
            module.scale[...] = jnp.asarray(array)
        else:
            module.bias[...] = jnp.asarray(array).reshape(module.bias.shape)
    return model
