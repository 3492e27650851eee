"""Attention as one custom call, for programs on a CPU that need no gradients.

In XLA scores are written, and read some six times for the softmax. The call
(``hardware.attention_call``) makes, weighs and uses the scores of a block of queries while they are
in a core's cache, and reads queries, keys and values as they lie.
"""

import contextvars
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxformer.execution.scopes import set_within
from jaxformer.execution.sharding import current_layout
from jaxformer.hardware import attention_call

_allowed: contextvars.ContextVar[bool] = contextvars.ContextVar("called_attention", default=False)


def without_gradients() -> AbstractContextManager[None]:
    """Makes models be traced for a pass forward alone, such as an evaluation.

    On a CPU attention is then a custom call where it can be one, which has no derivative.
    """
    return set_within(_allowed, True)


def fits(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K _"],
) -> bool:
    """Returns whether the call takes these arrays, in a program that allows it.

    XLA cannot cut a custom call into parts for the devices of a mesh.
    """
    arrays = q_BTNH, k_BSKH, v_BSKH
    has_shape = k_BSKH.shape == v_BSKH.shape and q_BTNH.shape[3] % attention_call.LANES == 0
    has_dtype = all(x.dtype == jnp.float32 for x in arrays)
    return _allowed.get() and has_shape and has_dtype and current_layout() is None


def attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    *,
    scale: float,
    causal: bool,
    window: int | None = None,
) -> Float[Array, "B T N H"]:
    """Computes softmax(q kᵀ · scale) v for each head (arXiv 1706.03762, eq. 1), in float32.

    Query head n has key/value head n // (N / K). A query that sees no key gets zeros.

    Args:
        q_BTNH: queries.
        k_BSKH: keys.
        v_BSKH: values.
        scale: what scores are multiplied by.
        causal: whether a query is kept from later keys.
        window: how many tokens a query sees on each side, itself included; None is all.

    Raises:
        RuntimeError: the call is not known here, see ``hardware.attention_call``.
    """
    if not attention_call.is_known():
        raise RuntimeError("attention cannot be a custom call here: there is no C compiler")
    result = jax.ShapeDtypeStruct(q_BTNH.shape, jnp.float32)
    call = jax.ffi.ffi_call(attention_call.ATTENTION, result, vmap_method="sequential")
    rule = np.array([causal, window or 0], np.int32)
    out_BTNH: Array = call(q_BTNH, k_BSKH, v_BSKH, np.array([scale], np.float32), rule)
    return out_BTNH
