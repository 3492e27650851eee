"""Arrays in memory, torch's or numpy's, as tensors to read; torch itself is not imported."""

import sys
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxformer.porting.formats.tensors import StoredTensor


def to_stored_tensors(arrays: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Each array of a state dict, to be read when it is needed; tied ones share their storage."""
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
    """A copy of a torch tensor; numpy has no bfloat16, so its bits go over as integers."""
    array = array.detach().cpu().contiguous()
    if str(array.dtype) == "torch.bfloat16":
        return array.view(sys.modules["torch"].int16).numpy().view(ml_dtypes.bfloat16).copy()
    return array.numpy().copy()


def to_torch_like(neighbour: Any, array: np.ndarray) -> Any:
    """An array as a torch tensor of its own dtype, on the device of a tensor that is there."""
    torch = sys.modules["torch"]
    if array.dtype == ml_dtypes.bfloat16:
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor.to(neighbour.device)
