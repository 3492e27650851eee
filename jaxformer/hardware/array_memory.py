"""Memory for large arrays that stay, such as a model's parameters, in pages of 2 MiB.

A processor finds the page of an address in a small table. The rows of a matrix of 1 MiB lie on 256
pages of 4 KiB: more time goes to looking them up than to reading them, when text is written and all
parameters are read for each token. In pages of 2 MiB they are read 1.3 to 1.6 times as fast.

The C library requests such pages only for arrays that fill one (``huge_pages``), and a model has
many smaller ones. Here they lie one after the other.
"""

import contextlib
import math
import mmap
from collections.abc import Sequence

import jax
import numpy as np
from numpy.typing import DTypeLike

PAGE_BYTES = 2**21
# Of what is mapped, only pages that are written to take memory.
MAPPED_BYTES = 2**25
# XLA uses an array of numpy as it lies if it begins at a multiple of this.
ALIGNMENT = 64
# Smaller arrays are few pages anyhow.
LEAST_BYTES = 2**15


class ArrayMemory:
    """Memory for arrays that are made one after the other and dropped together.

    An array keeps what it lies in: memory is given back when all arrays in the same part, of
    ``MAPPED_BYTES`` or of one larger array, are gone.
    """

    def __init__(self) -> None:
        """Requests nothing yet."""
        self._rest = np.empty(0, np.uint8)

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> np.ndarray:
        """Returns an array with arbitrary numbers, which XLA on CPUs can use without a copy.

        Raises:
            MemoryError: there is none.
        """
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size > len(self._rest):
            self._rest = _map(max(size, MAPPED_BYTES))
        array = self._rest[:size].view(dtype).reshape(shape)
        self._rest = self._rest[-(-size // ALIGNMENT) * ALIGNMENT :]
        return array


def is_worth_pages(num_bytes: int) -> bool:
    """Returns whether an array of so many bytes, on JAX's default device, should lie here."""
    return num_bytes >= LEAST_BYTES and _default_platform() == "cpu"


def _default_platform() -> str:
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if device is None:
        return jax.default_backend()
    return device if isinstance(device, str) else device.platform


def _map(size: int) -> np.ndarray:
    try:
        mapped = mmap.mmap(-1, size + PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for arrays of {size} bytes") from error
    # Without such pages the arrays are as right.
    with contextlib.suppress(AttributeError, OSError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(mapped, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES
    return memory[start : start + size]
