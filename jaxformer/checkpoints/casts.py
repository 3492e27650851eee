"""Changes the dtypes of arrays on request and measures the rounding errors."""

from collections.abc import Mapping

import numpy as np

from jaxformer.errors import CheckpointError

# Elements compared at a time: a whole array in float64 would take three times its memory.
CHUNK = 1 << 20


class Cast:
    """Changes arrays of floats to given dtypes and remembers what that rounded.

    Args:
        dtypes: of arrays, by name; other arrays are left as they are.

    Attributes:
        largest_error: the largest rounding error of any number so far.
        changed: how many arrays were changed, by their dtypes before and after.
    """

    def __init__(self, dtypes: Mapping[str, np.dtype]):
        self.dtypes = dtypes
        self.largest_error = 0.0
        self.changed: dict[tuple[str, str], int] = {}

    def __call__(self, name: str, array: np.ndarray) -> np.ndarray:
        """Returns an array in its new dtype.

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
        """Returns what was changed, a line for each pair of dtypes."""
        return [
            f"cast {count} arrays from {before} to {after}: largest rounding error "
            f"{self.largest_error:.3g}"
            for (before, after), count in self.changed.items()
        ]


def round_to(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns the array in another dtype of floats; what is too large becomes infinite."""
    with np.errstate(over="ignore", under="ignore"):
        return array.astype(dtype)


def rounding_error(name: str, array: np.ndarray, rounded: np.ndarray) -> float:
    """Returns the largest distance between an array and its rounded copy, of finite numbers.

    Raises:
        CheckpointError: a number has become infinite.
    """
    largest = 0.0
    before, after = array.reshape(-1), rounded.reshape(-1)
    for start in range(0, before.size, CHUNK):
        exact = before[start : start + CHUNK].astype(np.float64)
        found = after[start : start + CHUNK].astype(np.float64)
        finite = np.isfinite(exact)
        if not np.isfinite(found[finite]).all():
            raise CheckpointError(
                f"{name} holds {np.abs(exact[finite]).max():.3g}, more than {rounded.dtype} can "
                "hold: choose bfloat16, float32 or float64"
            )
        if finite.any():
            largest = max(largest, float(np.abs(exact[finite] - found[finite]).max()))
    return largest
