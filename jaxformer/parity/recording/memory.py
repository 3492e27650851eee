"""Returning freed memory to the system between the passes of large models."""

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
