"""Everything that jaxformer refuses, and the exit code that each refusal ends a command with."""

from collections.abc import Mapping


class JaxformerError(Exception):
    """A refusal in one line: what, where, and what to do next.

    Attributes:
        exit_code: what a command ends with.
        already_reported: another process of the same run tells it, so this one need not.
    """

    exit_code = 1
    already_reported = False


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
    """A file refused because opening it could do harm."""

    exit_code = 5


class DivergedError(JaxformerError):
    """Training produced a loss or gradient that is not finite."""

    exit_code = 6


class ResourceError(JaxformerError):
    """Disk, permission or memory."""

    exit_code = 7


class DirectoryInUseError(JaxformerError):
    """Another process is writing to the run folder."""

    exit_code = 8


class DeviceError(JaxformerError):
    """The devices do not fit the settings."""

    exit_code = 9


class StoppedError(JaxformerError):
    """A signal ended the run after its work was saved; ``exit_code`` is 128 + the signal."""

    def __init__(self, message: str, signal_number: int):
        super().__init__(message)
        self.exit_code = 128 + signal_number


def mismatches(expected: Mapping[str, object], found: Mapping[str, object], verb: str) -> list[str]:
    """What is missing, what is unexpected and what differs, in this order and by name.

    >>> mismatches({"a": (2,), "b": (3,)}, {"b": (5,), "c": (7,)}, "has shape")
    ['missing a', 'unexpected c', 'b has shape (5,), not (3,)']

    Args:
        expected: what there must be, by name.
        found: what there is.
        verb: stands between a name and what was found; without one the difference is not shown.
    """
    problems = [f"missing {name}" for name in sorted(expected.keys() - found.keys())]
    problems += [f"unexpected {name}" for name in sorted(found.keys() - expected.keys())]
    return problems + [
        f"{name} {verb} {found[name]}, not {expected[name]}" if verb else f"changed {name}"
        for name in sorted(expected.keys() & found.keys())
        if found[name] != expected[name]
    ]
