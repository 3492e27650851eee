"""How many cores of the processor there are to use."""

import os


def count_cores() -> int:
    """Returns how many cores this process may use, which can be fewer than the machine has."""
    known = getattr(os, "sched_getaffinity", None)
    return len(known(0)) if known else os.cpu_count() or 1
