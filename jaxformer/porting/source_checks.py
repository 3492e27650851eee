"""Checks of what lies beside a checkpoint's weights, and of what the user says about it."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from jaxformer.errors import CheckpointError, Setting, UnsafeFileError, UsageError
from jaxformer.porting.checkpoint import Checkpoint
from jaxformer.porting.mapping.matching import unwrap
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


def check_patterns(checkpoint: Checkpoint) -> None:
    """Checks that each pattern of names to leave out is of something.

    Raises:
        UsageError: some are not; all are named.
    """
    tensors = checkpoint.raw.tensors
    known = [*tensors, *unwrap(tensors), *_names(checkpoint.raw.record.get("config"))]
    known += _names(checkpoint.config)
    without = [p for p in checkpoint.ignore if not any(fnmatchcase(name, p) for name in known)]
    if without:
        raise UsageError(
            Setting("ignore"),
            f" {' '.join(map(repr, without))}: {checkpoint.path} has no array and no setting of "
            "such a name",
        )


def _names(settings: Any) -> Iterator[str]:
    """Yields the names of settings, those inside of others too."""
    if isinstance(settings, dict):
        for name, value in settings.items():
            yield name
            yield from _names(value)
