"""Patterns of layers: every n-th differs from the others."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.hugging_face_settings import SlidingWindow
from jaxformer.porting.mapping.settings import Values, unsupported
from jaxformer.porting.mapping.source_model import SourceModel


def every(step: int, num_layers: int) -> tuple[int, ...]:
    """Returns the indices of every n-th layer.

    >>> every(4, 9)
    (3, 7)
    """
    return tuple(layer for layer in range(num_layers) if (layer + 1) % step == 0)


def interval(layers: Sequence[int], num_layers: int, usual: int = 4) -> int:
    """Returns the n of which these are every n-th layer.

    >>> interval((2, 5), 7)
    3

    Args:
        layers: indices.
        num_layers: of the model.
        usual: what is returned where there is no such n within the layers.
    """
    steps = range(1, num_layers + 1)
    return next((n for n in steps if every(n, num_layers) == tuple(layers)), usual)


def every_fourth_full(source_model: SourceModel, num_layers: int) -> list[str]:
    """Returns types of layers of which every fourth sees all."""
    return _types(4, num_layers)


def _pattern_types(source_model: SourceModel, num_layers: int) -> list[str]:
    step = source_model.setting("sliding_window_pattern", default=4)
    if not isinstance(step, int) or step < 1:
        raise unsupported("sliding_window_pattern", "be a whole number above 0", step)
    return _types(step, num_layers)


def _types(step: int, num_layers: int) -> list[str]:
    full = every(step, num_layers)
    return [
        "full_attention" if layer in full else "sliding_attention" for layer in range(num_layers)
    ]


@dataclass(frozen=True)
class RotaryInWindows(SlidingWindow):
    """A sliding window in some layers, and no rotary positions in the others.

    ``sliding_window_pattern`` n says that every n-th layer is one of the others, where there are no
    ``layer_types``. Without a window all layers have rotary positions.
    """

    default_types: Callable[[SourceModel, int], list[str]] = _pattern_types

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the window and the layers without it, which have no rotary positions."""
        source_model.read.add("sliding_window_pattern")
        fields = super().read(source_model, values)
        return {**fields, "layers_without_rotary": fields.get("full_attention_layers", ())}

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives the window, the type of every layer, and n."""
        full = config.layers.full_attention_layers
        step = interval(full, config.num_layers)
        return {**super().write(config), "sliding_window_pattern": step}
