"""Reading a command's arguments: into options, or a refusal in one line."""

import contextlib
import io
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from jaxformer.errors import UsageError
from jaxformer.training.presets import PRESETS


def parse(
    cls: type,
    program: str,
    arguments: Sequence[str],
    default: Any = None,
    *,
    others: bool = False,
) -> Any:
    """The options that the arguments make; with ``others`` there may be arguments beside them.

    Raises:
        UsageError: an argument is unknown, cannot be read or is refused by the options' classes.
    """
    settings: dict[str, Any] = {} if default is None else {"default": default}
    if others:
        settings["return_unknown_args"] = True
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed: Any = tyro.cli(cls, prog=program, args=list(arguments), **settings)
            return parsed[0] if others else parsed
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UsageError(_one_line(complaint.getvalue(), program)) from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def _one_line(complaint: str, program: str) -> str:
    """What tyro's framed message says, without its frame and its help texts."""
    # Its rules are drawn in box characters or in ASCII, as the terminal's encoding allows.
    lines = [line.strip("│| ") for line in complaint.strip().splitlines()[1:]]
    paragraphs = [
        " ".join(words)
        for rule, words in itertools.groupby(lines, lambda line: not line.strip("─╰╯+-"))
        if not rule
    ]
    message = re.sub(r"^Error parsing ([\w.]+: )?", "", paragraphs[0]).rstrip(".")
    similar = [p for p in paragraphs if p.startswith(("Perhaps you meant", "Arguments similar"))]
    flags = re.findall(r"(?<!\S)--[\w-]+(?= |,|$)", " ".join(p.partition(":")[2] for p in similar))
    hint = f"; did you mean {' or '.join(dict.fromkeys(flags))}?" if flags else ""
    return f"{message[:1].lower()}{message[1:]}{hint} (see {program} --help)"


def is_path(argument: str) -> bool:
    """Whether an argument can only be meant as a path."""
    return os.path.lexists(argument) or os.sep in argument or "." in argument


def preset_name(arguments: Sequence[str]) -> str:
    """The preset that decides the defaults of all settings.

    Raises:
        UsageError: there is none of that name.
    """
    preset = peek(arguments, "--preset") or "nano"
    if preset not in PRESETS:
        raise UsageError(f"--preset {preset} is unknown: choose among {', '.join(PRESETS)}")
    return preset


def run_folder(arguments: Sequence[str]) -> Path:
    """Where a training run is kept."""
    return Path(peek(arguments, "--out") or f"runs/{preset_name(arguments)}")


def peek(arguments: Sequence[str], flag: str) -> str | None:
    """The last value of a flag that decides the defaults of the others."""
    found = None
    for place, here in enumerate(arguments):
        if here == flag:
            found = next(iter(arguments[place + 1 :]), None)
        elif here.startswith(f"{flag}="):
            found = here.partition("=")[2]
    return found
