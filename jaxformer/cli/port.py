"""``jaxformer port``: its options, and what it shows."""

import contextlib
import re
import shlex
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from jaxformer.cli.arguments import Switch, parse
from jaxformer.cli.progress import byte_bar
from jaxformer.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from jaxformer.porting.mapping.plans import Plan
    from jaxformer.porting.port import Port

# How many arrays that are left out are listed one by one.
MOST_NAMES = 8


@dataclass(frozen=True, kw_only=True)
class PortOptions:
    """Move a checkpoint between PyTorch and JAX, bit-exact, with its settings and vocabulary.

    Reads and writes .safetensors and .pt files, Hugging Face folders and the folders of training
    runs. Everything is read back and compared, and a certificate says what became of every array.
    `jaxformer port --list` alone prints the model types of Hugging Face that are known.
    """

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SRC")]
    """The checkpoint: a file, a folder, or the https address of a file (see --download)."""
    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DST")]
    """What to write: NAME.safetensors, NAME.pt, or a folder."""
    dialect: str | None = None
    """Whose names the arrays have; default what the checkpoint shows."""
    force: Switch = False
    """Take --dialect even where the checkpoint's config is of another model_type."""
    to: Literal["torch", "jax", "hf", "trainer", "peft"] | None = None
    """A PyTorch file, a run's folder, a Hugging Face folder, one from which transformers' Trainer
    goes on (resume_from_checkpoint), or PEFT's folder of adapters; default by the name of DST."""
    base: Path | None = None
    """The model that the adapters in SRC are of, where that is PEFT's folder; default the folder
    that they name."""
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
    """Arrays to leave out, by name or pattern ('*.rotary_emb.inv_freq'), and settings without
    effect."""
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
    """Runs ``jaxformer port``."""
    if list(arguments) == ["--list"]:
        from jaxformer.porting.model_types import list_model_types

        print(list_model_types(), end="")
        return
    port(parse(PortOptions, "jaxformer port", arguments), arguments)


def port(options: PortOptions, arguments: Sequence[str]) -> None:
    """Ports a checkpoint, and says on standard error what was done.

    Args:
        options: the settings.
        arguments: as they were given, for the certificate.

    Raises:
        JaxformerError: it cannot be ported; nothing is left behind.
    """
    from rich.console import Console
    from rich.markup import escape

    from jaxformer.porting.checkpoint import open_checkpoint
    from jaxformer.porting.port import plan_port, write_port
    from jaxformer.porting.source_checks import broken_companions, check_patterns
    from jaxformer.porting.targets import choose_target

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    target = choose_target(
        options.target,
        options.to,
        options.certificate,
        overwrite=options.overwrite,
        dialect=options.as_,
        dtype=options.dtype,
        weights_only=options.weights_only,
    )
    with _local_source(options, console) as source:
        began = time.monotonic()
        checkpoint = open_checkpoint(
            source,
            dialect=options.dialect,
            config=options.config,
            meta=options.meta,
            step=options.step,
            best=options.best,
            ignore=options.ignore,
            force=options.force,
            base=options.base,
        )
        check_patterns(checkpoint)
        for warning in (*checkpoint.raw.warnings, *broken_companions(checkpoint)):
            console.print(f"[yellow]warning:[/] {escape(warning)}")
        planned = plan_port(checkpoint, target)
        command = shlex.join(["jaxformer", "port", *arguments])
        with byte_bar(console, "writing", planned.nbytes) as advance:
            count = write_port(planned, source=options.source, command=command, progress=advance)
    rows = _summarize(planned, options.source)
    rows["time"] = f"{time.monotonic() - began:.1f} s, {count} arrays read back and compared"
    for name, value in rows.items():
        console.print(f"[dim]{name:<11}[/]  {escape(value)}")


