"""Returning freed memory to the system between the passes of large models."""

import ctypes
import sys

# Numbers of parameters: of a model for which memory must be saved, and of one of its arrays that is
# worth a call of ``malloc_trim``.
LARGE, NOTABLE = 1 << 24, 1 << 20


def release(size: int, least: int = LARGE) -> None:
    """Returns freed memory to the system if it held more than ``least`` numbers.

    glibc keeps freed arrays of up to 32 MB, and cannot reuse them where the next array is aligned
    and just as large. A model in float64 is many such arrays: of GPT-2, two copies would stay in
    memory while a third is made.
    """
    if size <= least or sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
