"""Makes what a loss needs of rows of logits known to XLA, as custom calls.

A C compiler builds them for this processor (``loss_calls.c``).
"""

import functools

import jax

from jaxformer.hardware import custom_calls

# Forward, and the gradients.
LOSSES, LOSSES_BACK = TARGETS = "jaxformer_losses", "jaxformer_losses_back"
NAME = "loss_calls"


@functools.cache
def are_known() -> bool:
    """Returns whether the custom calls of ``TARGETS`` can be used, and makes them known to XLA."""
    return custom_calls.register_own(NAME, TARGETS, devices=jax.local_device_count("cpu"))
