"""Checks of settings: types, finiteness, ranges. Every check raises ValueError with the value."""

import math
import operator
import types
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal, get_args

# No axis of an array that JAX can index is longer, and steps are counted in int32.
MAX_INTEGER = 2**31 - 1
# Blocks are built one by one; ten times as many as any published model has.
MAX_LAYERS = 10_000
# Of one matrix, 16 TiB in float32. XLA ends the process where a size is beyond 64 bits.
MAX_ELEMENTS = 2**42
# Models compute in float32: the largest number that it holds, its smallest normal one, and half
# the distance from 1 to the number below it.
FLOAT32_MAX, FLOAT32_TINY, FLOAT32_ROUNDING = (2 - 2**-23) * 2.0**127, 2.0**-126, 2.0**-25


def check_types(hints: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Checks that values from outside have the declared types.

    Args:
        hints: the types, by name.
        values: the values, by the same names or some of them.

    Raises:
        ValueError: one has another type: True is no number, and 4.0 no integer.
    """
    for name, value in values.items():
        if not _is_of_type(value, hints[name]):
            kind = getattr(hints[name], "__name__", str(hints[name])).replace("Literal", "text")
            raise ValueError(f"{name} must be {kind}: got {value!r:.80}")


def _is_of_type(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return any(_is_of_type(value, option) for option in get_args(hint))
    if origin is Literal:
        # Which words are known, the class says.
        return isinstance(value, str)
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_of_type(v, get_args(hint)[0]) for v in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is hint or (value is None and hint is type(None))


def check_is_integer(name: str, value: Any) -> None:
    """Checks that a value is an integer of some type, numpy's included, and no truth value.

    Raises:
        ValueError: it is none.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be an integer: got {value!r:.80}") from None


def check_is_number(name: str, value: Any) -> None:
    """Checks that a value is a number of some type, numpy's included, and no truth value.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise ValueError(f"{name} must be a number: got {value!r:.80}")


def check_integers(config: Any, *names: str) -> None:
    """Checks that integers are not beyond int32; None passes.

    Raises:
        ValueError: one is.
    """
    for name in names:
        value = getattr(config, name)
        if isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise ValueError(f"{name} must be at most {MAX_INTEGER}: got {_short(value)}")


def check_numbers(config: Any) -> None:
    """Checks that every number of a config is finite in float32, and every integer in int32.

    A setting that is an integer must be one: neither 4.0 nor True is.
    """
    check_integers(config, *(field.name for field in fields(config)))
    for field in fields(config):
        value = getattr(config, field.name)
        if field.type in (int, int | None) and value is not None:
            check_is_integer(field.name, value)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{field.name} must be finite: got {value}")
        if isinstance(value, float) and abs(value) > FLOAT32_MAX:
            raise ValueError(f"{field.name} must be finite in float32: got {value}")


def _short(value: int) -> str:
    """A number that may be too long to print."""
    return str(value) if abs(value) < 10**30 else f"one of {value.bit_length()} bits"


def check_positive(config: Any, *names: str) -> None:
    """Checks that settings are above 0, in float32 too; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be positive: got {value}")
        if isinstance(value, float) and value < FLOAT32_TINY:
            raise ValueError(f"{name} must be positive in float32: got {value}")


def check_rate(config: Any, name: str) -> None:
    """Checks that a setting is in [0, 1), in float32 too."""
    rate = getattr(config, name)
    if not 0 <= rate < 1:
        raise ValueError(f"{name} must be in [0, 1): got {rate}")
    if rate >= 1 - FLOAT32_ROUNDING:
        raise ValueError(f"{name} must be below 1 in float32: got {rate}")


def check_elements(rows: str, count: int, columns: str, width: int) -> None:
    """Checks that a matrix is no larger than any machine could hold.

    Args:
        rows: what it has ``count`` of.
        count: how many.
        columns: what it has ``width`` of.
        width: how many.
    """
    if count * width > MAX_ELEMENTS:
        raise ValueError(
            f"{rows} times {columns} must be at most {MAX_ELEMENTS} elements: got {count} and "
            f"{width}"
        )


def check_layers(config: Any, *names: str) -> None:
    """Checks that there are no more layers than any model has."""
    for name in names:
        if getattr(config, name) > MAX_LAYERS:
            raise ValueError(f"{name} must be at most {MAX_LAYERS}: got {getattr(config, name)}")


def check_not_negative(config: Any, *names: str) -> None:
    """Checks that settings are 0 or above."""
    for name in names:
        value = getattr(config, name)
        if value < 0:
            raise ValueError(f"{name} must not be negative: got {value}")


def check_choice(config: Any, name: str, choices: tuple[str, ...]) -> None:
    """Checks that a setting is one of the choices."""
    value = getattr(config, name)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}: got {value!r}")
