"""Makes GELU known to XLA, as custom calls.

A C compiler builds them for this processor (``activation_calls.c``).
"""

import functools

import jax

from jaxformer.hardware import custom_calls

# GELU alone, and with its slope; and the gradients.
GELU, GELU_AND_SLOPE, GELU_BACK = TARGETS = (
    "jaxformer_gelu", "jaxformer_gelu_and_slope", "jaxformer_gelu_back",
)  # fmt: skip
NAME = "activation_calls"


@functools.cache
def are_known() -> bool:
    """Returns whether the custom calls of ``TARGETS`` can be used, and makes them known to XLA."""
    return custom_calls.register_own(NAME, TARGETS, devices=jax.local_device_count("cpu"))
