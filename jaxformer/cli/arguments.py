"""Reads a command's arguments into a dataclass of options; free of JAX."""

import contextlib
import io
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from jaxformer.errors import UsageError
from jaxformer.training.config import MIXED, TrainConfig
from jaxformer.training.config_files import read_toml
from jaxformer.training.presets import PRESETS, find_preset
from jaxformer.training.run_arguments import check_out

# A flag without a --no- form, which only settings that a preset may switch on need.
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Preset = Annotated[str, tyro.conf.arg(metavar="|".join(PRESETS))]


# What other projects call a flag, by the command that has it under another name.
_TRAINING = {
    "--lr": "--learning-rate",
    "--optim": "--optimizer",
    "--epochs": "--steps", "--max-steps": "--steps", "--max-iters": "--steps",
    "--bs": "--batch-size", "--n-layer": "--num-layers", "--n-layers": "--num-layers",
    "--n-head": "--num-heads", "--n-heads": "--num-heads", "--n-embd": "--d-model",
    "--hidden-size": "--d-model", "--model": "--preset or --init-from",
    "--checkpoint": "--init-from", "--resume-from": "--resume and --out",
    "--output": "--out", "--output-dir": "--out", "--gpus": "--devices",
    "--bf16": "--dtype bfloat16", "--grad-clip": "--clip-norm", "--warmup": "--warmup-steps",
    "--grad-accum": "--accumulation", "--gradient-accumulation-steps": "--accumulation",
    "--wandb": "--tracker wandb", "--tensorboard": "--tracker tensorboard",
}  # fmt: skip
_SAMPLING = {
    "--temp": "--temperature", "--max-tokens": "--tokens", "--max-new-tokens": "--tokens",
    "--num-samples": "--samples", "--length": "--tokens", "--start": "--prompt",
}  # fmt: skip
USUAL_NAMES = {
    "jaxformer train": _TRAINING,
    "jaxformer plan": _TRAINING,
    "jaxformer sample": _SAMPLING,
}


def parse(
    options: Any,
    program: str,
    arguments: Sequence[str],
    default: Any = None,
    *,
    ignore_unknown: bool = False,
) -> Any:
    """Returns the options that the arguments give; ``--help`` prints and exits instead.

    Args:
        options: their dataclass.
        program: the command's name, for its help.
        arguments: those after the command's name.
        default: an instance with the values of what is not given.
        ignore_unknown: allow arguments that are none of the options.

    Raises:
        UsageError: an argument is unknown, cannot be read, or the dataclass rejects its value.
    """
    settings: dict[str, Any] = {} if default is None else {"default": default}
    if ignore_unknown:
        settings["return_unknown_args"] = True
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed: Any = tyro.cli(options, prog=program, args=list(arguments), **settings)
            return parsed[0] if ignore_unknown else parsed
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        text = _first_complaint(complaint.getvalue(), program)
        text = _explain_switch(arguments, text) or text
        raise UsageError(_explain_usual_name(arguments, program) or text) from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def _explain_usual_name(arguments: Sequence[str], program: str) -> str | None:
    """Returns what to write for a flag that is of other projects; None if there is none."""
    names = USUAL_NAMES.get(program, {})
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag in names:
            return f"there is no {flag}: use {names[flag]} (see {program} --help)"
    return None


def _explain_switch(arguments: Sequence[str], complaint: str) -> str | None:
    """Returns what to write for a flag without a value that got one; None if that is not it.

    tyro names the value alone, as an argument that it does not know.
    """
    unknown = re.match(r"unrecognized options: ([^-].*) \(see ", complaint)
    values = [] if unknown is None else unknown[1].split()
    words = list(itertools.chain(*(argument.split("=", 1) for argument in arguments)))
    for flag, value in itertools.pairwise(words):
        # A word that stands twice may be the value of a flag that takes one.
        if flag.startswith("--") and value in values and words.count(value) == 1:
            return f"{flag} takes no value, and got {value}: write it alone, or leave it out"
    return None


