"""Memory that was freed and is still held."""

import ctypes
import sys

# How many parameters a model has that memory has to be kept for, and how many a notable one of its
# arrays.
LARGE, NOTABLE = 1 << 24, 1 << 20


def release(size: int, least: int = LARGE) -> None:
    """Gives freed memory back to the system, where it is of more than ``least`` numbers.

    glibc keeps what was freed in arrays of up to 32 MB, and has no use for it where the next array
    is aligned and just as large. A model in float64 is many of these: of GPT-2 it would hold two
    copies while a third is made.
    """
    if size <= least or sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
