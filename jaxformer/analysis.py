"""What a model does inside, as numpy arrays and plain dicts that are equal in JAX and torch.

Modules are called in the mode they are in: ``module.eval()`` beforehand leaves dropout out.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxformer.blocks import BLOCKS, Block
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.execution.seeds import seed_key
from jaxformer.initializers import initialize
from jaxformer.layers import widen
from jaxformer.masks import causal_mask, combine_masks, padding_mask_from_lengths, window_mask
from jaxformer.parameters import get_parameters, join_path, set_parameters
from jaxformer.positions import (
    ALiBi,
    LearnedPositions,
    NoPositions,
    RelativeBuckets,
    RelativePositions,
    Rotary,
    SinusoidalPositions,
    rotary_tables,
)

INITIALIZATIONS = ("xavier_uniform", "kaiming_uniform", "normal")


def attention_maps(
    module: nnx.Module,
    *inputs: Array,
    layer: int | None = None,
    head: int | Literal["mean"] | None = None,
    mask: Bool[Array, "B N T S"] | None = None,
) -> Float[np.ndarray, "..."]:
    """Returns the weights that self-attention applied to its values (after dropout).

    Args:
        module: a model, an encoder, a decoder, a block or an attention: what takes
            ``return_weights``. The last two count as one layer.
        inputs: what the module is called with: tokens (B, T) for a model.
        layer: which layer; None keeps all of them, as the first axis L.
        head: which head; None keeps all of them, as the axis N; "mean" averages them.
        mask: see ``MultiHeadAttention``.

    Returns:
        Weights (L, B, N, T, S), less the axes chosen from, in float32 or wider; over S they sum
        to 1, or to 0 where no key is allowed.

    Raises:
        ValueError: there is no such layer or head.
    """
    weights = _weights(module, inputs, mask)
    return _stack_maps(weights if isinstance(weights, list) else [weights], layer, head)


def sequence_attention_maps(
    module: EncoderDecoder,
    source: Int[Array, "B S"],
    target: Int[Array, "B T"],
    *,
    layer: int | None = None,
    head: int | Literal["mean"] | None = None,
    memory_mask: Bool[Array, "B N T S"] | None = None,
) -> dict[str, Float[np.ndarray, "..."]]:
    """Returns the weights of the three kinds of attention in an encoder and decoder, by kind.

    Args:
        module: the model.
        source: ids of the source.
        target: ids of the target.
        layer: which layer of each stack; see ``attention_maps``.
        head: see ``attention_maps``.
        memory_mask: of the cross-attention.

    Returns:
        Maps as those of ``attention_maps``: ``encoder`` (S queries, S keys), ``decoder`` (T, T) and
        ``cross`` (T, S).

    Raises:
        ValueError: a stack has no such layer or head.
    """
    found = _sequence_weights(module, source, target, memory_mask)
    return {kind: _stack_maps(weights, layer, head) for kind, weights in found.items()}


def _stack_maps(
    layers: Sequence[Array], layer: int | None, head: int | Literal["mean"] | None
) -> Float[np.ndarray, "..."]:
    maps_LBNTS = np.stack([np.asarray(widen(weights_BNTS)) for weights_BNTS in layers])
    maps = maps_LBNTS.mean(axis=2) if head == "mean" else _pick(maps_LBNTS, 2, head, "head")
    return _pick(maps, 0, layer, "layer")


def gradient_norms(module: nnx.Module, *inputs: Array) -> dict[str, float]:
    """Returns the Euclidean norm of the gradient of sum(output), for every parameter.

    Where the output is a layer norm's own, that sum does not depend on what came before it: the
    norms are then zero but for rounding.

    Args:
        module: anything whose output is one array.
        inputs: what it is called with.
    """
    definition, state, *rest = nnx.split(module, nnx.Param, ...)

    def total(state: Any) -> Float[Array, ""]:
        return jnp.sum(widen(nnx.merge(definition, state, *rest)(*inputs)))

    gradients = nnx.to_flat_state(jax.jit(jax.grad(total))(state))
    return {
        join_path(path): float(np.linalg.norm(np.asarray(gradient[...], np.float64)))
        for path, gradient in gradients
    }


def output_statistics(output: Float[Array | np.ndarray, "..."]) -> dict[str, float]:
    """Returns mean, std, min and max of all elements.

    The standard deviation is that of the population: divided by the count, not by one less.
    """
    values = np.asarray(output, np.float64)
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": float(values.min()),
        "max": float(values.max()),
    }


@contextlib.contextmanager
def reinitialized(module: nnx.Module, scheme: str, seed: int) -> Iterator[None]:
    """Gives the module fresh weights by ``initialize``, with zero biases, within the context.

    Args:
        module: gets its own weights back at the end.
        scheme: ``xavier_uniform``, ``kaiming_uniform`` or ``normal`` (std 0.02), of every parameter
            of two or more dimensions.
        seed: of the draw, which is not that of the other framework.

    Raises:
        ValueError: the scheme is none of these.
    """
    if scheme not in INITIALIZATIONS:
        raise ValueError(f"scheme must be one of {', '.join(INITIALIZATIONS)}: got {scheme!r}")
    before = get_parameters(module)
    try:
        initialize(module, scheme, 1, nnx.Rngs(seed_key(seed)))
        fresh = get_parameters(module)
        set_parameters(
            module,
            {
                name: jnp.zeros_like(old)
                if name.rpartition(".")[2] == "bias"
                else fresh[name].astype(old.dtype)
                for name, old in before.items()
            },
        )
        yield
    finally:
        set_parameters(module, before)


def initialization_comparison(
    module: nnx.Module, *inputs: Array, seed: int = 0
) -> dict[str, dict[str, float]]:
    """Returns ``output_statistics`` of the module by scheme, with new weights for each.

    Args:
        module: anything whose output is one array; it is left as it was.
        inputs: what it is called with.
        seed: see ``reinitialized``, which also names the schemes.
    """
    results = {}
    for scheme in INITIALIZATIONS:
        with reinitialized(module, scheme, seed):
            results[scheme] = output_statistics(_output(module, inputs))
    return results


def depth_statistics(
    blocks: Sequence[Block],
    x: Float[Array, "B T D"],
    mask: Bool[Array, "B N T S"] | None = None,
) -> dict[str, Float[np.ndarray, "L+1"]]:
    """Returns ``output_statistics`` of the residual stream, before and after each block."""
    statistics = [output_statistics(x)]
    for block in blocks:
        x = block(x, mask)
        statistics.append(output_statistics(x))
    return {name: np.array([one[name] for one in statistics]) for name in statistics[0]}


def norm_order_comparison(
    blocks: Sequence[Block],
    x: Float[Array, "B T D"],
    mask: Bool[Array, "B N T S"] | None = None,
) -> dict[str, dict[str, Float[np.ndarray, "L+1"]]]:
    """Returns ``depth_statistics`` of the same parts as pre-norm and as post-norm blocks.

    Fresh layer norms end a post-norm block, so its output has a standard deviation of 1 (but for
    eps) at every depth; a pre-norm block adds to the stream, which grows (arXiv 2002.04745).

    Args:
        blocks: whose attentions, feed-forwards and norms are used; without cross-attention.
        x: the residual stream before the first.
        mask: who may attend to whom.

    Raises:
        ValueError: a block has cross-attention.
    """
    if any(block.cross_attention is not None for block in blocks):
        raise ValueError("norm orders are compared for blocks without cross-attention")
    return {
        order: depth_statistics([_reordered(block, order) for block in blocks], x, mask)
        for order in ("pre_norm", "post_norm")
    }


def _reordered(block: Block, order: str) -> Block:
    """Returns a block around the same parts as another."""
    result = BLOCKS[order](
        block.attention,
        block.feed_forward,
        block.attention_norm,
        block.feed_forward_norm,
        attention_output_norm=block.attention_output_norm,
        feed_forward_output_norm=block.feed_forward_output_norm,
    )
    result.attention_residual_dropout = block.attention_residual_dropout
    result.feed_forward_residual_dropout = block.feed_forward_residual_dropout
    return result


def position_tables(*schemes: nnx.Module | None, length: int) -> dict[str, np.ndarray]:
    """Returns the tables of position schemes for ``length`` positions, by name.

    - ``learned``, ``sinusoidal``: rows (T, D) that are added to embeddings.
    - ``rotary_cos``, ``rotary_sin``: (T, half the turned width), of a pair of dimensions each.
    - ``alibi``: bias (N, T, T) of a query, in rows, for a key, in columns.
    - ``relative``: rows (2R + 1, H), from the key R before the query to that R after it.

    Args:
        schemes: a model's ``position_embedding``, its attentions' ``position``, or any other;
            None and ``NoPositions`` have no table.
        length: T, in tokens.

    Raises:
        ValueError: a scheme's own table is shorter than ``length``, or it is of another class.
    """
    tables: dict[str, Any] = {}
    for scheme in schemes:
        if isinstance(scheme, LearnedPositions):
            tables["learned"] = widen(scheme(length)[0])
        elif isinstance(scheme, SinusoidalPositions):
            tables["sinusoidal"] = scheme(length)[0]
        elif isinstance(scheme, Rotary):
            settings = (scheme.max_length, scheme.width, scheme.base, scheme.scaling)
            rows = rotary_tables(*settings, length)
            tables["rotary_cos"], tables["rotary_sin"] = (table[:length] for table in rows)
        elif isinstance(scheme, ALiBi):
            slots_T = jnp.arange(length)
            distance_TS = slots_T[None, :] - slots_T[:, None]
            tables["alibi"] = scheme.bias(jnp.zeros((1, length, 1, 1)), distance_TS)[0]
        elif isinstance(scheme, RelativeBuckets):
            tables["relative_buckets"] = widen(scheme.embedding[...])
        elif isinstance(scheme, RelativePositions):
            tables["relative"] = widen(scheme.embedding[...])
        elif scheme is not None and type(scheme) is not NoPositions:
            raise ValueError(f"{type(scheme).__name__} is not a position scheme with a table")
    arrays = {name: np.array(table) for name, table in tables.items()}
    for name, array in arrays.items():
        if not name.startswith("relative") and array.shape[-2] < length:
            raise ValueError(f"{name} positions end at {array.shape[-2]}: got length={length}")
    return arrays


def mask_tables(
    length: int, *, window: int, lengths: Sequence[int]
) -> dict[str, Bool[np.ndarray, "B T T"]]:
    """Returns the causal, window, padding and ``combined`` masks, each bool (B, T, T).

    Args:
        length: T, in tokens.
        window: how many tokens a position sees on each side, itself included.
        lengths: how many tokens of each row are not padding.
    """
    masks = {
        "causal": causal_mask(length),
        "window": window_mask(length, None, window),
        "padding": padding_mask_from_lengths(jnp.asarray(lengths), length),
    }
    masks["combined"] = combine_masks(*masks.values())  # type: ignore[assignment]
    shape = (len(lengths), length, length)
    return {
        name: np.broadcast_to(np.asarray(mask)[:, 0], shape).copy() for name, mask in masks.items()
    }


@nnx.jit
def _output(module: Any, inputs: tuple[Array, ...]) -> Any:
    return module(*inputs)


@nnx.jit
def _weights(module: Any, inputs: tuple[Array, ...], mask: Any) -> Any:
    return module(*inputs, mask=mask, return_weights=True)[1]


@nnx.jit
def _sequence_weights(module: Any, source: Any, target: Any, memory_mask: Any) -> Any:
    return module.attention_weights(source, target, memory_mask=memory_mask)


def _pick(maps: np.ndarray, axis: int, index: int | None, name: str) -> np.ndarray:
    if index is None:
        return maps
    count = maps.shape[axis]
    if not 0 <= index < count:
        raise ValueError(f"{name} must be in [0, {count}): got {index}")
    return np.take(maps, index, axis=axis)
