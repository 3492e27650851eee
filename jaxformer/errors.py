"""The errors that jaxformer raises on purpose, and the exit code that each gives a command.

A message is one line: what is wrong, where, and what to do next. Where it names a setting that the
library takes as a keyword and the command line as a flag, the setting is a field, so that each side
writes it in its own way and nobody searches a message for it.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple


class Setting(NamedTuple):
    """A setting that an error message names.

    Attributes:
        name: the keyword of the library.
        example: a value to give, as code; empty if the message names the setting alone.
        flag: of the command line, without hyphens; empty if it has the keyword's name.
        value: the one that it has or is to have; empty if the message names the setting alone.
    """

    name: str
    example: str = ""
    flag: str = ""
    value: str = ""


def as_keyword(setting: Setting) -> str:
    """Returns a setting as the library's callers write it: ``dialect`` or ``devices=2``."""
    value = setting.example or setting.value
    return f"{setting.name}={value}" if value else setting.name


def as_flag(setting: Setting) -> str:
    """Returns a setting as the command line writes it: ``--dialect`` or ``--devices 2``."""
    flag = f"--{(setting.flag or setting.name).replace('_', '-')}"
    if setting.example:
        return f"a JSON file for {flag}: {setting.example}"
    return f"{flag} {setting.value}" if setting.value else flag


class JaxformerError(Exception):
    """The base class of all errors that jaxformer raises on purpose.

    >>> error = UsageError("the arrays may be of gpt2 or nanogpt: choose with ", Setting("dialect"))
    >>> str(error)
    'the arrays may be of gpt2 or nanogpt: choose with dialect'
    >>> error.message(lambda setting: f"--{setting.name}")
    'the arrays may be of gpt2 or nanogpt: choose with --dialect'

    Args:
        parts: of the message, in order: text, and the settings that it names. They stay in
            ``args``, so ``type(error)("prefix: ", *error.args)`` adds to a message.

    Attributes:
        exit_code: of the command that this error ends.
        already_reported: whether another process of the same run reports it, so that this one
            need not.
    """

    exit_code = 1
    already_reported = False

    def __init__(self, *parts: str | Setting):
        super().__init__(*parts)

    def message(self, spell: Callable[[Setting], str]) -> str:
        """Returns the message, with each setting as ``spell`` writes it."""
        return "".join(
            spell(part) if isinstance(part, Setting) else str(part) for part in self.args
        )

    def __str__(self) -> str:
        return self.message(as_keyword)


class UsageError(JaxformerError):
    """A setting or combination of settings that cannot work."""

    exit_code = 2


class TextError(JaxformerError, ValueError):
    """Text or vocabulary that cannot be used."""

    exit_code = 3


class CheckpointError(JaxformerError):
    """A checkpoint that is missing, damaged or does not fit."""

    exit_code = 4


class UnsafeFileError(JaxformerError):
    """A file that is not opened because it could do harm."""

    exit_code = 5


class DivergedError(JaxformerError):
    """Training produced a loss or gradient that is not finite."""

    exit_code = 6


class ResourceError(JaxformerError):
    """A lack of disk space, permission or memory.

    Attributes:
        action: what could not be done with a file or folder, such as "write"; "" if unknown.
        path: the file or folder, if it is about one.
        reason: why, and what to do next.
    """

    exit_code = 7
    action = ""
    path: Path | None = None
    reason = ""

    @classmethod
    def could_not(cls, action: str, path: Path, reason: str) -> "ResourceError":
        """Returns the error for a file or folder with which something could not be done."""
        error = cls(f"could not {action} {path}: {reason}")
        error.action, error.path, error.reason = action, path, reason
        return error


class DirectoryInUseError(JaxformerError):
    """Another process is writing to the run folder."""

    exit_code = 8


class DeviceError(JaxformerError):
    """The devices do not fit the settings."""

    exit_code = 9


class DoesNotFitError(JaxformerError):
    """A run that was planned needs more memory than its devices have.

    Args:
        needed: bytes of each device.
        capacity: bytes that each has.
        message: in one line, with settings that would fit.
    """

    exit_code = 10

    def __init__(self, message: str, needed: int, capacity: int):
        super().__init__(message)
        self.needed = needed
        self.capacity = capacity


class StoppedError(JaxformerError):
    """A signal ended the run after its work was saved; ``exit_code`` is 128 + the signal.

    Args:
        message: what was saved, in one line.
        signal_number: of the signal.
    """

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the memory of the host or of a device is used up.

    XLA raises one class for all its errors; its status code stands in the text alone.
    """
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def mismatches(expected: Mapping[str, object], found: Mapping[str, object], verb: str) -> list[str]:
    """Returns what is missing, what is unexpected and what differs, in this order and by name.

    >>> mismatches({"a": (2,), "b": (3,)}, {"b": (5,), "c": (7,)}, "has shape")
    ['missing a', 'unexpected c', 'b has shape (5,), not (3,)']

    Args:
        expected: the values that there must be, by name.
        found: the values that there are, by name.
        verb: stands between a name and its value; if empty, the two values are not shown.
    """
    problems = [f"missing {name}" for name in sorted(expected.keys() - found.keys())]
    problems += [f"unexpected {name}" for name in sorted(found.keys() - expected.keys())]
    return problems + [
        f"{name} {verb} {found[name]}, not {expected[name]}" if verb else f"changed {name}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]


def suggest(name: str, known: Iterable[str]) -> str:
    """Returns a question for the known name that is most like another one, "" if none is."""
    close = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {close[0]}?)" if close else ""
