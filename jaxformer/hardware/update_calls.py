"""Makes updates of parameters, and sums of squares, known to XLA, as custom calls.

A C compiler builds them for this processor (``update_calls.c``).
"""

import functools

import jax

from jaxformer.hardware import custom_calls

SUM_SQUARES, ADAMW = TARGETS = "jaxformer_sum_squares", "jaxformer_adamw"
NAME = "update_calls"


@functools.cache
def are_known() -> bool:
    """Returns whether the custom calls of ``TARGETS`` can be used, and makes them known to XLA."""
    return custom_calls.register_own(NAME, TARGETS, devices=jax.local_device_count("cpu"))
