"""Attention as a custom call, for programs on a CPU.

In XLA scores are written, and read some six times for the softmax. The call
(``hardware.attention_call``) makes, weighs and uses the scores of a block of queries while they are
in a core's cache, and reads queries, keys and values as they lie. The gradients are a second call,
which makes the scores again (arXiv 2205.14135, section 3.1).
"""

import contextvars
import functools
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxformer.execution.called_products import wanted_library
from jaxformer.execution.cores import count_cores
from jaxformer.execution.float_calls import call_for_floats
from jaxformer.execution.scopes import set_within
from jaxformer.execution.sharding import current_layout
from jaxformer.hardware import attention_call

_allowed: contextvars.ContextVar[bool] = contextvars.ContextVar("called_attention", default=False)


def without_gradients() -> AbstractContextManager[None]:
    """Makes models be traced for a pass forward alone, such as an evaluation.

    On a CPU attention is then a custom call where it can be one, whosever the products are.
    """
    return set_within(_allowed, True)


def fits(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K _"],
) -> bool:
    """Returns whether attention of these arrays is to be a custom call, and can be one.

    It is where no gradients are needed, and in a run whose products are custom calls. XLA cannot
    cut a custom call into parts for the devices of a mesh. A core makes all gradients of a head of
    keys, so that there must be enough of them.
    """
    arrays = q_BTNH, k_BSKH, v_BSKH
    has_shape = k_BSKH.shape == v_BSKH.shape and q_BTNH.shape[3] % attention_call.LANES == 0
    has_dtype = all(x.dtype == jnp.float32 for x in arrays)
    has_heads = k_BSKH.shape[0] * k_BSKH.shape[2] >= count_cores()
    is_wanted = _allowed.get() or (wanted_library(q_BTNH, k_BSKH, v_BSKH) is not None and has_heads)
    return is_wanted and has_shape and has_dtype and current_layout() is None


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

    Query head n has key/value head n // (N / K). A query that sees no key gets zeros. It is
    differentiated backward alone.

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
    return _attention((scale, causal, window or 0), q_BTNH, k_BSKH, v_BSKH)


_Rule = tuple[float, bool, int]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(rule: _Rule, q_BTNH: Array, k_BSKH: Array, v_BSKH: Array) -> Array:
    arguments = _arguments(rule, q_BTNH, k_BSKH, v_BSKH)
    # Without gradients nobody needs the queries later: the result is written in their place.
    return call_for_floats(attention_call.ATTENTION, [q_BTNH.shape], *arguments, replaces={0: 0})[0]


def _attention_forward(
    rule: _Rule, q_BTNH: Array, k_BSKH: Array, v_BSKH: Array
) -> tuple[Array, tuple[Array, ...]]:
    batch, queries, heads, _ = q_BTNH.shape
    shapes = [q_BTNH.shape, (2, batch, heads, queries)]
    arguments = _arguments(rule, q_BTNH, k_BSKH, v_BSKH)
    out_BTNH, moments_2BNT = call_for_floats(
        attention_call.ATTENTION_AND_MOMENTS, shapes, *arguments
    )
    return out_BTNH, (q_BTNH, k_BSKH, v_BSKH, out_BTNH, moments_2BNT)


def _attention_back(rule: _Rule, kept: tuple[Array, ...], dout_BTNH: Array) -> tuple[Array, ...]:
    q_BTNH, k_BSKH, v_BSKH, out_BTNH, moments_2BNT = kept
    arguments = _arguments(rule, q_BTNH, k_BSKH, v_BSKH)
    shapes = [x.shape for x in (q_BTNH, k_BSKH, v_BSKH)]
    return call_for_floats(
        attention_call.ATTENTION_BACK, shapes, *arguments, out_BTNH, moments_2BNT, dout_BTNH
    )


def _arguments(rule: _Rule, *arrays: Array) -> tuple[Array | np.ndarray, ...]:
    """The arrays, and the numbers of the rule as the calls take them."""
    scale, causal, window = rule
    return *arrays, np.array([scale], np.float32), np.array([causal, window], np.int32)


_attention.defvjp(_attention_forward, _attention_back)
