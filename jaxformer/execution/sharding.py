"""Where a model's arrays lie among many devices, looked up while the model is traced."""

import contextvars
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from jaxtyping import Array, Bool, Float, Int

from jaxformer.execution.scopes import set_within

if TYPE_CHECKING:
    from flax import nnx

    from jaxformer.layers import Dropout
    from jaxformer.parameters import Parameters

# (q_BTNH, k_BSKH, v_BSKH, mask, bias, dropout, sinks) to the output, and to the weights or None.
Attend = Callable[..., tuple[Float[Array, "B T N H"], Float[Array, "B N T S"] | None]]

# (projections by name, rows_RD, experts_RC, weights_RC, keep) to outputs (R, D).
Mix = Callable[..., Array]


class Layout(Protocol):
    """Places arrays on devices. Without a layout everything lies on one device."""

    @property
    def gathers(self) -> bool:
        """Whether blocks compute with whole parameters that are stored in parts."""
        ...

    def lay_out(self, x: Array, letters: str) -> Array:
        """Returns ``x`` where it should lie; ``letters`` name its dimensions, as in ``"BTD"``."""
        ...

    def gather(self, parameters: "Parameters") -> "Parameters":
        """Returns parameters, by path, whole."""
        ...

    def gather_module(self, module: "nnx.Module") -> Any:
        """Returns a copy of the module around its gathered parameters."""
        ...

    def share_heads(
        self,
        attend: Attend,
        q_BTNH: Float[Array, "B T N H"],
        k_BSKH: Float[Array, "B S K H"],
        v_BSKH: Float[Array, "B S K H"],
        mask: Bool[Array, "B N T S"] | None,
        bias: Float[Array, "B N T S"] | None,
        dropout: "Dropout",
        sinks: Float[Array, "N"] | None = None,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"] | None]:
        """Calls ``attend`` on every device with its own sequences and heads."""
        ...

    def share_experts(
        self,
        mix: Mix,
        projections: Mapping[str, Any],
        rows: Float[Array, "R D"],
        chosen: Int[Array, "R C"],
        weights: Float[Array, "R C"],
        keep: Bool[Array, "RC F"] | None,
    ) -> Float[Array, "R D"]:
        """Calls ``mix`` on every device with its own experts, and adds up what they return."""
        ...


_layout: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("layout", default=None)


def layout(chosen: Layout | None) -> AbstractContextManager[None]:
    """Makes models be traced for many devices; the numbers are the same up to rounding."""
    return set_within(_layout, chosen)


def current_layout() -> Layout | None:
    """Returns the layout in effect, if any."""
    return _layout.get()


def lay_out(x: Array, letters: str) -> Array:
    """Returns ``x`` where the layout in effect puts it; see ``Layout.lay_out``."""
    chosen = _layout.get()
    return x if chosen is None else chosen.lay_out(x, letters)


def gather_when_called(block: "nnx.Module") -> Callable[..., Any]:
    """Returns ``block`` as a function that gathers its parameters when it is called."""
    chosen = _layout.get()
    if chosen is None or not chosen.gathers:
        return block
    return lambda *args, **kwargs: chosen.gather_module(block)(*args, **kwargs)


def gather_outside_blocks(parameters: "Parameters") -> "Parameters":
    """Returns a model's parameters, by path, gathered but for those of the blocks.

    A block gathers its own, see ``gather_when_called``.
    """
    chosen = _layout.get()
    if chosen is None or not chosen.gathers:
        return parameters
    outside = {n: p for n, p in parameters.items() if "blocks" not in n.split(".")}
    return parameters | chosen.gather(outside)


def share_heads(attend: Attend) -> Attend:
    """Returns ``attend`` so that under a layout each device takes its own sequences and heads."""
    chosen = _layout.get()
    return attend if chosen is None else functools.partial(chosen.share_heads, attend)


def share_experts(mix: Mix) -> Mix:
    """Returns ``mix`` so that under a layout each device computes its own experts."""
    chosen = _layout.get()
    return mix if chosen is None else functools.partial(chosen.share_experts, mix)
