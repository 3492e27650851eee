"""Arrays in memory, torch's or numpy's, as stored tensors, without importing torch.

Where there is a torch tensor, the program has imported torch already.
"""

import sys
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxformer.porting.formats.tensors import StoredTensor


def to_stored_tensors(arrays: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Returns the arrays of a state dict as stored tensors; tied arrays have the same storage."""
    return {name: _tensor(array) for name, array in arrays.items()}


def _tensor(array: Any) -> StoredTensor:
    if isinstance(array, StoredTensor):
        return array
    if not hasattr(array, "untyped_storage"):
        return StoredTensor.of(np.asarray(array))
    dtype = str(array.dtype).removeprefix("torch.")
    return StoredTensor(
        tuple(array.shape),
        np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype),
        lambda: _from_torch(array),
        (array.untyped_storage().data_ptr(), array.storage_offset(), array.stride()),
    )


def _from_torch(array: Any) -> np.ndarray:
    """Returns a copy of a torch tensor; bfloat16 is copied as integers, as numpy lacks it."""
    array = array.detach().cpu().contiguous()
    if str(array.dtype) == "torch.bfloat16":
        return array.view(sys.modules["torch"].int16).numpy().view(ml_dtypes.bfloat16).copy()
    return array.numpy().copy()


def to_torch_like(other: Any, array: np.ndarray) -> Any:
    """Returns an array as a torch tensor of the same dtype, on the device of another tensor."""
    torch = sys.modules["torch"]
    if array.dtype == ml_dtypes.bfloat16:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor.to(other.device)
