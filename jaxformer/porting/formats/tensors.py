"""Arrays that are read from a file only when needed, so that a port holds one at a time."""

import dataclasses
import hashlib
import math
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence

import ml_dtypes
import numpy as np

from jaxformer.errors import CheckpointError, UnsafeFileError
from jaxformer.storage.local_files import LocalFile, safe_repr

# numpy stops at 64 axes; no weight comes near.
MAX_AXES = 32
MAX_BYTES = 2**62


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """An array that can be read when it is needed.

    Args:
        shape: of the array.
        dtype: in native byte order; ``ml_dtypes.bfloat16`` for bfloat16.
        read: returns the array, C-contiguous, in native byte order, owned by the caller. It raises
            CheckpointError if the file is damaged or has changed since it was opened, and
            ResourceError if it cannot be read or there is not enough memory.
        storage: two tensors with the same storage, other than None, are tied: the same elements.
            Tensors that share memory in another way (a weight and its transpose) do not have the
            same storage.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray] = dataclasses.field(repr=False)
    storage: Hashable = None

    @property
    def nbytes(self) -> int:
        """The size of the array, in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, array: np.ndarray, storage: Hashable = None) -> "StoredTensor":
        """Returns an array in memory as a stored tensor; each ``read`` gives a copy."""
        array = np.asarray(array)
        return cls(array.shape, array.dtype.newbyteorder("="), _InMemory(array), storage)


@dataclasses.dataclass(frozen=True)
class _InMemory:
    """Reads an array that is in memory, or a view of it for a conversion."""

    array: np.ndarray

    def __call__(self) -> np.ndarray:
        return np.array(self.array, self.array.dtype.newbyteorder("="), order="C")

    def view(self) -> np.ndarray:
        view = self.array.view()
        view.flags.writeable = False
        return view.astype(view.dtype.newbyteorder("="), copy=False)


@dataclasses.dataclass(frozen=True)
class Written:
    """What a file was found to hold when it was read back.

    Attributes:
        digests: the SHA-256 of each tensor's bytes, by its name or place.
        sha256: that of the whole file.
    """

    digests: Mapping[str, str]
    sha256: str


def as_bytes(array: np.ndarray) -> memoryview:
    """Returns the bytes of a C-contiguous array as a file holds them: little-endian, not copied."""
    if sys.byteorder == "big":
        array = array.byteswap()
    return array.reshape(-1).view(np.uint8).data


def digest(array: np.ndarray) -> str:
    """Returns the SHA-256 of an array's bytes."""
    return hashlib.sha256(as_bytes(array)).hexdigest()


def read_checked(tensor: StoredTensor, name: str) -> np.ndarray:
    """Reads a tensor, and checks the shape, dtype and layout of the array.

    Raises:
        ValueError: ``read`` gave another shape, dtype or layout than the tensor announces.
    """
    array = tensor.read()
    found = (array.shape, array.dtype, array.flags.c_contiguous)
    if found != (tensor.shape, tensor.dtype, True):
        raise ValueError(
            f"{name} must be read as a C-contiguous {tensor.dtype} array of shape {tensor.shape}: "
            f"got {array.dtype} of shape {array.shape}"
        )
    return array


def from_bytes(data: np.ndarray, dtype: np.dtype, where: str) -> np.ndarray:
    """Returns little-endian bytes as a flat array of ``dtype``, not copied.

    Args:
        data: uint8.
        dtype: of the result.
        where: what the bytes are, for the message.

    Raises:
        CheckpointError: a boolean is neither 0 nor 1.
    """
    # numpy takes any other byte for a third truth value, which compares equal to neither.
    if dtype == np.bool_ and data.size and data.max() > 1:
        raise CheckpointError(
            f"{where} is damaged: a boolean is neither 0 nor 1; fetch the file again"
        )
    array = data.view(dtype)
    return array.byteswap() if sys.byteorder == "big" else array


def check_shape(shape: Sequence[object], dtype: np.dtype, where: str) -> tuple[int, ...]:
    """Returns the shape, if an array can have it.

    Args:
        shape: as a file gives it.
        dtype: of the array.
        where: what has the shape, for the message.

    Raises:
        CheckpointError: a size is negative or not an integer.
        UnsafeFileError: there are more axes or elements than any array can have.
    """
    sizes = [size for size in shape if type(size) is int and size >= 0]
    if len(sizes) != len(shape):
        raise CheckpointError(
            f"{where} is damaged: its shape is {safe_repr(shape)}, where every size must be an "
            "integer of at least 0; fetch the file again"
        )
    # An empty array can have any sizes beside its zero, but numpy multiplies those too.
    if len(sizes) > MAX_AXES or math.prod(s or 1 for s in sizes) * dtype.itemsize > MAX_BYTES:
        raise UnsafeFileError(
            f"{where} claims the shape {safe_repr(shape)}, which no array can have; "
            "do not use this file"
        )
    return tuple(sizes)


def file_tensor(
    file: LocalFile, where: str, shape: tuple[int, ...], dtype: np.dtype, offset: int
) -> StoredTensor:
    """Returns a tensor whose elements lie in a file one after the other.

    Args:
        file: holds it.
        where: what it is called, for messages.
        shape: already checked against the file's size.
        dtype: of its elements.
        offset: of the first element, in bytes.
    """

    def read() -> np.ndarray:
        data = file.array(offset, math.prod(shape) * dtype.itemsize)
        return from_bytes(data, dtype, where).reshape(shape)

    return StoredTensor(shape, dtype, read)


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT8_E4M3FN = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_E4M3FNUZ = np.dtype(ml_dtypes.float8_e4m3fnuz)
FLOAT8_E5M2 = np.dtype(ml_dtypes.float8_e5m2)
FLOAT8_E5M2FNUZ = np.dtype(ml_dtypes.float8_e5m2fnuz)
FLOAT8_E8M0FNU = np.dtype(ml_dtypes.float8_e8m0fnu)
