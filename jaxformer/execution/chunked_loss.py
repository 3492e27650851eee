"""The loss of a model with a large vocabulary, without all of its logits in memory at once."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.execution.gpu_shapes import filled_columns, is_for_cuda
from jaxformer.execution.sharding import current_layout

# The most logits that are made at a time, in bytes; those of one position are made in any case.
LOGITS_AT_ONCE = 2**28
# On a GPU, whose products want more rows, and where the gradients of the weights, which are added
# up anew for each part, cost as much time as the logits themselves.
LOGITS_AT_ONCE_ON_GPU = 2**31

# Logits (B, T, W) and targets (B, T) to the loss of each token (B, T). The keyword ``num_classes``
# says how many of the W columns are logits; see ``filled_columns``.
TokenLosses = Callable[..., Array]


def average_losses(
    token_losses: TokenLosses,
    head: Callable[[Float[Array, "B T D"]], Float[Array, "B T V"]],
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    shares: Float[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """Returns the mean of ``token_losses(head(hidden), targets)``, with few logits at a time.

    Where all logits would take more than ``LOGITS_AT_ONCE``, those of some positions are made at a
    time, and gradients with them, so that none are kept for the backward pass and none are made
    twice (as in Liger Kernel's fused loss, Hsu et al., arXiv 2410.10989). The gradients of weights
    add up in float32 or wider. Under a layout over many devices all logits are made at once.

    Args:
        token_losses: from logits and targets to the loss of each token (B, T).
        head: from states to logits, each position by itself; what it closes over is differentiated
            too.
        hidden: states of a model's last block.
        targets: ids.
        shares: what each loss is multiplied by before all are added up, in place of their mean;
            nothing is differentiated with respect to them.
    """
    logits = jax.eval_shape(head, hidden)
    batch, length, vocabulary = logits.shape
    size = positions_at_once(batch, length, vocabulary, logits.dtype.itemsize)
    if current_layout() is not None:
        return _average(token_losses(head(hidden), targets), shares)
    token_losses = functools.partial(token_losses, num_classes=vocabulary)
    with filled_columns():
        if size == length:
            return _average(token_losses(head(hidden), targets), shares)
        closed, weights = jax.closure_convert(head, hidden[:, :size])
    return _average_in_chunks(token_losses, closed, size, hidden, targets, shares, weights)


def _average(losses: Float[Array, "B T"], shares: Float[Array, "B T"] | None) -> Float[Array, ""]:
    return jnp.mean(losses) if shares is None else jnp.sum(losses * shares.astype(losses.dtype))


def positions_at_once(batch: int, length: int, vocabulary: int, itemsize: int) -> int:
    """Returns for how many positions ``average_losses`` makes logits at a time.

    ``itemsize`` is that of one logit, in bytes.

    >>> positions_at_once(8, 1024, 50257, 4)
    147
    """
    most = LOGITS_AT_ONCE_ON_GPU if is_for_cuda() else LOGITS_AT_ONCE
    chunks = math.ceil(batch * length * vocabulary * itemsize / most)
    size = math.ceil(length / max(1, chunks))
    # Products with a power of two of rows keep all of a GPU busy to their end.
    return 2 ** int(math.log2(size)) if is_for_cuda() and size < length else size


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _average_in_chunks(
    token_losses: TokenLosses,
    head: Callable[..., Array],
    size: int,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    shares: Float[Array, "B T"] | None,
    weights: list[Array],
) -> Float[Array, ""]:
    """The mean loss, ``size`` positions at a time; ``head`` takes ``weights`` after the states."""
    return _loss_and_gradients(token_losses, head, size, hidden, targets, shares, weights)[0]


def _loss_and_gradients(
    token_losses: TokenLosses,
    head: Callable[..., Array],
    size: int,
    hidden: Float[Array, "B T D"],
    targets: Int[Array, "B T"],
    shares: Float[Array, "B T"] | None,
    weights: list[Array],
) -> tuple[Float[Array, ""], tuple[Float[Array, "B T D"], list[Array]]]:
    """The loss, and its gradients with respect to ``hidden`` and ``weights``."""
    batch, length, width = hidden.shape
    divisor = float(batch * length) if shares is None else 1.0

    def add(
        sums: tuple[Array, list[Array]], chunk: tuple[Array, Array, Array]
    ) -> tuple[tuple[Array, list[Array]], Array]:
        def loss(states: Array, weights: list[Array]) -> Array:
            losses = token_losses(head(states, *weights), chunk[1])
            return jnp.sum(losses * chunk[2].astype(losses.dtype)) / divisor

        value, (of_states, of_weights) = jax.value_and_grad(loss, (0, 1))(chunk[0], weights)
        return jax.tree.map(jnp.add, sums, (value, of_weights)), of_states

    def cut(x: Array) -> Array:
        """Chunks of ``size`` positions, the last filled up with the last position."""
        filled = jnp.pad(x, ((0, 0), (0, -length % size), *[(0, 0)] * (x.ndim - 2)), mode="edge")
        return jnp.moveaxis(filled.reshape(batch, -1, size, *x.shape[2:]), 1, 0)

    kept = jnp.arange(length + -length % size).reshape(-1, 1, size) < length
    if shares is not None:
        kept = cut(shares) * kept
    start = [jnp.zeros(w.shape, jnp.promote_types(w.dtype, jnp.float32)) for w in weights]
    zero = jnp.zeros((), jnp.promote_types(hidden.dtype, jnp.float32))
    (value, of_weights), of_hidden = jax.lax.scan(
        add, (zero, start), (cut(hidden), cut(targets), kept)
    )
    of_hidden = jnp.moveaxis(of_hidden, 0, 1).reshape(batch, -1, width)[:, :length]
    return value, (of_hidden, [g.astype(w.dtype) for g, w in zip(of_weights, weights, strict=True)])


def _scale_gradients(
    token_losses: TokenLosses,
    head: Callable[..., Array],
    size: int,
    gradients: Any,
    cotangent: Float[Array, ""],
) -> tuple[Array, None, None, list[Array]]:
    of_hidden, of_weights = jax.tree.map(lambda g: (g * cotangent).astype(g.dtype), gradients)
    return of_hidden, None, None, of_weights


_average_in_chunks.defvjp(_loss_and_gradients, _scale_gradients)
