"""Where a model's arrays lie among many devices, told to it while it is traced."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from jaxtyping import Array, Bool, Float

if TYPE_CHECKING:
    from flax import nnx

    from jaxformer.layers import Dropout
    from jaxformer.parameters import Parameters

# (q_BTNH, k_BSKH, v_BSKH, mask, bias, dropout) to the output, and to weights where asked for.
Attend = Callable[..., tuple[Float[Array, "B T N H"], Float[Array, "B N T S"] | None]]


class Layout(Protocol):
    """What decides; without one everything lies on one device, and these change nothing."""

    @property
    def gathers(self) -> bool:
        """Whether blocks are computed with other parts of their parameters than are stored."""
        ...

    def lay_out(self, x: Array, letters: str) -> Array:
        """``x``, whose dimensions have these letters, where it should lie."""
        ...

    def gather(self, parameters: "Parameters") -> "Parameters":
        """Parameters, by path, as they are computed with."""
        ...

    def gather_module(self, module: "nnx.Module") -> Any:
        """A copy of the module around its gathered parameters."""
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
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"] | None]:
        """``attend`` of these arguments, each device on its own texts and heads."""
        ...


_layout: contextvars.ContextVar[Layout | None] = contextvars.ContextVar("layout", default=None)


@contextlib.contextmanager
def layout(chosen: Layout | None) -> Iterator[None]:
    """Within it, models are traced for many devices; the numbers are the same up to rounding."""
    token = _layout.set(chosen)
    try:
        yield
    finally:
        _layout.reset(token)


def current_layout() -> Layout | None:
    """That in effect."""
    return _layout.get()


def lay_out(x: Array, letters: str) -> Array:
    """``x`` where it should lie; ``letters`` name its dimensions, as in ``"BTD"``."""
    chosen = _layout.get()
    return x if chosen is None else chosen.lay_out(x, letters)


def gathering(block: "nnx.Module") -> Callable[..., Any]:
    """``block``, which puts its parameters together when it is called."""
    chosen = _layout.get()
    if chosen is None or not chosen.gathers:
        return block
    return lambda *args, **kwargs: chosen.gather_module(block)(*args, **kwargs)


def gather_outside_blocks(parameters: "Parameters") -> "Parameters":
    """A model's parameters, by path, of which a block gathers its own when it is called."""
    chosen = _layout.get()
    if chosen is None or not chosen.gathers:
        return parameters
    outside = {n: p for n, p in parameters.items() if not n.startswith("blocks.")}
    return parameters | chosen.gather(outside)


def share_heads(
    attend: Attend,
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    mask: Bool[Array, "B N T S"] | None,
    bias: Float[Array, "B N T S"] | None,
    dropout: "Dropout",
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"] | None]:
    """``attend`` of these arguments; on many devices each takes its own texts and heads."""
    chosen = _layout.get()
    arguments = (q_BTNH, k_BSKH, v_BSKH, mask, bias, dropout)
    return attend(*arguments) if chosen is None else chosen.share_heads(attend, *arguments)
