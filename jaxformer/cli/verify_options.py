"""The settings of ``jaxformer verify``, free of JAX."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxformer.cli.arguments import Switch, parse

Mode = Literal["forward", "grad", "train", "generate"]
# What an option does only in some modes.
ONLY_IN: dict[str, tuple[Mode, ...]] = {
    "steps": ("train",),
    "dropout": ("train",),
    "tokens": ("generate",),
    "dtype": ("forward", "grad"),
    "repro": ("forward", "grad"),
    "batch": ("forward", "grad", "train"),
}


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Run two checkpoints side by side and name the first place where they part.

    A is run in PyTorch, B in JAX: each a .safetensors or .pt file, a Hugging Face folder or the
    folder of a run. Exit code 0: they are equal, up to rounding. 1: there is a bug, and the last
    line says where.
    """

    reference: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="A")]
    """What is right: run by transformers if it is its folder and that is installed."""
    candidate: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="B")]
    """What is to be verified."""
    data: str = "random"
    """What both read: a text file (or a corpus of train.py), or random tokens."""
    mode: Mode = "grad"
    """The output alone; gradients too; steps of training; or text written token by token."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Whose rounding is measured, beside float64; default that of B's weights."""
    batch: int | None = None
    """How many texts; default 1."""
    length: int | None = None
    """How many tokens of each; default 256, or as many as fit."""
    steps: int | None = None
    """How many steps of training; default 10."""
    tokens: int | None = None
    """How many tokens to write; default 20."""
    dropout: Switch = False
    """Train with dropout, both sides dropping the same units."""
    seed: int = 0
    """Of random tokens."""
    html: Path | None = None
    """Write the report as a page to look at."""
    json: Path | None = None
    """Write the report as numbers."""
    against: Path | None = None
    """An earlier report (of --json); whatever got worse since then is an error too."""
    repro: Path | None = None
    """A folder to write, with a script that shows the first bug without A and B."""
    dialect_a: str | None = None
    """Whose names A's arrays have; default what the checkpoint shows."""
    dialect_b: str | None = None
    """The same of B."""
    config_a: Path | None = None
    """A's settings as JSON, which go before those in the checkpoint."""
    config_b: Path | None = None
    """The same of B."""
    encoding: str = "utf-8"
    """Of the text."""
    unknown: Literal["error", "skip", "replace"] = "error"
    """What to do with characters that the models do not know."""
    debug: Switch = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        for name in ("batch", "length", "steps", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1: got {value}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must be in [0, 2^63): got {self.seed}")
        if not self.data:
            raise ValueError("--data must name a text file, or be random")
        for name, modes in ONLY_IN.items():
            if getattr(self, name) not in (None, False) and self.mode not in modes:
                raise ValueError(
                    f"--{name} is for --mode {' and '.join(modes)}: got --mode {self.mode}"
                )
        written = [path.absolute() for path in (self.html, self.json) if path is not None]
        if len(set(written)) < len(written):
            raise ValueError(f"--html and --json name the same file: {written[0]}")


def run(arguments: Sequence[str]) -> int:
    """Runs ``jaxformer verify``; see ``cli.verify``."""
    options: VerifyOptions = parse(VerifyOptions, "jaxformer verify", arguments)

    from jaxformer.cli.verify import verify

    return verify(options)
