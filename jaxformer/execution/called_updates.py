"""AdamW as a custom call, for runs on a CPU whose products are custom calls too.

XLA makes programs of their own for each array of a model and of its moments: nearly half of what it
compiles for a step of a small model. One call (``hardware.update_calls``) updates all arrays, in
place, and another one sums the squares of all gradients.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxformer.execution.called_products import wanted_library
from jaxformer.execution.float_calls import call_for_floats
from jaxformer.hardware import update_calls

# Of a model, by path.
Arrays = dict[str, Float[Array, "..."]]


class Moments(NamedTuple):
    """The averages of gradients and of their squares, by path."""

    mu: Arrays
    nu: Arrays


def fits(arrays: Arrays) -> bool:
    """Returns whether a custom call is to compute something of all these arrays, and can."""
    wanted = bool(arrays) and wanted_library(*arrays.values()) is not None
    return wanted and update_calls.are_known()


def sum_squares(arrays: Arrays) -> Float[Array, ""]:
    """Returns Σ x² over every element of arrays that ``fits`` accepts, in float32."""
    return call_for_floats(update_calls.SUM_SQUARES, [()], *arrays.values())[0]


def adamw(
    parameters: Arrays,
    gradients: Arrays,
    moments: Moments,
    *,
    decays: Mapping[str, float],
    changing: tuple[Float[Array, ""], Float[Array, ""], Float[Array, ""]],
    betas: tuple[float, float],
    eps: float,
    is_wanted: Bool[Array, ""] | bool = True,
) -> tuple[Arrays, Moments]:
    """Returns parameters and moments after an update of AdamW (arXiv 1711.05101, algorithm 2).

    With g the scaled gradient, m = β₁ m + (1 - β₁) g, v = β₂ v + (1 - β₂) g², and

        x = x - rate (m / (1 - β₁ᵗ) / (sqrt(v / (1 - β₂ᵗ)) + eps) + decay x).

    Args:
        parameters: x, arrays that ``fits`` accepts, by path.
        gradients: of the same paths, as the moments.
        moments: m and v.
        decays: by path.
        changing: what gradients are multiplied by, the rate, and t of this update, from 1 on.
        betas: β₁ and β₂.
        eps: beside the root.
        is_wanted: where it is False, all stays as it was.
    """
    scale, rate, t = changing
    of_moments = [1 / _one_minus_power(beta, t) for beta in betas]
    names = list(parameters)
    groups = [parameters, gradients, *moments]
    arrays = [group[name] for group in groups for name in names]
    numbers = jnp.stack([jnp.float32(x) for x in (scale, rate, *of_moments, is_wanted)])
    count = len(names)
    changed = call_for_floats(
        update_calls.ADAMW,
        [group[name].shape for group in (parameters, *moments) for name in names],
        *arrays,
        np.array([decays[name] for name in names], np.float32),
        numbers,
        # 1 - β of a β that is rounded already would be less exact.
        np.array([x for beta in betas for x in (beta, 1 - beta)] + [eps], np.float32),
        # All but the gradients.
        replaces={i + count * (i >= count): i for i in range(3 * count)},
    )
    x, mu, nu = (
        dict(zip(names, changed[i * count : (i + 1) * count], strict=True)) for i in range(3)
    )
    return x, Moments(mu, nu)


def _one_minus_power(base: float, exponent: Array) -> Array:
    """Returns 1 - bᵗ, which is exact where bᵗ is close to 1 too."""
    if base == 0:
        return jnp.ones((), jnp.float32)
    return -jnp.expm1(jnp.asarray(exponent, jnp.float32) * math.log(base))
