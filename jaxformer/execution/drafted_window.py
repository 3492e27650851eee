"""A window that two models see: the one that writes, and the draft that proposes what it checks."""

import dataclasses
from typing import TYPE_CHECKING

import jax

from jaxformer.execution import lengths
from jaxformer.execution.token_window import Window

if TYPE_CHECKING:
    from jaxformer.attention import LayerCache


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class DraftedWindow:
    """A model's window, and what its draft has read of it.

    Attributes:
        window: the model's.
        draft_cache: the draft's, of all tokens but the last two.
    """

    window: Window
    draft_cache: list["LayerCache"]

    def with_slots(self, slots: int) -> "DraftedWindow":
        """The same text with room for ``slots`` tokens."""
        return lengths.lengthen(self, slots - self.window.slots)


lengthen_drafted = jax.jit(DraftedWindow.with_slots, static_argnames="slots")
