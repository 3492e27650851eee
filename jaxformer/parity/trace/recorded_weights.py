"""Attention weights as they are kept: all of them would be a good part of a pass's memory."""

import dataclasses

import numpy as np

# Of longer sequences a map shows the beginning.
MAP_LENGTH = 64


@dataclasses.dataclass(frozen=True)
class RecordedWeights:
    """Weights (B, N, T, S) of which a map can be drawn.

    Attributes:
        shape: of all of them.
        beginning: of the first example, for up to 64 queries and keys.
    """

    shape: tuple[int, ...]
    beginning: np.ndarray

    @classmethod
    def of(cls, weights: np.ndarray) -> "RecordedWeights":
        """What is kept of these."""
        beginning = np.array(weights[0, :, :MAP_LENGTH, :MAP_LENGTH])
        return cls(tuple(weights.shape), beginning)
