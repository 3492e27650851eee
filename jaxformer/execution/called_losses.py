"""The cross-entropy of many classes as custom calls, for runs on a CPU with called products.

XLA makes five passes over the logits, each from and to memory: a language model's are larger than
any cache. The calls (``hardware.loss_calls``) read a row once forward, and write its gradient in
its place.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.execution.called_products import wanted_library
from jaxformer.execution.float_calls import call_for_floats
from jaxformer.hardware import loss_calls

# Those of fewer take little of a step in any case: 2,048 rows of 512, with the product that they
# come from, 2.0 ms in XLA and 1.6 ms with the calls.
FEWEST_CLASSES = 1024


def fits(logits: Float[Array, "... V"]) -> bool:
    """Returns whether the loss of these logits is to be made by custom calls, and can be."""
    is_wanted = logits.shape[-1] >= FEWEST_CLASSES and wanted_library(logits) is not None
    return is_wanted and loss_calls.are_known()


def normalizers_and_picked(
    logits: Float[Array, "... V"], targets: Int[Array, "..."]
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Returns log Σ exp(logits) of each row, and the logit of its target, in float32.

    A row with a target that is no class has the logit of the nearest class, whose gradient is 0. It
    is differentiated backward alone.

    Args:
        logits: what ``fits``.
        targets: ids.
    """
    rows = jnp.reshape(logits, (-1, logits.shape[-1]))
    found = _normalizers_and_picked(rows, jnp.reshape(targets, -1).astype(jnp.int32))
    normalizers, picked = (jnp.reshape(x, targets.shape) for x in found)
    return normalizers, picked


@jax.custom_vjp
def _normalizers_and_picked(logits_RV: Array, targets_R: Array) -> tuple[Array, Array]:
    return _forward(logits_RV, targets_R)[0]


def _forward(
    logits_RV: Array, targets_R: Array
) -> tuple[tuple[Array, Array], tuple[Array, Array, Array]]:
    rows = len(logits_RV)
    moments_R2, picked_R = call_for_floats(
        loss_calls.LOSSES, [(rows, 2), (rows,)], logits_RV, targets_R
    )
    shifts_R, sums_R = moments_R2.T
    return (shifts_R + jnp.log(sums_R), picked_R), (logits_RV, targets_R, moments_R2)


def _back(kept: tuple[Array, Array, Array], gradients: tuple[Array, Array]) -> tuple[Array, None]:
    logits_RV = kept[0]
    (of_logits_RV,) = call_for_floats(
        loss_calls.LOSSES_BACK, [logits_RV.shape], *kept, *gradients, replaces={0: 0}
    )
    return of_logits_RV, None


_normalizers_and_picked.defvjp(_forward, _back)
