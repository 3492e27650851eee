"""Checks of what lies beside a checkpoint's weights, and of what the user says about it."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from jaxformer.errors import CheckpointError, Setting, UnsafeFileError, UsageError
from jaxformer.porting.checkpoint import Checkpoint
from jaxformer.porting.mapping.wrapped_names import unwrap
from jaxformer.storage.strict_json import parse_json


def broken_companions(checkpoint: Checkpoint) -> list[str]:
    """Returns a line for each file beside the weights that should be JSON and is not."""
    lines = []
    for file in checkpoint.files_beside().values():
        if file.suffix != ".json":
            continue
        try:
            parse_json(file.read_bytes(), str(file))
        except (CheckpointError, UnsafeFileError) as error:
            lines.append(f"{error}; it is copied as it is")
    return lines


def check_patterns(*checkpoints: Checkpoint) -> None:
    """Checks that each pattern of names to leave out is of something in one of the checkpoints.

    Raises:
        UsageError: some are not; all are named.
    """
    known = [name for checkpoint in checkpoints for name in _known_names(checkpoint)]
    patterns = dict.fromkeys(p for checkpoint in checkpoints for p in checkpoint.ignore)
    without = [p for p in patterns if not any(fnmatchcase(name, p) for name in known)]
    if without:
        first, *others = (str(checkpoint.path) for checkpoint in checkpoints)
        what = "no array and no setting of such a name"
        has = (
            f"{first} has {what}"
            if not others
            else f"{first} and {' and '.join(others)} have {what}"
        )
        raise UsageError(Setting("ignore"), f" {' '.join(map(repr, without))}: {has}")


def _known_names(checkpoint: Checkpoint) -> Iterator[str]:
    """Yields the names of arrays and of settings."""
    tensors = checkpoint.raw.tensors
    yield from (*tensors, *unwrap(tensors))
    yield from _names(checkpoint.raw.record.get("config"))
    yield from _names(checkpoint.config)


def _names(settings: Any) -> Iterator[str]:
    """Yields the names of settings, those inside of others too."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield name
            yield from _names(value)
