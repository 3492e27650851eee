"""The choice of what the forward pass keeps for the backward pass; the rest is computed again."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, Literal, get_args

import jax

from jaxformer.execution.scopes import check_known, set_within
from jaxformer.execution.sharding import current_layout
from jaxformer.hardware.matrix_products import MATRIX_TARGETS

Rematerialization = Literal["none", "dots", "full"]


def _are_products(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
    """Keeps the products with weight matrices, those that ``called_products`` computes too."""
    if primitive.name == "ffi_call":
        return bool(parameters["target_name"] in MATRIX_TARGETS)
    return bool(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable(
            primitive, *arguments, **parameters
        )
    )


POLICIES: dict[str, Any] = {
    "dots": _are_products,
    "full": jax.checkpoint_policies.nothing_saveable,
}

_chosen: contextvars.ContextVar[Rematerialization] = contextvars.ContextVar(
    "rematerialization", default="none"
)


@contextlib.contextmanager
def rematerialization(choice: Rematerialization) -> Iterator[None]:
    """Makes models be traced so that their blocks keep less for the backward pass.

    - ``none``: everything that the backward pass uses is kept.
    - ``dots``: each block keeps its input and the products with its weight matrices; scores,
      attention weights, norms and activations are computed again.
    - ``full``: each block keeps its input only. Its forward pass runs twice, a third more work in
      all (Chen et al., arXiv 1604.06174).

    The numbers are the same, up to rounding where XLA fuses otherwise. A function that ``jax.jit``
    has compiled stays as it was traced. On CPUs it saves no memory, by XLA's schedule, and takes
    more time.

    Raises:
        ValueError: the choice is unknown.
    """
    check_known("remat", choice, get_args(Rematerialization))
    with set_within(_chosen, choice):
        yield


def keeps_everything() -> bool:
    """Returns whether blocks are traced to keep everything that the backward pass uses."""
    return _chosen.get() == "none"


def rematerialize(block: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``block`` by the choice in effect; its positional arguments are arrays or None."""
    choice = _chosen.get()
    if choice != "none":
        return jax.checkpoint(block, policy=POLICIES[choice])
    layout = current_layout()
    if layout is None or not layout.gathers:
        return block
    return jax.checkpoint(block, policy=_all_but_gathered)


def _all_but_gathered(primitive: Any, *_: Any, **__: Any) -> bool:
    """Keeps what a block computes, but not the parameters that it has gathered."""
    return str(primitive) != "sharding_constraint"
