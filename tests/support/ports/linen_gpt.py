"""The GPT of torch_models in Flax Linen, with kernels by heads."""

import flax.linen as nn
import jax
import jax.numpy as jnp


class Block(nn.Module):
    width: int
    heads: int

    @nn.compact
    def __call__(self, x):
        head = self.width // self.heads
        y = nn.LayerNorm(epsilon=1e-5, name="ln_1")(x)
        q = nn.DenseGeneral((self.heads, head), name="query")(y)
        k = nn.DenseGeneral((self.heads, head), name="key")(y)
        v = nn.DenseGeneral((self.heads, head), name="value")(y)
        q = q / jnp.sqrt(head)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        length = x.shape[1]
        mask = jnp.tril(jnp.ones((length, length), bool))
        scores = jnp.where(mask, scores, -1e30)
        weights = jax.nn.softmax(scores)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        x = x + nn.DenseGeneral(self.width, axis=(-2, -1), name="proj")(y)
        y = nn.LayerNorm(epsilon=1e-5, name="ln_2")(x)
        y = nn.Dense(5 * self.width, name="fc")(y)
        y = nn.gelu(y, approximate=False)
        y = nn.Dense(self.width, name="out")(y)
        return x + y


class GPT(nn.Module):
    vocab: int = 61
    width: int = 24
    heads: int = 4
    layers: int = 3
    context: int = 16

    @nn.compact
    def __call__(self, ids):
        wte = nn.Embed(self.vocab, self.width, name="wte")
        wpe = nn.Embed(self.context, self.width, name="wpe")
        x = wte(ids) + wpe(jnp.arange(ids.shape[1]))
        for i in range(self.layers):
            x = Block(self.width, self.heads, name=f"h_{i}")(x)
        x = nn.LayerNorm(epsilon=1e-5, name="ln_f")(x)
        return wte.attend(x)


def build(arrays, heads=4):
    """Returns the candidate, from the reference's arrays by name."""
    (vocab, width), (context, _) = arrays["wte.weight"].shape, arrays["wpe.weight"].shape
    layers = sum(name.endswith(".fc.bias") for name in arrays)

    def dense(name):
        return {"kernel": arrays[f"{name}.weight"].T, "bias": arrays[f"{name}.bias"]}

    def norm(name):
        return {"scale": arrays[f"{name}.weight"], "bias": arrays[f"{name}.bias"]}

    params = {
        "wte": {"embedding": arrays["wte.weight"]},
        "wpe": {"embedding": arrays["wpe.weight"]},
        "ln_f": norm("ln_f"),
    }
    for i in range(layers):
        fused = dense(f"h.{i}.qkv")
        block = {name: norm(f"h.{i}.{name}") for name in ("ln_1", "ln_2")}
        block |= {name: dense(f"h.{i}.{name}") for name in ("fc", "out")}
        for j, name in enumerate(("query", "key", "value")):
            part = slice(j * width, (j + 1) * width)
            block[name] = {
                "kernel": fused["kernel"][:, part].reshape(width, heads, -1),
                "bias": fused["bias"][part].reshape(heads, -1),
            }
        proj = dense(f"h.{i}.proj")
        block["proj"] = {"kernel": proj["kernel"].reshape(heads, -1, width), "bias": proj["bias"]}
        params[f"h_{i}"] = block
    return GPT(vocab, width, heads, layers, context), {"params": params}
