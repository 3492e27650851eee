"""Arrays in another dtype, on purpose, with what that costs."""

from collections.abc import Mapping

import numpy as np

from jaxformer.errors import CheckpointError

# Compared piece by piece, as the float64 of a whole array would take three times its memory.
PIECE = 1 << 20


class Cast:
    """Changes arrays of floats to the dtypes that they are to have.

    Args:
        dtypes: those, by name; other arrays are left as they are.

    Attributes:
        largest_error: of all numbers that were rounded.
        changed: how many arrays were changed, by their dtypes before and after.
    """

    def __init__(self, dtypes: Mapping[str, np.dtype]):
        self.dtypes = dtypes
        self.largest_error = 0.0
        self.changed: dict[tuple[str, str], int] = {}

    def __call__(self, name: str, array: np.ndarray) -> np.ndarray:
        """An array in the dtype that it is to have.

        Raises:
            CheckpointError: a number would become infinite.
        """
        dtype = self.dtypes.get(name, array.dtype)
        if dtype == array.dtype:
            return array
        rounded = round_to(array, dtype)
        self.largest_error = max(self.largest_error, rounding_error(name, array, rounded))
        kinds = array.dtype.name, dtype.name
        self.changed[kinds] = self.changed.get(kinds, 0) + 1
        return rounded

    def notes(self) -> list[str]:
        """What was done, in words."""
        return [
            f"cast {count} arrays from {before} to {after}: largest rounding error "
            f"{self.largest_error:.3g}"
            for (before, after), count in self.changed.items()
        ]


def round_to(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The array in another dtype of floats."""
    with np.errstate(over="ignore", under="ignore"):
        return array.astype(dtype)


def rounding_error(name: str, array: np.ndarray, rounded: np.ndarray) -> float:
    """The largest distance between the two; where both are not finite there is none.

    Raises:
        CheckpointError: a number has become infinite.
    """
    largest = 0.0
    before, after = array.reshape(-1), rounded.reshape(-1)
    for start in range(0, before.size, PIECE):
        exact = before[start : start + PIECE].astype(np.float64)
        found = after[start : start + PIECE].astype(np.float64)
        finite = np.isfinite(exact)
        if not np.isfinite(found[finite]).all():
            raise CheckpointError(
                f"{name} holds {np.abs(exact[finite]).max():.3g}, more than {rounded.dtype} can "
                "hold: choose bfloat16, float32 or float64"
            )
        if finite.any():
            largest = max(largest, float(np.abs(exact[finite] - found[finite]).max()))
    return largest
