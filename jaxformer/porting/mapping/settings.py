"""Settings of a code base and the fields of a config here: declared once, read in both directions.

A table is a tuple of rows. ``read_settings`` imports: every row reads source settings and gives
target fields. ``write_settings`` exports: every row reads target fields and gives source settings.

>>> table = (
...     Mapped("n_embd", "d_model"),
...     Mapped(("n_head", "num_attention_heads"), "num_heads"),
...     Mapped("layer_norm_epsilon", "norm_eps", 1e-5),
...     Mapped("hidden_act", "activation", translation=Choices({"gelu_new": "gelu_tanh"})),
...     Required("scale_attn_weights", True),
...     Fixed("positions", "learned"),
... )
>>> source = {"n_embd": 6, "num_attention_heads": 3, "hidden_act": "gelu_new"}
>>> read_settings(table, SourceModel({}, config=source))
{'d_model': 6, 'num_heads': 3, 'norm_eps': 1e-05, 'activation': 'gelu_tanh', 'positions': 'learned'}
"""

import abc
import functools
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any

from jaxformer.config_tree import setting_types
from jaxformer.errors import UsageError
from jaxformer.porting.mapping.abstract_modules import MODEL_OF_CONFIG
from jaxformer.porting.mapping.source_model import REQUIRED, SourceModel

Values = Mapping[str, Any]
Names = str | tuple[str, ...]
# Stands for "always written" in ``Mapped.omit``.
NOTHING = object()


def unsupported(setting: str, constraint: str, value: Any) -> UsageError:
    """Returns the error of a setting whose value cannot be imported.

    Args:
        setting: its name in the source.
        constraint: what follows "must".
        value: what it is.
    """
    return UsageError(f"unsupported: {setting} must {constraint}: got {value!r}")


class Row(abc.ABC):
    """One row of a table of settings."""

    @abc.abstractmethod
    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Returns target fields by name.

        Args:
            source_model: has the source settings.
            values: the target fields that the rows above have given.

        Raises:
            UsageError: a setting is missing or has an unsupported value.
        """

    @abc.abstractmethod
    def write(self, config: Any) -> dict[str, Any]:
        """Returns source settings by name, for a config of target fields."""


def read_settings(
    rows: Iterable[Row], source_model: SourceModel, values: Values | None = None
) -> dict[str, Any]:
    """Imports: returns the target fields of all rows, and those of ``values``.

    Raises:
        UsageError: a setting is missing or has an unsupported value.
    """
    fields = dict(values or {})
    for row in rows:
        given = row.read(source_model, fields)
        # Before a row below computes with it.
        for field, value in given.items():
            _check_number(row, field, value, source_model)
        fields |= given
    return fields


def _check_number(row: Row, field: str, value: Any, source_model: SourceModel) -> None:
    """Checks that a field of numbers has one, and names the source's setting if it has not."""
    types = _number_types().get(field, frozenset())
    names = _as_tuple(row.source) if isinstance(row, Mapped) else (field,)
    setting = next((n for n in names if source_model.config.get(n) is not None), names[0])
    if types and type(value) not in types:
        kind = "a number" if float in types else "an integer"
        raise unsupported(setting, f"be {kind}", value)
    if field in ("num_heads", "num_kv_heads") and value is not None and value < 1:
        raise unsupported(setting, "be positive", value)


@functools.cache
def _number_types() -> Mapping[str, frozenset[type]]:
    """Returns the types that fields of numbers may have, by the name of the field."""
    found: dict[str, set[type]] = {}
    for cls in MODEL_OF_CONFIG:
        for name, hint in setting_types(cls).items():
            found.setdefault(name, set()).update(typing.get_args(hint) or (hint,))
    # An integer is a number too.
    wide = {name: types | {int} if float in types else types for name, types in found.items()}
    return {n: frozenset(types) for n, types in wide.items() if types <= {int, float, NoneType}}


