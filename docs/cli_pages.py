"""The reference of the command line, from the parsers of the commands."""

import argparse
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import tyro

from jaxformer.cli import inspect
from jaxformer.cli.completions import CompletionsOptions
from jaxformer.cli.plan import PlanOptions
from jaxformer.cli.port import PortOptions
from jaxformer.cli.runs import RunsOptions
from jaxformer.cli.sample_options import SampleOptions
from jaxformer.cli.tokenize import TokenizeOptions
from jaxformer.cli.train import TrainOptions
from jaxformer.cli.verify import VerifyOptions
from jaxformer.cli.verify_code import VerifyCodeOptions
from jaxformer.training.presets import nano

DEFAULT = re.compile(r"\s*\((?:default: (?P<value>.*?)|(?P<required>required))\)$", re.DOTALL)


def commands() -> str:
    """Returns a section for each command, with a table of its options."""
    found: dict[str, Any] = {
        "train": TrainOptions,
        "sample": SampleOptions,
        "tokenize": TokenizeOptions,
        "port": PortOptions,
        "verify": VerifyOptions,
        "verify --torch --jax": VerifyCodeOptions,
        "runs": RunsOptions,
        "inspect": inspect.TreeOptions,
        **{f"inspect {what}": options for what, options in inspect.OPTIONS.items()},
        "plan": PlanOptions,
        "completions": CompletionsOptions,
    }
    return "\n\n".join(_section(name, options, found) for name, options in found.items())


def _section(name: str, options: Any, known: Mapping[str, Any]) -> str:
    parser = _parser(options)
    level = "###" if name.partition(" ")[0] in known and " " in name else "##"
    parts = [f"{level} jaxformer {name}", _sentence(parser.description or "")]
    for group in parser._action_groups:
        rows = [_row(action) for action in _listed(group)]
        if not rows:
            continue
        title = "" if group.title in ("positional arguments", "options") else group.title
        if title:
            parts.append(f"**{title.removesuffix(' options')}**: {_sentence(group.description)}")
        # The default column says of which preset, where it is one.
        column = "default of `nano`" if "config" in str(title) else "default"
        parts.append("\n".join([f"| option | {column} | |", "|---|---|---|", *rows]))
    return "\n\n".join(part for part in parts if part)


def _parser(options: Any) -> argparse.ArgumentParser:
    default = {}
    if options in (TrainOptions, PlanOptions):
        default = {"default": options(config=nano())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return tyro.extras.get_parser(options, **default)


def _listed(group: Any) -> Iterator[argparse.Action]:
    for action in group._group_actions:
        if "--help" not in action.option_strings:
            yield action


def _row(action: argparse.Action) -> str:
    text = " ".join((action.help or "").split())
    match = DEFAULT.search(text)
    said = text[: match.start()] if match else text
    default = "required" if match and match["required"] else (match["value"] if match else "")
    default = "" if default in ("None", "False") else default
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.dest}`"
    values = "" if action.metavar is None else f" `{_plain(action.metavar)}`"
    shown = f"`{default}`" if default not in ("", "required") else default
    cells = (names + values, shown, said)
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _plain(metavar: Any) -> str:
    return re.sub(
        r"\{None\}\||(?<=\{)None,", "", " ".join(metavar) if isinstance(metavar, tuple) else metavar
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _sentence(text: str | None) -> str:
    """Returns a description; its paragraphs stay, and what it raises is of no interest here."""
    kept = (text or "").partition("\nRaises:")[0]
    paragraphs = re.split(r"\n\s*\n", kept.strip())
    return "\n\n".join(" ".join(part.split()).replace("``", "`") for part in paragraphs)
