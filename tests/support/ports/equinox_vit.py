"""The ViT of torch_models in Equinox: one image at a time, channels last."""

import warnings

import jax
import jax.numpy as jnp

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import equinox as eqx


def convolve(x, kernel, bias, stride, padding):
    layout = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(
        x[None], kernel, (stride, stride), padding, dimension_numbers=layout
    )
    return y[0] + bias


def group_norm(x, scale, bias, groups):
    height, width, channels = x.shape
    y = x.reshape(height, width, groups, channels // groups)
    mean = y.mean((0, 1, 3), keepdims=True)
    variance = y.var((0, 1, 3), keepdims=True)
    y = (y - mean) / jnp.sqrt(variance + 1e-5)
    return y.reshape(x.shape) * scale + bias


class Layer(eqx.Module):
    norm_1: eqx.nn.LayerNorm
    qkv: eqx.nn.Linear
    proj: eqx.nn.Linear
    scale_1: jax.Array
    norm_2: eqx.nn.LayerNorm
    fc_1: eqx.nn.Linear
    fc_2: eqx.nn.Linear
    scale_2: jax.Array
    heads: int = eqx.field(static=True)

    def __call__(self, x):
        tokens, width = x.shape
        y = jax.vmap(self.norm_1)(x)
        qkv = jax.vmap(self.qkv)(y)
        q, k, v = jnp.moveaxis(qkv.reshape(tokens, 3, self.heads, -1), 1, 0)
        scores = jnp.einsum("qhd,khd->hqk", q, k)
        scores = scores * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(scores, axis=-1)
        y = jnp.einsum("hqk,khd->qhd", weights, v)
        y = jax.vmap(self.proj)(y.reshape(tokens, width))
        x = x + self.scale_1 * y
        y = jax.vmap(self.fc_1)(jax.vmap(self.norm_2)(x))
        y = y * jax.nn.sigmoid(1.702 * y)
        y = jax.vmap(self.fc_2)(y)
        return x + self.scale_2 * y


class ViT(eqx.Module):
    stem: tuple
    stem_norm: tuple
    patches: tuple
    token: jax.Array
    positions: jax.Array
    layers: list
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def one(self, image):
        x = convolve(image, *self.stem, 1, "SAME")
        x = jax.nn.relu(group_norm(x, *self.stem_norm, 2))
        x = convolve(x, *self.patches, 4, "VALID")
        x = x.reshape(-1, x.shape[-1])
        x = jnp.concatenate([self.token, x])
        x = x + self.positions
        for layer in self.layers:
            x = layer(x)
        x = jax.vmap(self.norm)(x)
        return self.head(x[0])

    @eqx.filter_jit
    def __call__(self, images):
        return jax.vmap(self.one)(images)


def build(arrays):
    """Returns the candidate, from the reference's arrays by name."""
    arrays = {name: jnp.asarray(array) for name, array in arrays.items()}
    pair = lambda name: (arrays[f"{name}.weight"], arrays[f"{name}.bias"])  # noqa: E731

    def filled(module, name):
        return eqx.tree_at(lambda m: (m.weight, m.bias), module, pair(name))

    def linear(name):
        rows, columns = arrays[f"{name}.weight"].shape
        return filled(eqx.nn.Linear(columns, rows, key=jax.random.key(0)), name)

    def norm(name):
        return filled(eqx.nn.LayerNorm(arrays[f"{name}.weight"].size, eps=1e-6), name)

    def convolution(name):
        kernel, bias = pair(name)
        return kernel.transpose(2, 3, 1, 0), bias

    layers = [
        Layer(
            norm(f"{at}.norm_1"), linear(f"{at}.qkv"), linear(f"{at}.proj"),
            arrays[f"{at}.scale_1"], norm(f"{at}.norm_2"), linear(f"{at}.fc_1"),
            linear(f"{at}.fc_2"), arrays[f"{at}.scale_2"], 3,
        )
        for at in ("layers.0", "layers.1")
    ]  # fmt: skip
    return ViT(
        convolution("stem"), pair("stem_norm"), convolution("patches"), arrays["token"][0],
        arrays["positions"][0], layers, norm("norm"), linear("head"),
    )  # fmt: skip
