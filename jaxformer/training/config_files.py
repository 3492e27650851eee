"""Settings of a run as a TOML file: ``config.toml`` in its folder, and ``train.py --config``.

Settings stand by name: those of the run at the top, those of the model and of the optimizer in
tables of these names. TOML has no null: where a setting may be None, it is ``"none"``.
"""

import json
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxformer.config import OptimizerConfig
from jaxformer.config_tree import setting_types
from jaxformer.errors import Setting, UsageError
from jaxformer.training.config import TrainConfig, class_of

NONE = "none"
TABLES = ("model", "optimizer")


def to_toml(config: TrainConfig) -> str:
    """Returns settings as a TOML file, which ``read_toml`` reads."""
    settings = config.to_dict()
    lines = _lines({name: value for name, value in settings.items() if name not in TABLES})
    for table in TABLES:
        lines += ["", f"[{table}]", *_lines(settings[table])]
    return "\n".join(lines) + "\n"


def read_toml(path: Path, base: TrainConfig) -> TrainConfig:
    """Returns the settings of a TOML file; those that it leaves out are the base's.

    Args:
        path: the file.
        base: such as a preset.

    Raises:
        UsageError: the file is missing or no TOML, or a setting is unknown or invalid.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(Setting("config", value=str(path)), f": {error.strerror}") from error
    except ValueError as error:
        raise UsageError(Setting("config", value=str(path)), f" is no TOML: {error}") from error
    settings = base.to_dict()
    model = values.get("model")
    cls = class_of(_flat(model)) if isinstance(model, Mapping) else type(base)
    if cls is not type(base):
        # The file says all of a model of another class.
        settings["model"] = {}
    own = typing.get_type_hints(cls)
    for name, value in values.items():
        if name in TABLES and isinstance(value, dict):
            hints = setting_types(own[name] if name == "model" else OptimizerConfig)
            settings[name] |= {k: _decoded(v, hints.get(k)) for k, v in _flat(value).items()}
        else:
            settings[name] = _decoded(value, own.get(name))
    try:
        return TrainConfig.from_dict(settings)
    except (ValueError, TypeError) as error:
        raise UsageError(Setting("config", value=str(path)), f": {error}") from error


def _lines(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {_encoded(value)}" for name, value in settings.items()]


def _encoded(value: Any) -> str:
    if value is None:
        value = NONE
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_encoded, value))}]"
    # JSON's texts, numbers and truth values are TOML's.
    return json.dumps(value, ensure_ascii=False)


def _decoded(value: Any, hint: Any) -> Any:
    """Returns a value of a file as the setting has it."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    if value == NONE and is_union and type(None) in typing.get_args(hint):
        return None
    return tuple(value) if isinstance(value, list) else value


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a table and of the tables in it, by name."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= _flat(value) if isinstance(value, Mapping) else {name: value}
    return found
