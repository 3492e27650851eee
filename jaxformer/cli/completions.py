"""``jaxformer completions``: a script that makes a shell complete commands and flags."""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro

from jaxformer.cli.arguments import parse

Shell = Literal["bash", "zsh", "fish"]
WHERE: dict[Shell, str] = {
    "bash": "jaxformer completions bash > ~/.local/share/bash-completion/completions/jaxformer",
    "zsh": "jaxformer completions zsh > DIRECTORY/_jaxformer, with DIRECTORY in $fpath",
    "fish": "jaxformer completions fish > ~/.config/fish/completions/jaxformer.fish",
}


@dataclass(frozen=True)
class CompletionsOptions:
    """Print a script that makes a shell complete the commands and flags of jaxformer."""

    shell: tyro.conf.Positional[Shell]
    """The shell: bash, zsh or fish."""


def run(arguments: Sequence[str]) -> None:
    """Prints the script; its first line says where it belongs.

    Raises:
        UsageError: there is no such shell.
    """
    options: CompletionsOptions = parse(CompletionsOptions, "jaxformer completions", arguments)
    print(_with_comment(_script(options.shell), f"# {WHERE[options.shell]}"))


def _with_comment(script: str, comment: str) -> str:
    """Returns a script with a comment; zsh wants its own mark to stay in the first line."""
    first, _, rest = script.partition("\n")
    if first.startswith("#"):
        return f"{first}\n{comment}\n{rest}"
    return f"{comment}\n{script}"


def _script(shell: Shell) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        tyro.cli(_all_commands(), prog="jaxformer", args=["--tyro-write-completion", shell, "-"])
    return printed.getvalue().strip()


def _all_commands() -> Any:
    """Returns the options of all commands, as tyro takes them."""
    from jaxformer.cli import inspect
    from jaxformer.cli.plan import PlanOptions
    from jaxformer.cli.port import PortOptions
    from jaxformer.cli.runs import RunsOptions
    from jaxformer.cli.sample_options import SampleOptions
    from jaxformer.cli.tokenize import TokenizeOptions
    from jaxformer.cli.train import TrainOptions
    from jaxformer.cli.verify import VerifyOptions

    def named(name: str, options: Any) -> Any:
        return Annotated[options, tyro.conf.subcommand(name)]

    inspections = [named(name, options) for name, options in inspect.OPTIONS.items()]
    commands = {
        "train": TrainOptions,
        "sample": SampleOptions,
        "tokenize": TokenizeOptions,
        "port": PortOptions,
        "verify": VerifyOptions,
        "runs": RunsOptions,
        "inspect": _union(inspections),
        "plan": PlanOptions,
        "completions": CompletionsOptions,
    }
    return _union([named(name, options) for name, options in commands.items()])


def _union(options: Sequence[Any]) -> Any:
    union = options[0]
    for option in options[1:]:
        union = union | option
    return union
