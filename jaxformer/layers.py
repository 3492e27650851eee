"""The modules that hold parameters or draw dropout: ``Linear``, ``Embedding`` and ``Dropout``."""

import functools
import math
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxformer.execution import called_products, few_rows
from jaxformer.execution.gpu_shapes import add_bias, fill_rows, row_product, take_rows
from jaxformer.execution.query_blocks import cut_part
from jaxformer.initializers import normal, torch_linear
from jaxformer.parameters import join_path

# Where a part of an array begins along each dimension, and its shape.
Part = tuple[Sequence[Int[Array, ""]], tuple[int, ...]]


def widen(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the same values in float32 or wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def in_float32(function: Callable[[Array], Array], x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes ``function`` of x in float32 or wider and rounds once, as PyTorch's kernels do.

    A bfloat16 array times a Python float would otherwise round the float to bfloat16 first.
    """
    return function(widen(x)).astype(x.dtype)


class Linear(nnx.Module):
    """Computes y = x W + b, with ``kernel`` W (in_features, out_features) and ``bias`` b.

    Leading dimensions are flattened before the product: XLA on CPU otherwise makes the gradient
    of W through a transposing copy that costs as much as the product itself. Weights start as
    those of ``torch.nn.Linear`` do.

    >>> from flax import nnx
    >>> Linear(3, 5, rngs=nnx.Rngs(0))(jnp.ones((2, 7, 3))).shape
    (2, 7, 5)

    In programs that make tokens ``uses_custom_call`` may be set, ``kernel_OI`` be the kernel
    transposed, or ``joined_OI`` have the kernels of several layers, of which this is the first; see
    ``prepare_few_rows``.
    """

    uses_custom_call = False
    kernel_OI: Array | None = None  # noqa: N815
    joined_OI: Array | None = None  # noqa: N815

    def __init__(
        self, in_features: int, out_features: int, *, use_bias: bool = True, rngs: nnx.Rngs
    ):
        kernel_init, bias_init = torch_linear(in_features)
        self.kernel = nnx.Param(kernel_init(rngs.params(), (in_features, out_features)))
        self.bias = nnx.Param(bias_init(rngs.params(), (out_features,))) if use_bias else None

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """Returns ``x``, of any leading shape, projected; in the dtype of x and of the kernel."""
        rows = jnp.reshape(x, (-1, x.shape[-1]))
        return self.finish(self.multiply(rows), x.shape[:-1])

    def multiply(self, rows: Float[Array, "R I"]) -> Float[Array, "R O"]:
        """Returns x W of some rows."""
        kernel = self.kernel[...]
        library = called_products.wanted_library(rows, kernel)
        if self.kernel_OI is not None and few_rows.takes_copies(len(rows)):
            return few_rows.product(rows, self.kernel_OI)
        if self.uses_custom_call and few_rows.fits_call(rows):
            return few_rows.call_product(rows, kernel)
        if library is not None and len(rows) >= called_products.FEWEST_ROWS:
            return called_products.product(library, rows, kernel)
        return row_product(rows, kernel)

    def has_few(self, rows: Float[Array, "R I"]) -> bool:
        """Returns whether these rows are so few that their product has a form of its own."""
        has_copy = self.kernel_OI is not None and few_rows.takes_copies(len(rows))
        return has_copy or (self.uses_custom_call and few_rows.fits_call(rows))

    def finish(self, y: Float[Array, "R O"], leading: tuple[int, ...]) -> Float[Array, "... O"]:
        """Returns x W + b, given x W of all rows, with these leading dimensions."""
        if self.bias is not None:
            y = add_bias(y, self.bias[...])
        return jnp.reshape(y, (*leading, y.shape[-1]))


def project(x: Float[Array, "... I"], *layers: Any) -> list[Float[Array, "... _"]]:
    """Returns what each of several layers makes of ``x``.

    Where ``prepare_few_rows`` has joined their kernels, or made the products of all of them custom
    calls, it is one product.

    Args:
        x: of any leading shape.
        layers: each a ``Linear``, or what stands for one.
    """
    rows = jnp.reshape(x, (-1, x.shape[-1]))
    # A layer of another class, as one with an adapter, makes more of the rows than a product.
    has_calls = all(type(layer) is Linear and layer.uses_custom_call for layer in layers)
    if has_calls and few_rows.fits_call(rows) and len(layers) <= few_rows.MOST_TOGETHER:
        found = few_rows.call_each_product(rows, *(layer.kernel[...] for layer in layers))
        return [layer.finish(y, x.shape[:-1]) for layer, y in zip(layers, found, strict=True)]
    first = layers[0]
    kernels_OI = first.joined_OI if isinstance(first, Linear) else None
    if kernels_OI is None or not few_rows.takes_copies(len(rows)):
        return [layer(x) for layer in layers]
    widths = [layer.kernel.shape[1] for layer in layers]
    made = jnp.split(few_rows.product(rows, kernels_OI), np.cumsum(widths)[:-1], axis=1)
    return [layer.finish(y, x.shape[:-1]) for layer, y in zip(layers, made, strict=True)]


class Embedding(nnx.Module):
    """Looks up rows of a table, ``embedding`` (num_embeddings, features), by id.

    Rows start as standard normals, as in ``torch.nn.Embedding``. Ids must lie in
    [0, num_embeddings): on a device an id outside is not an error, so callers check on the host.

    In programs that make tokens ``uses_custom_call`` or ``for_few_rows`` is set; see
    ``prepare_few_rows``.
    """

    uses_custom_call = False
    for_few_rows = False

    def __init__(self, num_embeddings: int, features: int, *, rngs: nnx.Rngs):
        self.embedding = nnx.Param(normal(1.0)(rngs.params(), (num_embeddings, features)))

    def __call__(self, ids: Int[Array, "..."]) -> Float[Array, "... D"]:
        """Returns the rows of ``ids``, in the table's dtype."""
        return look_up(self.embedding[...], ids)

    def attend(self, x: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        """Returns the product of x with every row: the logits of a tied output head.

        Within ``filled_columns`` there are more columns than rows; those behind are 0.
        """
        rows, table = jnp.reshape(x, (-1, x.shape[-1])), self.embedding[...]
        library = called_products.wanted_library(rows, table)
        if self.uses_custom_call and few_rows.fits_call(rows):
            logits = few_rows.call_product_by_transposed(rows, table)
        elif self.for_few_rows and few_rows.is_few(len(rows)):
            logits = few_rows.product(rows, table)
        elif library is not None and len(rows) >= called_products.FEWEST_ROWS:
            logits = called_products.product_by_transposed(library, rows, table)
        else:
            # Not ``@ …T``: outside of ``jax.jit`` that would first make a transposed copy.
            logits = jnp.einsum("rd,vd->rv", rows, fill_rows(table))
        return jnp.reshape(logits, (*x.shape[:-1], -1))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def look_up(table: Float[Array, "V D"], ids: Int[Array, "..."]) -> Float[Array, "... D"]:
    """Returns the rows of ``ids``.

    The gradient of a row is the sum over all places of its id, which is made in float32 or wider
    and rounded once, as PyTorch's is.
    """
    return table[ids]


@look_up.defjvp
def _look_up_jvp(
    ids: Int[Array, "..."], primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    (table,), (tangent,) = primals, tangents
    return look_up(table, ids), take_rows(tangent, ids).astype(table.dtype)


class Dropout(nnx.Module):
    """Drops elements while training: x · keep / (1 - rate), each kept with probability 1 - rate.

    It draws its mask from the key that ``seed_dropout`` gave it, for the rows of the batch that
    begin at ``first_row`` (None is 0), or takes ``keep_mask`` when a test has put one there. With
    ``recording`` on, ``last_keep`` holds the mask that the last call used (not under ``jax.jit``,
    where it would be a tracer).

    Raises:
        ValueError: the rate is not in [0, 1). Or, when it is called: training mode, a rate above
            zero, and neither key nor mask.
    """

    def __init__(self, rate: float):
        if not 0 <= rate < 1:
            raise ValueError(f"the rate of dropout must be in [0, 1): got {rate}")
        self.rate = rate
        self.deterministic = False
        self.key: Array | None = nnx.data(None)
        self.first_row: Int[Array, ""] | None = nnx.data(None)
        self.keep_mask: Bool[Array, "..."] | None = nnx.data(None)
        self.recording = False
        self.last_keep: Bool[Array, "..."] | None = nnx.data(None)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns ``x``, of any shape, with elements dropped while training."""
        keep = self.keep(x.shape)
        return x if keep is None else self.drop(x, keep)

    def drop(self, x: Float[Array, "..."], keep: Bool[Array, "..."]) -> Float[Array, "..."]:
        """Returns x · keep / (1 - rate), in the dtype of x."""
        return jnp.where(keep, in_float32(lambda y: y / (1 - self.rate), x), jnp.zeros((), x.dtype))

    @property
    def active(self) -> bool:
        """Whether elements are dropped: in training mode, at a rate above zero."""
        return not self.deterministic and self.rate > 0

    def keep(self, shape: tuple[int, ...]) -> Bool[Array, "..."] | None:
        """Returns the mask of an array of this shape, True = keep; None keeps everything."""
        if not self.active:
            return None
        keep = self._draw(shape) if self.keep_mask is None else self.keep_mask
        if self.recording:
            self.last_keep = keep
        return keep

    def keep_part(
        self, shape: tuple[int, ...], starts: Sequence[Int[Array, ""]], sizes: tuple[int, ...]
    ) -> Bool[Array, "..."] | None:
        """Returns a part of ``keep(shape)`` without making the whole; it is not recorded.

        Args:
            shape: of the whole array.
            starts: where the part begins along each dimension; may be unknown while tracing.
            sizes: the shape of the part.
        """
        if not self.active:
            return None
        if self.keep_mask is not None:
            return cut_part(self.keep_mask, starts, sizes)
        return self._draw(shape, (starts, sizes))

    def _draw(self, shape: tuple[int, ...], part: Part | None = None) -> Bool[Array, "..."]:
        if self.key is None:
            raise ValueError(
                "dropout in training mode needs a key: call jaxformer.seed_dropout(model, key)"
            )
        bits = random_bits(self.key, shape, self.first_row, part)
        return bits < np.uint32(min((1 - self.rate) * 2**32, 2**32 - 1))


def random_bits(
    key: Array,
    shape: tuple[int, ...],
    first_row: Int[Array, ""] | None = None,
    part: Part | None = None,
) -> UInt32[Array, "..."]:
    """Returns random 32-bit numbers: a hash of each element's index and the key's two words.

    Rows, along the first axis, count from ``first_row``: so the parts of a batch that several
    devices hold get what one device would draw for the whole. With ``part``, which is where a part
    begins and its shape, those of the part alone are made.

    For dropout, where speed counts more than what a test for random numbers can find: two rounds
    of MurmurHash3's 32-bit finaliser are 12 operations that fuse with their surroundings, where
    the 20 rounds of threefry behind ``jax.random.bits`` are over 100 and take a pass of their own.
    Elements 2³² apart in one array get the same number.
    """
    first, second = jax.random.key_data(key)
    strides = [np.uint32(math.prod(shape[axis + 1 :]) % 2**32) for axis in range(len(shape))]
    start = np.uint32(0) if first_row is None else first_row.astype(jnp.uint32)
    start = start * strides[0]
    if part is not None:
        places, shape = part
        for place, stride in zip(places, strides, strict=True):
            start = start + jnp.asarray(place).astype(jnp.uint32) * stride
    index = jnp.full(shape, start)
    for axis, stride in enumerate(strides):
        index = index + jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    return _mix(_mix(index ^ first) + second)


def _mix(x: UInt32[Array, "..."]) -> UInt32[Array, "..."]:
    """MurmurHash3's finaliser, a permutation in which every bit depends on every bit."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def dropout_modules(module: nnx.Module) -> dict[str, Dropout]:
    """Returns every ``Dropout`` of ``module`` by path: ``blocks.3.attention.attention_dropout``."""
    return {
        join_path(path): node
        for path, node in nnx.iter_modules(module)
        if isinstance(node, Dropout)
    }


def seed_dropout(
    module: nnx.Module, key: Array | None, first_row: Int[Array, ""] | None = None
) -> None:
    """Gives every ``Dropout`` its own key, a function of ``key`` and of its path only.

    A training step calls it with a new key before it calls the module: each draws other masks.

    Args:
        module: any.
        key: None takes the keys away.
        first_row: where in the whole batch the rows begin that the module is to see; None is 0.

    Raises:
        ValueError: the key is a number.
    """
    if isinstance(key, int):
        raise ValueError(f"key must be a random key: pass key=jax.random.key({key})")
    places = dropout_modules(module)
    keys: Iterable[Array | None] = [None] * len(places)
    if key is not None:
        names = np.array([zlib.crc32(path.encode()) for path in places], np.uint32)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, names)
    for dropout, own in zip(places.values(), keys, strict=True):
        dropout.key, dropout.first_row = own, first_row


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
