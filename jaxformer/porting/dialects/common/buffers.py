"""Buffers: source arrays that are not parameters, and how jaxformer computes them."""

from collections.abc import Callable
from typing import Any

import numpy as np
from flax import nnx

from jaxformer.porting.mapping.adapter import Buffer
from jaxformer.porting.mapping.packings import Shape
from jaxformer.porting.mapping.position_tables import install_table
from jaxformer.positions import Rotary, SinusoidalPositions
from jaxformer.transformer_lm import TransformerLM


def inverse_frequencies(module: TransformerLM, shape: Shape | None) -> np.ndarray | None:
    """Returns the buffer of rotary frequencies that older checkpoints hold in every layer."""
    position = module.blocks[0].attention.position
    if not isinstance(position, Rotary):
        return None
    exponent = np.arange(0, position.width, 2) / position.width
    return np.asarray(1 / position.base**exponent, np.float32)


def causal_mask(module: TransformerLM, shape: Shape | None) -> np.ndarray:
    """Returns the buffer (1, 1, S, S) of the causal mask that older checkpoints hold."""
    length = module.config.context_length
    return np.tril(np.ones((1, 1, length, length), np.bool_))


def position_ids(source: str, *, of: str = "") -> Buffer:
    """Returns the buffer (1, T) of positions from 0 that older checkpoints hold.

    Args:
        source: its name.
        of: which of the target's modules it belongs to, where that is not the whole.
    """

    def values(module: Any, shape: Shape | None) -> np.ndarray:
        owner = getattr(module, of) if of else module
        return np.arange(owner.config.context_length)[None]

    return Buffer(source, values, written=False)


def masked_score(value: float) -> Callable[[TransformerLM, Shape | None], np.ndarray]:
    """Returns the values of the buffer that holds the score of a masked position."""
    return lambda module, shape: np.array(value, np.float32)


def sinusoid_buffer(source: str) -> Buffer:
    """Returns the buffer (1, max_length, D) of sinusoids, or of a model that has them."""

    def values(module: Any, shape: Shape | None) -> np.ndarray | None:
        rows = _sinusoidal(module)
        return None if rows is None else rows.rows()[None]

    def install(module: Any, array: np.ndarray) -> None:
        install_table([_sinusoidal(module)], "table", array)

    return Buffer(source, values, install=install)


def _sinusoidal(module: Any) -> SinusoidalPositions | None:
    positions = getattr(module, "position_embedding", module)
    return positions if isinstance(positions, SinusoidalPositions) else None


def rotary_table_buffers(cos: str, sin: str) -> tuple[Buffer, Buffer]:
    """Returns the buffers (1, 1, max_length, width / 2) of cosines and sines."""

    def buffer(source: str, place: int, attribute: str) -> Buffer:
        def values(module: Any, shape: Shape | None) -> np.ndarray | None:
            found = rotaries(module)
            return found[0].tables()[place][None, None] if found else None

        def install(module: Any, array: np.ndarray) -> None:
            install_table(rotaries(module), attribute, array)

        return Buffer(source, values, install=install)

    return buffer(cos, 0, "cos"), buffer(sin, 1, "sin")


def rotaries(module: Any) -> list[Rotary]:
    """Returns the rotary positions of all layers."""
    return [node for _, node in nnx.iter_modules(module) if isinstance(node, Rotary)]
