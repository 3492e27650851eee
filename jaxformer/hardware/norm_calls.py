"""Makes norms of rows known to XLA, as custom calls.

A C compiler builds them for this processor (``norm_calls.c``).
"""

import functools

import jax

from jaxformer.hardware import custom_calls

# Forward, and the gradients.
NORM, NORM_BACK = TARGETS = "jaxformer_norm", "jaxformer_norm_back"
NAME = "norm_calls"


@functools.cache
def are_known() -> bool:
    """Returns whether the custom calls of ``TARGETS`` can be used, and makes them known to XLA."""
    return custom_calls.register_own(NAME, TARGETS, devices=jax.local_device_count("cpu"))
