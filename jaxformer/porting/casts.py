"""Arrays in another dtype, on purpose, with what that costs."""

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from jaxformer.errors import CheckpointError
from jaxformer.porting.tensors import StoredTensor

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float64": np.dtype(np.float64),
}
# Compared piece by piece, as the float64 of a whole array would take three times its memory.
PIECE = 1 << 20


def cast(
    tensors: Mapping[str, StoredTensor], dtype: np.dtype
) -> tuple[dict[str, StoredTensor], dict[str, float]]:
    """Arrays as they are in another dtype, to be rounded when they are read.

    Args:
        tensors: floats.
        dtype: floats too.

    Returns:
        The arrays, and the largest rounding error of each that was read, which fills as they are.
    """
    errors: dict[str, float] = {}
    return {name: _rounded(name, tensor, dtype, errors) for name, tensor in tensors.items()}, errors


def _rounded(
    name: str, tensor: StoredTensor, dtype: np.dtype, errors: dict[str, float]
) -> StoredTensor:
    if tensor.dtype == dtype:
        return tensor

    def read() -> np.ndarray:
        array = tensor.read()
        with np.errstate(over="ignore", under="ignore"):
            rounded = array.astype(dtype)
        errors[name] = _largest_error(name, array, rounded)
        return rounded

    return dataclasses.replace(tensor, dtype=dtype, read=read)


def _largest_error(name: str, array: np.ndarray, rounded: np.ndarray) -> float:
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
