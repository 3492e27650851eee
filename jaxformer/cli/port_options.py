"""The settings of ``jaxformer port``, free of JAX."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxformer.cli.arguments import Switch, parse


@dataclass(frozen=True, kw_only=True)
class PortOptions:
    """Move a checkpoint between PyTorch and JAX, bit for bit, with its settings and vocabulary.

    Reads .safetensors and .pt files, Hugging Face folders and the folders of our runs, and writes
    them. All is read back and compared, and a certificate says what became of every array.
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SRC")]
    """The checkpoint: a file, a folder, or the https address of a file (see --download)."""
    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    """What to write: NAME.safetensors, NAME.pt, or a folder."""
    dialect: str | None = None
    """Whose names the arrays have; default what the checkpoint shows."""
    to: Literal["torch", "jax", "hf"] | None = None
    """A PyTorch file, a run's folder, or a Hugging Face folder; default by the name of DST."""
    as_: Annotated[str | None, tyro.conf.arg(name="as", metavar="DIALECT")] = None
    """Whose names to write; default those that the arrays came with, else torch_ref's."""
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"] | None,
        tyro.conf.arg(aliases=["--cast"]),
    ] = None
    """Round the weights to this; the largest error is reported."""
    config: Path | None = None
    """Settings as JSON, which go before those in the checkpoint."""
    meta: Path | None = None
    """nanoGPT's meta.pkl, or a tokenizer.json; default what lies beside the checkpoint."""
    ignore: tuple[str, ...] = ()
    """Arrays to leave out, by name or pattern ('*.rotary_emb.inv_freq')."""
    step: int | None = None
    """Which step of a run; default the newest."""
    best: Switch = False
    """The step of a run with the lowest validation loss."""
    weights_only: Switch = False
    """Leave out the optimizer's state."""
    overwrite: Switch = False
    """Replace DST: a file, or a folder in which there is nothing but what this command wrote."""
    certificate: Path | None = None
    """Where to write the certificate too; default DST.certificate.json, or in DST if a folder."""
    download: Switch = False
    """Fetch SRC, one file, over the network; needs --sha256."""
    sha256: str | None = None
    """What the file that is fetched must have."""
    debug: Switch = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if self.step is not None and self.best:
            raise ValueError("--step and --best exclude each other")
        if self.sha256 is not None and not re.fullmatch("[0-9a-fA-F]{64}", self.sha256):
            raise ValueError(f"--sha256 must be 64 hexadecimal digits: got {self.sha256}")
        if self.download and self.sha256 is None:
            raise ValueError("--download needs --sha256: nothing unknown is opened")


def run(arguments: Sequence[str]) -> None:
    """Runs ``jaxformer port``; see ``cli.port``."""
    options: PortOptions = parse(PortOptions, "jaxformer port", arguments)

    from jaxformer.cli.port import port

    port(options, list(arguments))
