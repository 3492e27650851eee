"""Patterns of layers: which have a sliding window, and of which every n-th differs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.mapping.settings import Row, Values, unsupported
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


# The ``layer_types`` of a source model with so many layers.
LayerTypes = Callable[[SourceModel, int], list[str]]


def every_full(step: int, *names: str) -> LayerTypes:
    """Returns the types of layers of which every n-th sees all, and the others a window.

    Args:
        step: n.
        names: of the setting that may give another n.
    """

    def types(source_model: SourceModel, num_layers: int) -> list[str]:
        n = source_model.setting(*names, default=step)
        if not isinstance(n, int) or n < 1:
            raise unsupported(names[0], "be a whole number above 0", n)
        full = every(n, num_layers)
        return [
            "full_attention" if layer in full else "sliding_attention"
            for layer in range(num_layers)
        ]

    return types


@dataclass(frozen=True)
class SlidingWindow(Row):
    """A sliding window in some layers.

    Attributes:
        default_types: where the source model has none.
        has_switch: whether the window is there only where ``use_sliding_window`` says so.
    """

    default_types: LayerTypes
    has_switch: bool = False

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the window and the layers without it, or nothing."""
        # null says that there is none.
        window = source_model.nullable("sliding_window", 4096)
        if self.has_switch and not source_model.setting("use_sliding_window", default=False):
            window = None
        types = source_model.setting("layer_types", default=None)
        if types is not None and set(types) - {"full_attention", "sliding_attention"}:
            raise unsupported("layer_types", "be full_attention or sliding_attention", types)
        if types is not None and len(types) != values["num_layers"]:
            raise unsupported("layer_types", f"have {values['num_layers']} entries", types)
        if window is None:
            return {}
        if types is None:
            types = self.default_types(source_model, values["num_layers"])
        full = tuple(n for n, kind in enumerate(types) if kind == "full_attention")
        return {"sliding_window": window, "full_attention_layers": full}

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives the window and the type of every layer."""
        window = config.attention.sliding_window
        switch = {"use_sliding_window": window is not None} if self.has_switch else {}
        types = [
            "full_attention"
            if window is None or layer in config.layers.full_attention_layers
            else "sliding_attention"
            for layer in range(config.num_layers)
        ]
        return {**switch, "sliding_window": window, "layer_types": types}


EVERY_FOURTH_FULL = every_full(4, "sliding_window_pattern")


@dataclass(frozen=True)
class RotaryInWindows(SlidingWindow):
    """A sliding window in some layers, and no rotary positions in the others.

    ``sliding_window_pattern`` n says that every n-th layer is one of the others, where there are no
    ``layer_types``. Without a window all layers have rotary positions.
    """

    default_types: LayerTypes = EVERY_FOURTH_FULL

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
