"""The three modules that everything else is made of, in the layout of the naming rule."""

import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxformer.initializers import torch_linear


def widen(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The same values in float32 or wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def widely(function: Callable[[Array], Array], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """``function`` of x, computed in float32 or wider and rounded once, as PyTorch's kernels do.

    A bfloat16 array times a Python float would otherwise round the float to bfloat16 first.
    """
    return function(widen(x)).astype(x.dtype)


class Linear(nnx.Module):
    """y = x W + b, with ``kernel`` W of shape (in_features, out_features).

    Leading dimensions are flattened before the product: XLA on CPU otherwise makes the gradient
    of W through a transposing copy that costs as much as the product itself. Weights start as
    those of ``torch.nn.Linear`` do.

    >>> from flax import nnx
    >>> Linear(3, 5, rngs=nnx.Rngs(0))(jnp.ones((2, 7, 3))).shape
    (2, 7, 5)
    """

    def __init__(
        self, in_features: int, out_features: int, *, use_bias: bool = True, rngs: nnx.Rngs
    ):
        kernel_init, bias_init = torch_linear(in_features)
        self.kernel = nnx.Param(kernel_init(rngs.params(), (in_features, out_features)))
        self.bias = nnx.Param(bias_init(rngs.params(), (out_features,))) if use_bias else None

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """``x`` of any leading shape, projected."""
        kernel_IO = self.kernel[...]
        y = jnp.reshape(x, (-1, x.shape[-1])) @ kernel_IO
        if self.bias is not None:
            # Widened, so that the bias's gradient is not summed over all rows in bfloat16.
            y = (widen(y) + widen(self.bias[...])[None, :]).astype(y.dtype)
        return jnp.reshape(y, (*x.shape[:-1], kernel_IO.shape[-1]))


class Embedding(nnx.Module):
    """A table of rows, ``embedding`` of shape (num_embeddings, features), looked up by id.

    Rows start as standard normals, as in ``torch.nn.Embedding``. Ids must lie in
    [0, num_embeddings): on a device an id outside is not an error, so callers check on the host.
    """

    def __init__(self, num_embeddings: int, features: int, *, rngs: nnx.Rngs):
        self.embedding = nnx.Param(jax.random.normal(rngs.params(), (num_embeddings, features)))

    def __call__(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        """The rows of ``ids``."""
        return self.embedding[...][ids]

    def attend(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """The tied output head: the product of x with every row."""
        # Not ``@ …T``: outside of ``jax.jit`` that would first make a transposed copy of the table.
        logits = jnp.einsum("rd,vd->rv", jnp.reshape(x, (-1, x.shape[-1])), self.embedding[...])
        return jnp.reshape(logits, (*x.shape[:-1], -1))


class Dropout(nnx.Module):
    """One place of dropout, named by its path in the model: x · keep / (1 - rate) while training.

    It draws its mask from the key that ``seed_dropout`` gave it, or takes ``keep_mask`` when a
    test has put one there. With ``recording`` on, ``last_keep`` holds the mask that the last call
    used (not under ``jax.jit``, where it would be a tracer).

    Raises:
        ValueError: training mode, a rate above zero, and neither key nor mask.
    """

    def __init__(self, rate: float):
        self.rate = rate
        self.deterministic = False
        self.key: Array | None = nnx.data(None)
        self.keep_mask: Bool[Array, "..."] | None = nnx.data(None)
        self.recording = False
        self.last_keep: Bool[Array, "..."] | None = nnx.data(None)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """``x`` of any shape, some of it dropped while training."""
        if self.deterministic or self.rate == 0:
            return x
        if self.keep_mask is not None:
            keep = self.keep_mask
        elif self.key is not None:
            keep = jax.random.bernoulli(self.key, 1 - self.rate, x.shape)
        else:
            raise ValueError("dropout in training mode needs a key: call seed_dropout(model, key)")
        if self.recording:
            self.last_keep = keep
        return jnp.where(keep, widely(lambda y: y / (1 - self.rate), x), jnp.zeros((), x.dtype))


def dropout_modules(module: nnx.Module) -> dict[str, Dropout]:
    """Every place of dropout in ``module``, by path: ``blocks.3.attention.attention_dropout``."""
    return {
        ".".join(map(str, path)): node
        for path, node in nnx.iter_modules(module)
        if isinstance(node, Dropout)
    }


def seed_dropout(module: nnx.Module, key: Array | None) -> None:
    """Gives each place of dropout its own key, a function of ``key`` and of its path alone."""
    for path, dropout in dropout_modules(module).items():
        dropout.key = None if key is None else jax.random.fold_in(key, zlib.crc32(path.encode()))


def inject_keep_masks(module: nnx.Module, masks: dict[str, Array]) -> None:
    """Fixes the masks (True = keep) of the named places, so two frameworks drop the same units.

    Raises:
        ValueError: a path is not a place of dropout in ``module``.
    """
    places = dropout_modules(module)
    if unknown := sorted(set(masks) - set(places)):
        raise ValueError(f"no dropout at {', '.join(unknown)}; there is {', '.join(places)}")
    for path, dropout in places.items():
        dropout.keep_mask = masks.get(path)
