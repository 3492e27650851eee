"""Checks of settings that come from a file, before anything is built from them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

from jaxformer.checks import MAX_INTEGER, check_types
from jaxformer.config_tree import flatten, setting_types
from jaxformer.errors import UsageError
from jaxformer.storage.local_files import safe_repr

# Tables of rotary positions are computed for the whole context: a gigabyte at this length.
MAX_CONTEXT = 2**24
LAYERS = (
    "num_layers", "n_layer", "n_layers", "num_hidden_layers", "num_encoder_layers",
    "num_decoder_layers", "encoder_layers", "decoder_layers",
)  # fmt: skip


def check_settings(settings: Any, arrays: int) -> None:
    """Checks settings that a model is to be built from.

    Args:
        settings: a source config (a mapping) or a jaxformer config; anything else is not checked.
        arrays: the number of arrays in the file; no model has more layers.

    Raises:
        UsageError: a number is not finite or larger than any array, or there are more layers than
            arrays.
    """
    if is_dataclass(settings) and not isinstance(settings, type):
        settings = flatten(settings)
    if not isinstance(settings, Mapping):
        return
    for name, value in _numbers(settings):
        if isinstance(value, float) and not math.isfinite(value):
            raise UsageError(f"the setting {safe_repr(name)} must be finite: got {value}")
        if abs(value) > MAX_INTEGER and isinstance(value, int) and "seed" not in name:
            raise UsageError(
                f"the setting {safe_repr(name)} must be at most {MAX_INTEGER}: got "
                f"{safe_repr(value)}"
            )
    for name in LAYERS:
        layers = settings.get(name)
        if isinstance(layers, int) and layers > arrays:
            raise UsageError(f"{name} must be at most the number of arrays, {arrays}: got {layers}")


def check_config(config: Any) -> None:
    """Checks that the fields of a jaxformer config have the declared types.

    Raises:
        UsageError: one has not, or context_length is too large.
    """
    try:
        check_types(setting_types(type(config)), flatten(config))
    except ValueError as error:
        raise UsageError(str(error)) from None
    if config.context_length > MAX_CONTEXT:
        raise UsageError(
            f"context_length must be at most {MAX_CONTEXT}: got {config.context_length}"
        )


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
