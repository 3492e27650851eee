"""Makes attention without gradients known to XLA, as a custom call.

A C compiler builds it for this processor (``attention_call.c``).
"""

import functools

import jax

from jaxformer.hardware import custom_calls

ATTENTION = "jaxformer_attention"
NAME = "attention_call"
# The width of a head is a multiple of this, the most numbers that fill a register.
LANES = 16


@functools.cache
def is_known() -> bool:
    """Returns whether the custom call ``ATTENTION`` can be used, and makes it known to XLA."""
    return custom_calls.register_own(NAME, [ATTENTION], devices=jax.local_device_count("cpu"))