def _summarize(port: "Port", source: str) -> dict[str, str]:
    """Returns the lines that say what a port does, by their titles."""
    from jaxformer.config_optimizers import OPTIMIZERS
    from jaxformer.hardware.units import format_count
    from jaxformer.porting.formats.detection import FORMAT_NAMES
    from jaxformer.porting.peft import has_adapters
    from jaxformer.porting.targets import CERTIFICATE

    imported, output, target = port.imported, port.output, port.target
    exported, raw = output.plan, port.checkpoint.raw
    dtypes = sorted({tensor.dtype.name for tensor in imported.tensors.values()})
    rows = {
        "from": f"{source} · {FORMAT_NAMES[raw.kind]} · {_describe_origin(imported)}",
        "to": f"{target.path} · {FORMAT_NAMES[target.format]} · {_describe_origin(exported)}",
        "model": f"{len(exported.tensors)} arrays, {format_count(port.parameter_count)} "
        f"parameters, {', '.join(dtypes)}" + (f" to {target.dtype}" if port.rounding else ""),
    }
    if has_adapters(imported) and target.format != "peft" and not has_adapters(exported):
        rows["adapters"] = "merged into the weights"
    if imported.dropped:
        rows["left out"] = _describe_names(imported.dropped)
    if port.rounding:
        worst, error = max(port.rounding.items(), key=lambda item: item[1])
        rows["rounding"] = "none: every number is exact"
        if error:
            rows["rounding"] = f"at most {error:.3g} ({worst})"
    if output.optimizer is not None:
        title = OPTIMIZERS[output.optimizer.kind].title
        rows["optimizer"] = f"{title} after {output.optimizer.count} steps"
        if output.optimizer.note:
            rows["optimizer"] += f"; {output.optimizer.note}"
        if target.format == "torch" and output.order is None:
            rows["optimizer"] += (
                "; the order of named_parameters() is not known here, so match the groups by "
                "their param_names"
            )
    elif raw.optimizer is not None:
        reason = port.without_optimizer or f"{FORMAT_NAMES[target.format]}s hold none"
        reason += "; --to trainer keeps it" if target.format == "huggingface" else ""
        rows["optimizer"] = "left out" + ("" if target.weights_only else f": {reason}")
    elif raw.unread_optimizer:
        rows["optimizer"] = f"left out: {raw.unread_optimizer}"
    if target.format == "trainer":
        steps = [f"{k}={v}" for k, v in output.trainer_settings.items() if k.endswith("_steps")]
        rows["trainer"] = (
            f"trainer_state.json has {', '.join(steps)}, which the Trainer takes in place of its "
            "arguments: set them there"
        )
    if raw.unread:
        rows["not read"] = f"{_describe_names(raw.unread)}, beside the weights"
    if output.vocabulary is not None:
        rows["vocabulary"] = f"{len(output.vocabulary)} characters"
    elif port.checkpoint.tokenizer_file is not None:
        copied = "copied" if output.is_folder else "left where it is, for sample's --meta"
        rows["tokenizer"] = f"{port.checkpoint.tokenizer_file.name}: {copied}"
    elif hasattr(imported.module, "config") and hasattr(imported.module.config, "vocab_size"):
        rows["vocabulary"] = "unknown: name a meta.pkl or tokenizer.json with --meta"
    if imported.origin.buffers and target.format != "torch" and not port.has_same_dialect:
        rows["tables"] = (
            f"the last bits of {', '.join(imported.origin.buffers)} differ from what jaxformer "
            "computes, which is used"
        )
    inside = [target.path / CERTIFICATE] if output.is_folder else []
    rows["certificate"] = ", ".join(map(str, (*inside, *target.certificates)))
    return rows


def _describe_names(names: Sequence[str]) -> str:
    """Returns names in a line: many of them by what they begin with."""
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    starts = Counter(re.sub(r"^((?:[a-z]+\.)?\w+\.).*", r"\1*", name) for name in names)
    return ", ".join(f"{count} arrays {start}" for start, count in starts.items())


def _describe_origin(plan: "Plan") -> str:
    return f"{plan.origin.dialect.name} {plan.origin.kind}"


@contextlib.contextmanager
def _local_source(options: PortOptions, console: "Console") -> Iterator[Path]:
    """Gives the source as a path, after it was fetched if need be."""
    from jaxformer.porting.formats.download import fetch_file, is_address

    if not is_address(options.source):
        yield Path(options.source)
        return
    if not options.download or options.sha256 is None:
        raise UsageError(
            f"{options.source} is not on this machine, and nothing is fetched unasked: give "
            "--download and --sha256 with the hash of the file"
        )
    folder = next(path for path in options.target.absolute().parents if path.is_dir())
    with (
        byte_bar(console, "fetching", None) as advance,
        fetch_file(options.source, options.sha256, folder, advance) as path,
    ):
        yield path
