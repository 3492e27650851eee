"""Memory that was freed and is still held."""

import ctypes
import sys

# How many parameters a model has that memory has to be kept for.
LARGE = 1 << 24


def release(size: int) -> None:
    """Gives freed memory back to the system, after a copy of a model of ``size`` parameters.

    glibc keeps what was freed in arrays of up to 32 MB, and a model in float64 is many of these: of
    GPT-2 it would hold two copies while a third is made.
    """
    if size <= LARGE or sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
