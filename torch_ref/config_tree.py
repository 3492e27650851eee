"""Settings as a tree of parts: frozen dataclasses whose fields are settings or other such classes.

A setting has one name, which is unique in its tree: the field's. Files and the command line name
settings by it alone, so that a setting may move from one part to another and every file still
loads. ``flatten`` gives that form and ``unflatten`` reads it. Where a field is itself the root of a
tree, one of ``Settings``, its settings are named by the field too: ``text.d_model``.

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

import functools
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import MappingProxyType
from typing import Any

from .checks import check_numbers, check_rate, check_types


def flatten(config: Any) -> dict[str, Any]:
    """Returns all settings of a config by name, those of its parts too."""
    settings: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        settings |= _named(field.name, value)
    return settings


def _named(name: str, value: Any) -> dict[str, Any]:
    """Returns the settings of a field by name: one, those of a part, or those of a whole tree."""
    if not is_dataclass(value) or isinstance(value, type):
        return {name: value}
    inner = flatten(value)
    return _within(name, inner) if _is_tree(type(value)) else inner


def _within(tree: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a tree by the names that they have in the tree around it."""
    return {f"{tree}.{name}": value for name, value in settings.items()}


def _is_tree(hint: Any) -> bool:
    """Whether a field of this type is the root of a tree, of either framework."""
    return hasattr(hint, "settings")


def unflatten(cls: type, settings: Mapping[str, Any]) -> Any:
    """Builds the config class ``cls`` from settings by name, in any order.

    Raises:
        ValueError: a setting is unknown or missing, or a class rejects a value.
    """
    _check_names(cls, settings, {})
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
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in _spread(values, cls).items()}
    types = setting_types(cls)
    check_types(types, {name: value for name, value in values.items() if name in types})
    return unflatten(cls, values)


@functools.cache
def _field_types(cls: Any) -> Mapping[str, Any]:
    """Returns the types of the fields of a dataclass by name; reading them takes a millisecond."""
    return MappingProxyType(typing.get_type_hints(cls))


def setting_types(cls: Any) -> Mapping[str, Any]:
    """Returns the types of all settings of a config class by name."""
    return _setting_types(cls)


@functools.cache
def _setting_types(cls: Any) -> Mapping[str, Any]:
    hints = _field_types(cls)
    types: dict[str, Any] = {}
    for field in fields(cls):
        hint = hints[field.name]
        inner = setting_types(hint) if is_dataclass(hint) else {field.name: hint}
        types |= _within(field.name, inner) if _is_tree(hint) else inner
    return MappingProxyType(types)


def default_settings(cls: Any) -> dict[str, Any]:
    """Returns the defaults of the settings of a config class by name; some have none."""
    hints = _field_types(cls)
    defaults: dict[str, Any] = {}
    for field in fields(cls):
        hint = hints[field.name]
        if field.default is not MISSING:
            defaults |= _named(field.name, field.default)
        elif is_dataclass(hint):
            inner = default_settings(hint)
            defaults |= _within(field.name, inner) if _is_tree(hint) else inner
    return defaults


@functools.cache
def required_settings(cls: type) -> frozenset[str]:
    """Returns the names of the settings of a config class that have no default."""
    return frozenset(setting_types(cls).keys() - default_settings(cls).keys())


def _spread(settings: Mapping[str, Any], cls: type | None = None) -> dict[str, Any]:
    """Returns settings by name, from settings and objects of settings by the names of parts.

    Args:
        settings: these.
        cls: the class of which fields may be trees.
    """
    hints = {} if cls is None else _field_types(cls)
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if not isinstance(value, Mapping):
            found[name] = value
        elif _is_tree(hints.get(name)):
            found |= _within(name, _spread(value, hints[name]))
        else:
            found |= _spread(value)
    return found


def _check_names(cls: type, settings: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Checks that settings are known and none is missing but those of the ``given`` parts."""
    if unknown := sorted(settings.keys() - setting_types(cls).keys()):
        raise ValueError(f"unknown {cls.__name__} settings: {', '.join(unknown)}")
    known = {name for field, part in given.items() for name in _named(field, part)}
    if missing := sorted(required_settings(cls) - settings.keys() - known):
        raise ValueError(f"incomplete {cls.__name__}: missing {', '.join(missing)}")


def _field_values(
    cls: type, settings: Mapping[str, Any], base: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the values of all fields: from the settings, else from ``base``, else defaults."""
    hints = _field_types(cls)
    values = {}
    for field in fields(cls):
        hint: Any = hints[field.name]
        default = base.get(field.name, field.default)
        if is_dataclass(hint):
            inner = {} if default is MISSING else vars(default)
            part: Any = hint
            if _is_tree(hint):
                start = f"{field.name}."
                own = {k.removeprefix(start): v for k, v in settings.items() if k.startswith(start)}
                values[field.name] = part(**{**inner, **own})
                continue
            values[field.name] = part(**_field_values(part, settings, inner))
        elif field.name in settings:
            value = settings[field.name]
            # A config is a key of caches, so it holds no list.
            values[field.name] = tuple(value) if isinstance(value, list) else value
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
        given = {name: value for name, value in settings.items() if name not in parts}
        leaves = _spread(given, cls)
        _check_names(cls, leaves, parts)
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
        trees = {k: v for k, v in vars(self).items() if isinstance(v, Settings)}
        plain = {k: v for k, v in self.settings().items() if k.partition(".")[0] not in trees}
        given = [
            f"{k}={v!r}" for k, v in {**trees, **plain}.items() if k not in usual or v != usual[k]
        ]
        return f"{type(self).__name__}({', '.join(given)})"