def _first_complaint(complaint: str, program: str) -> str:
    """Returns in one line what tyro printed in a frame, without the help that it adds.

    tyro raises SystemExit and gives its reason as framed text alone, so this is the one place where
    text is taken apart. If the frame changes, the line is longer than it need be, never lost.
    """
    # Its rules are drawn in box characters or in ASCII, as the terminal's encoding allows.
    lines = [line.strip("│| ") for line in complaint.strip().splitlines()[1:]]
    paragraphs = [
        " ".join(words)
        for rule, words in itertools.groupby(lines, lambda line: not line.strip("─╰╯+-"))
        if not rule
    ]
    message = re.sub(r"^Error parsing ([\w.]+: )?", "", paragraphs[0]).rstrip(".")
    wrong = re.fullmatch(r"(\S+): no type matching (\S+) could be .* from \['(.*)'\]", message)
    if wrong is not None:
        message = f"{wrong[1]} must be {wrong[2]}: got {wrong[3]}"
    whole = re.fullmatch(r"(\S+): invalid literal for int\(\) with base 10: '(.*)'", message)
    if whole is None:
        whole = re.fullmatch(r"(\S+) must be \{None\}\|INT: got (.*)", message)
    if whole is not None:
        message = f"{whole[1]} must be a whole number, such as 1000: got '{whole[2]}'"
    similar = [p for p in paragraphs if p.startswith(("Perhaps you meant", "Arguments similar"))]
    flags = re.findall(r"(?<!\S)--[\w-]+(?= |,|$)", " ".join(p.partition(":")[2] for p in similar))
    hint = f"; did you mean {' or '.join(dict.fromkeys(flags))}?" if flags else ""
    return f"{message[:1].lower()}{message[1:]}{hint} (see {program} --help)"


def is_path(argument: str) -> bool:
    """Returns whether an argument can only be meant as a path."""
    return os.path.lexists(argument) or os.sep in argument or "." in argument


def preset_name(arguments: Sequence[str]) -> str:
    """Returns the preset that decides the defaults of all settings.

    Raises:
        UsageError: there is none of that name.
    """
    preset = peek(arguments, "--preset")
    if preset is None:
        return "nano"
    find_preset(preset)
    return preset


def read_settings(arguments: Sequence[str]) -> TrainConfig:
    """Returns the settings of the preset, and in their place those of ``--config``.

    Raises:
        UsageError: there is no such preset or file, or the file cannot be read.
    """
    settings = find_preset(preset_name(arguments))
    file = peek(arguments, "--config")
    return settings if file is None else read_toml(Path(file), settings)


def given_names(arguments: Iterable[str]) -> set[str]:
    """Returns the settings that the arguments give, each by its name in the library."""
    flags = (a.partition("=")[0] for a in arguments if a.startswith("--"))
    return {flag.removeprefix("--").replace("-", "_") for flag in flags}


def run_folder(arguments: Sequence[str]) -> Path:
    """Returns where a training run is kept.

    Raises:
        UsageError: it cannot be the name of a folder, or there is no such preset.
    """
    out = peek(arguments, "--out")
    if out is None:
        return Path("runs") / preset_name(arguments)
    check_out(out)
    return Path(out)


def join_mixture(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with several ``--data`` as one, which names a mixture.

    Raises:
        UsageError: there are several, and one has no share.
    """
    kept: list[str] = []
    sources: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--data":
            sources += itertools.islice(rest, 1)
        elif argument.startswith("--data="):
            sources.append(argument.partition("=")[2])
        else:
            kept.append(argument)
    if len(sources) < 2:
        return list(arguments)
    for source in sources:
        if MIXED.fullmatch(source) is None or ", " in source:
            lack = "has no share that is a plain number" if ":" in source else "has no share"
            raise UsageError(
                f"several --data are mixed, and --data {source} {lack}: give each one, such as "
                "--data A:0.7 --data B:0.3"
            )
    return [*kept, "--data", ", ".join(sources)]


def peek_all(arguments: Sequence[str], flag: str) -> tuple[str, ...]:
    """Returns all values of a flag that takes several."""
    found: list[str] = []
    is_value = False
    for argument in arguments:
        if argument.startswith("--"):
            is_value = argument == flag
            found += [argument.partition("=")[2]] if argument.startswith(f"{flag}=") else []
        elif is_value:
            found.append(argument)
    return tuple(found)


def without(arguments: Sequence[str], *flags: str) -> list[str]:
    """Returns the arguments without these flags and their values."""
    kept: list[str] = []
    is_left_out = False
    for argument in arguments:
        if argument.startswith("--"):
            is_left_out = argument.partition("=")[0] in flags
        if not is_left_out:
            kept.append(argument)
    return kept


def peek(arguments: Sequence[str], flag: str) -> str | None:
    """Returns the last value of a flag that decides the defaults of the others, or None."""
    found = None
    for place, argument in enumerate(arguments):
        if argument == flag:
            found = next(iter(arguments[place + 1 :]), None)
        elif argument.startswith(f"{flag}="):
            found = argument.partition("=")[2]
    return found