def write_settings(rows: Iterable[Row], config: Any) -> dict[str, Any]:
    """Exports: returns the source settings of all rows, in their order."""
    return {name: value for row in rows for name, value in row.write(config).items()}


class Translation:
    """How a value is spelled on either side; this one changes nothing."""

    def to_target(self, setting: str, value: Any, values: Values) -> Any:
        """Returns the value of the target field.

        Args:
            setting: the name in the source, for messages.
            value: the source's.
            values: the target fields known so far.

        Raises:
            UsageError: the value is unsupported.
        """
        return value

    def to_source(self, value: Any, config: Any) -> Any:
        """Returns the value of the source setting; ``config`` has all target fields."""
        return value


@dataclass(frozen=True)
class Choices(Translation):
    """A table of source values and their target values.

    Of several source values with one target value the first is written. A target value that is not
    in the table is written as the first of all: what the class makes of the written settings is
    compared with the module, so that the export is rejected with all that differs.
    """

    table: Mapping[Any, Any]

    def to_target(self, setting: str, value: Any, values: Values) -> Any:
        """Looks the value up."""
        if value not in self.table:
            raise unsupported(setting, f"be one of {', '.join(map(str, self.table))}", value)
        return self.table[value]

    def to_source(self, value: Any, config: Any) -> Any:
        """Looks the value up backwards."""
        first = next(iter(self.table))
        return next((source for source, target in self.table.items() if target == value), first)


@dataclass(frozen=True)
class Flag(Translation):
    """A boolean in the source that chooses between two target values."""

    true: Any
    false: Any

    def to_target(self, setting: str, value: Any, values: Values) -> Any:
        """Returns one of the two."""
        return self.true if value else self.false

    def to_source(self, value: Any, config: Any) -> bool:
        """Whether the target has the first of the two."""
        return bool(value == self.true)


@dataclass(frozen=True)
class Conversion(Translation):
    """A pair of functions: of (source value, target fields) and of (target value, config)."""

    read: Callable[[Any, Values], Any]
    write: Callable[[Any, Any], Any] = lambda value, config: value

    def to_target(self, setting: str, value: Any, values: Values) -> Any:
        """Applies the first function."""
        return self.read(value, values)

    def to_source(self, value: Any, config: Any) -> Any:
        """Applies the second function."""
        return self.write(value, config)


AS_IT_IS = Translation()
BOOLEAN = Conversion(lambda value, values: bool(value))
FLOAT = Conversion(lambda value, values: _number(value, float))
INTEGER = Conversion(lambda value, values: _number(value, int))


def _number(value: Any, kind: type[int] | type[float]) -> Any:
    """Returns a number as one of this kind.

    Raises:
        TypeError: it is none, such as a number in quotes.
        ValueError: it is a fraction where an integer is wanted.
    """
    if isinstance(value, bool | str):
        raise TypeError("no number")
    number = kind(value)
    if number != value:
        raise ValueError("a fraction")
    return number


