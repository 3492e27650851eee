"""Makes attention and its gradients known to XLA, as custom calls.

A C compiler builds them for this processor (``attention_call.c``, ``attention_back_call.c``).
"""

import functools

import jax

from jaxformer.hardware import custom_calls

# Forward alone; with what the gradients need; and the gradients.
ATTENTION, ATTENTION_AND_MOMENTS = FORWARD = (
    "jaxformer_attention", "jaxformer_attention_and_moments",
)  # fmt: skip
ATTENTION_BACK = "jaxformer_attention_back"
NAME, BACK_NAME = "attention_call", "attention_back_call"
# The width of a head is a multiple of this, the most numbers that fill a register.
LANES = 16


@functools.cache
def is_known() -> bool:
    """Returns whether the custom calls can be used, and makes them known to XLA."""
    devices = jax.local_device_count("cpu")
    libraries = {NAME: FORWARD, BACK_NAME: (ATTENTION_BACK,)}
    return all(
        custom_calls.register_own(name, targets, devices=devices)
        for name, targets in libraries.items()
    )
