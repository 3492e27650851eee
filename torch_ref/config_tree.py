"""Settings as a tree of parts: frozen dataclasses whose fields are settings or other such classes.

A setting has one name, which is unique in its tree: the field's. Files and the command line name
settings by it alone, so that a setting may move from one part to another and every file still
loads. ``flatten`` gives that form and ``unflatten`` reads it.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Wheel:
...     radius: float = 1.0
>>> @dataclass(frozen=True)
... class Car:
...     seats: int
...     wheel: Wheel = Wheel()
>>> flatten(Car(4))
{'seats': 4, 'radius': 1.0}
>>> unflatten(Car, {"seats": 2, "radius": 0.5})
Car(seats=2, wheel=Wheel(radius=0.5))
"""

import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from .checks import check_numbers, check_rate, check_types


def flatten(config: Any) -> dict[str, Any]:
    """Returns all settings of a config by name, those of its parts too."""
    settings: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        settings |= flatten(value) if is_dataclass(value) else {field.name: value}
    return settings


def unflatten(cls: type, settings: Mapping[str, Any]) -> Any:
    """Builds the config class ``cls`` from settings by name, in any order.

    Raises:
        ValueError: a setting is unknown or missing, or a class rejects a value.
    """
    _check_names(cls, settings)
    return cls(**_field_values(cls, settings, {}))


def from_dict(cls: type, values: Any) -> Any:
    """Builds the config class ``cls`` from what ``flatten`` and then JSON made of an instance.

    What ``dataclasses.asdict`` made of it is read too.

    Lists, which is what JSON makes of tuples, become tuples again.

    Raises:
        ValueError: a key is unknown or missing, a value has another type or is out of its range.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{cls.__name__} must be an object: got {type(values).__name__}")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in _spread(values).items()}
    types = setting_types(cls)
    check_types(types, {name: value for name, value in values.items() if name in types})
    return unflatten(cls, values)


def setting_types(cls: Any) -> dict[str, Any]:
    """Returns the types of all settings of a config class by name."""
    hints = typing.get_type_hints(cls)
    types: dict[str, Any] = {}
    for field in fields(cls):
        hint = hints[field.name]
        types |= setting_types(hint) if is_dataclass(hint) else {field.name: hint}
    return types


def default_settings(cls: Any) -> dict[str, Any]:
    """Returns the defaults of the settings of a config class by name; some have none."""
    hints = typing.get_type_hints(cls)
    defaults: dict[str, Any] = {}
    for field in fields(cls):
        if is_dataclass(field.default):
            defaults |= flatten(field.default)
        elif field.default is not MISSING:
            defaults[field.name] = field.default
        elif is_dataclass(hints[field.name]):
            defaults |= default_settings(hints[field.name])
    return defaults


def required_settings(cls: type) -> set[str]:
    """Returns the names of the settings of a config class that have no default."""
    return setting_types(cls).keys() - default_settings(cls).keys()


def _spread(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings by name, from settings and objects of settings by the names of parts."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _spread(value) if isinstance(value, Mapping) else {name: value}
    return found


def _check_names(cls: type, settings: Mapping[str, Any], given: Iterable[Any] = ()) -> None:
    """Checks that settings are known and none is missing but those of the ``given`` parts."""
    if unknown := sorted(settings.keys() - setting_types(cls).keys()):
        raise ValueError(f"unknown {cls.__name__} settings: {', '.join(unknown)}")
    known = {name for part in given for name in flatten(part)}
    if missing := sorted(required_settings(cls) - settings.keys() - known):
        raise ValueError(f"incomplete {cls.__name__}: missing {', '.join(missing)}")


def _field_values(
    cls: type, settings: Mapping[str, Any], base: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the values of all fields: from the settings, else from ``base``, else defaults."""
    hints = typing.get_type_hints(cls)
    values = {}
    for field in fields(cls):
        hint: Any = hints[field.name]
        default = base.get(field.name, field.default)
        if is_dataclass(hint):
            inner = {} if default is MISSING else vars(default)
            part: Any = hint
            values[field.name] = part(**_field_values(part, settings, inner))
        elif field.name in settings:
            values[field.name] = settings[field.name]
        elif default is not MISSING:
            values[field.name] = default
    return values


class Part:
    """The checks of every part: numbers are finite, rates of dropout in [0, 1)."""

    def __post_init__(self) -> None:
        check_numbers(self)
        for field in fields(self):  # type: ignore[arg-type]
            if field.name.endswith("_dropout"):
                check_rate(self, field.name)


class Settings:
    """The base of the dataclasses at the root of a tree, which are declared with ``init=False``.

    They are made of whole parts, of settings by name, or of both: a setting by name then replaces
    the part's. So ``replace`` takes the name of any setting too. A part may also be a dict, as
    ``dataclasses.asdict`` makes it.

    Raises:
        ValueError: a setting is unknown, missing, out of its range or does not fit the others.
    """

    def __init__(self, **settings: Any):
        cls = type(self)
        parts = {name: value for name, value in settings.items() if is_dataclass(value)}
        leaves = _spread({name: value for name, value in settings.items() if name not in parts})
        _check_names(cls, leaves, parts.values())
        for name, value in _field_values(cls, leaves, parts).items():
            object.__setattr__(self, name, value)
        self.__post_init__()

    def __post_init__(self) -> None:
        """Checks the settings."""

    def settings(self) -> dict[str, Any]:
        """Returns all settings by name."""
        return flatten(self)

    def replace(self, **settings: Any) -> typing.Self:
        """Returns a copy in which these settings differ, each by its own name."""
        cls = type(self)
        return cls(**{**vars(self), **settings})

    def __repr__(self) -> str:
        """Returns the call that makes this config, without the settings that have defaults."""
        usual = default_settings(type(self))
        given = [
            f"{k}={v!r}" for k, v in self.settings().items() if k not in usual or v != usual[k]
        ]
        return f"{type(self).__name__}({', '.join(given)})"
