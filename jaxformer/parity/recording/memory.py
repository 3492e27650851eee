"""Returning freed memory to the system between the passes of large models."""

import gc

from jaxformer.hardware.memory import release_freed

# Number of parameters of a model for which memory must be saved.
LARGE = 1 << 24


def release(size: int) -> None:
    """Returns freed memory to the system if it was that of a large model, of so many numbers.

    glibc keeps freed arrays of up to 32 MB, and cannot reuse them where the next array is aligned
    and just as large. A model in float64 is many such arrays: of GPT-2, two copies would stay in
    memory while a third is made.
    """
    if size > LARGE:
        release_freed()


def free_records(size: int) -> None:
    """Frees what was recorded of a large model, of so many numbers, and is not needed any more.

    Operators and values refer to each other, so that only Python's collector frees them.
    """
    if size > LARGE:
        gc.collect()
        release_freed()
