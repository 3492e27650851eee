"""Casts arrays to another float dtype, and measures the rounding errors."""

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from jaxformer.checkpoints import round_to, rounding_error
from jaxformer.errors import UsageError
from jaxformer.porting.formats.tensors import StoredTensor

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float64": np.dtype(np.float64),
}


def check_computes(tensors: Mapping[str, StoredTensor]) -> None:
    """Checks that a model computes in the dtypes of these weights.

    Raises:
        UsageError: some are of a narrower dtype, such as float8.
    """
    known = DTYPES.values()
    name = next((name for name, tensor in tensors.items() if tensor.dtype not in known), None)
    if name is not None:
        raise UsageError(
            f"unsupported: {name} is {tensors[name].dtype.name}, in which no model computes here: "
            "write it in another dtype with jaxformer port --dtype float32, and use that"
        )


def cast(
    tensors: Mapping[str, StoredTensor], dtype: np.dtype
) -> tuple[dict[str, StoredTensor], dict[str, float]]:
    """Returns arrays in another dtype, to be rounded when they are read.

    Args:
        tensors: arrays of floats by name.
        dtype: a float dtype.

    Returns:
        The arrays, and a dict that gets the largest rounding error of each when it is read.
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
        rounded = round_to(array, dtype)
        errors[name] = rounding_error(name, array, rounded)
        return rounded

    return dataclasses.replace(tensor, dtype=dtype, read=read)