@dataclass(frozen=True)
class Mapped(Row):
    """A source setting and the target field of the same meaning.

    Attributes:
        source: its name; of several the first that is found is read, and the first is written.
        target: the field; of several all are set, and the first is written.
        default: the source value where there is none, or a function of the source model and the
            target fields known so far; without one the setting must be there.
        translation: between the values.
        written_from: the config's property to write where the field itself may be None, such as
            ``head_width`` for ``head_dim``.
        is_nullable: whether null in a source config is a value ("there is none") and not an
            absence.
        is_read: False for a setting that exists for other readers of what is exported.
        omit: a target value that is not written.
        applies: whether the row is of use, from the target fields.
    """

    source: Names
    target: Names
    default: Any = REQUIRED
    translation: Translation = AS_IT_IS
    written_from: str | None = None
    is_nullable: bool = False
    is_read: bool = True
    omit: Any = NOTHING
    applies: Callable[[Values], bool] = lambda values: True

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives every target field the translated source value or default."""
        names = _as_tuple(self.source)
        source_model.read.update(names)
        if not self.is_read or not self.applies(values):
            return {}
        given = {n: source_model.config[n] for n in names if source_model.config.get(n) is not None}
        if any(value != given[next(iter(given))] for value in given.values()):
            raise unsupported(" and ".join(given), "be the same", [*given.values()])
        if self.is_nullable:
            value = source_model.nullable(names[0], self.default)
        else:
            is_derived = callable(self.default)
            value = source_model.setting(*names, default=None if is_derived else self.default)
            if value is None and is_derived:
                value = self.default(source_model, values)
        try:
            value = self.translation.to_target(names[0], value, values)
        except (TypeError, ValueError):
            raise unsupported(names[0], "have a value of the right type", value) from None
        return dict.fromkeys(_as_tuple(self.target), value)

    def write(self, config: Any) -> dict[str, Any]:
        """Gives the first source name the translated value of the first target field."""
        settings = config.settings()
        name = self.written_from or _as_tuple(self.target)[0]
        value = settings[name] if name in settings else getattr(config, name)
        if value == self.omit or not self.applies(settings):
            return {}
        return {_as_tuple(self.source)[0]: self.translation.to_source(value, config)}


@dataclass(frozen=True)
class Required(Row):
    """A source setting of which only one value is supported.

    Attributes:
        source: its name; where it is missing it is taken to have the value.
        value: the value, or a function of the target fields.
        is_written: whether it is written too.
        is_nullable: whether null in a source config is a value too, and not an absence.
    """

    source: str
    value: Any
    is_written: bool = False
    is_nullable: bool = False

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Rejects another value."""
        expected = self._expected(values)
        if self.is_nullable:
            found = source_model.nullable(self.source, expected)
        else:
            found = source_model.setting(self.source, default=expected)
        if found != expected:
            raise unsupported(self.source, f"be {expected!r}", found)
        return {}

    def write(self, config: Any) -> dict[str, Any]:
        """Gives the source name its value."""
        return {self.source: self._expected(config.settings())} if self.is_written else {}

    def _expected(self, values: Values) -> Any:
        return self.value(values) if callable(self.value) else self.value


@dataclass(frozen=True)
class Repeated(Row):
    """A second source setting of the same meaning, which must agree with the first where it is.

    Attributes:
        source: its name.
        target: the field that a row above has given.
        translation: between the values.
    """

    source: str
    target: str
    translation: Translation = AS_IT_IS

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Rejects another value."""
        value = source_model.setting(self.source, default=None)
        if value is None:
            return {}
        if self.translation.to_target(self.source, value, values) != values[self.target]:
            raise unsupported(self.source, f"mean {self.target} {values[self.target]!r}", value)
        return {}

    def write(self, config: Any) -> dict[str, Any]:
        """Gives the name the translated value of the field."""
        value = config.settings()[self.target]
        return {self.source: self.translation.to_source(value, config)}


@dataclass(frozen=True)
class Fixed(Row):
    """A target field that the source has no setting for.

    Attributes:
        target: its name.
        value: what it always is, or a function of the source model and the target fields.
    """

    target: str
    value: Any

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the field its value."""
        value = self.value(source_model, values) if callable(self.value) else self.value
        return {self.target: value}

    def write(self, config: Any) -> dict[str, Any]:
        """Gives nothing."""
        return {}


def fixed(**fields: Any) -> tuple[Fixed, ...]:
    """Returns the rows of target fields that the source has no settings for, by their names."""
    return tuple(Fixed(target, value) for target, value in fields.items())


@dataclass(frozen=True)
class Checked(Row):
    """A condition that the target fields must meet together.

    Attributes:
        check: raises ``UsageError`` where they do not.
    """

    check: Callable[[Values], Any]

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Checks, and gives nothing."""
        self.check(values)
        return {}

    def write(self, config: Any) -> dict[str, Any]:
        """Gives nothing."""
        return {}


def _as_tuple(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names
