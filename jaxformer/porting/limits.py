"""What settings from a file may be, checked before anything is built of them."""

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from jaxformer.errors import UsageError
from jaxformer.porting.local_files import shown

# No axis of an array that JAX can index is longer.
MAX_SIZE = 2**31 - 1
# Tables of rotary positions are computed for the whole context: a gigabyte at this length.
MAX_CONTEXT = 2**24
LAYERS = (
    "num_layers", "n_layer", "n_layers", "num_hidden_layers", "num_encoder_layers",
    "num_decoder_layers", "encoder_layers", "decoder_layers",
)  # fmt: skip


def check_settings(settings: Any, arrays: int) -> None:
    """Checks settings, theirs or ours, that a model is to be built of.

    Args:
        settings: a mapping or a config of ours; anything else is left alone.
        arrays: how many there are: no model has more layers than arrays.

    Raises:
        UsageError: a number is not finite or larger than any array, or there are more layers than
            arrays.
    """
    if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
        settings = dataclasses.asdict(settings)
    if not isinstance(settings, Mapping):
        return
    for name, value in _numbers(settings):
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"the setting {shown(name)} must be finite: got {value}")
        if abs(value) > MAX_SIZE and isinstance(value, int) and "seed" not in name:
            raise UsageError(
                f"the setting {shown(name)} must be at most {MAX_SIZE}: got {shown(value)}"
            )
    for name in LAYERS:
        layers = settings.get(name)
        if isinstance(layers, int) and layers > arrays:
            raise UsageError(f"{name}={layers} cannot be: there are {arrays} arrays in all")


def check_config(config: Any) -> None:
    """Checks that the settings of a model of ours have the types that they are declared with.

    Raises:
        UsageError: one has not, or the context is longer than any model's.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not _fits(value, hints[field.name]):
            kind = getattr(field.type, "__name__", field.type)
            raise UsageError(f"{field.name} must be {kind}: got {shown(value)}")
    if config.context_length > MAX_CONTEXT:
        raise UsageError(
            f"context_length must be at most {MAX_CONTEXT}: got {config.context_length}"
        )


def _fits(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, option) for option in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(v, typing.get_args(hint)[0]) for v in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is hint or (value is None and hint is type(None))


def _numbers(tree: Any, name: str = "") -> Iterator[tuple[str, int | float]]:
    if isinstance(tree, bool):
        return
    if isinstance(tree, int | float):
        yield name, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _numbers(value, str(key))
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _numbers(value, name)
