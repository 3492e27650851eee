"""What of the forward pass is kept for the backward pass, and what is computed again."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import jax

from jaxformer.execution.sharding import current_layout

Rematerialization = Literal["none", "dots", "full"]

POLICIES: dict[str, Any] = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}

_chosen: contextvars.ContextVar[Rematerialization] = contextvars.ContextVar(
    "rematerialization", default="none"
)


@contextlib.contextmanager
def rematerialization(choice: Rematerialization) -> Iterator[None]:
    """Within it, models are traced so that their blocks keep less for the backward pass.

    - ``none``: all that it uses is kept.
    - ``dots``: of each block its input and the products with its weight matrices are kept; scores,
      attention weights, norms and activations are computed again.
    - ``full``: of each block its input alone is kept; its forward pass is made twice, a third more
      work in all (Chen et al., arXiv 1604.06174).

    The numbers are the same, up to rounding where XLA fuses otherwise. A function that ``jax.jit``
    has compiled stays as it was traced. XLA's schedule for CPUs makes nothing of it: there it takes
    more time and no less memory.

    Raises:
        ValueError: the choice is unknown.
    """
    if choice not in get_args(Rematerialization):
        raise ValueError(
            f"remat must be one of {', '.join(get_args(Rematerialization))}: got {choice!r}"
        )
    token = _chosen.set(choice)
    try:
        yield
    finally:
        _chosen.reset(token)


def rematerialize(block: Callable[..., Any]) -> Callable[..., Any]:
    """``block`` as the choice in effect has it; its positional arguments are arrays or None."""
    choice = _chosen.get()
    if choice != "none":
        return jax.checkpoint(block, policy=POLICIES[choice])
    layout = current_layout()
    if layout is None or not layout.gathers:
        return block
    return jax.checkpoint(block, policy=_all_but_gathered)


def _all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """Keeps what a block computes, and not the parameters that it has put together."""
    return str(primitive) != "sharding_constraint"
