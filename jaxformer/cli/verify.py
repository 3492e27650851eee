"""``jaxformer verify``: its options, and the two checkpoints run, judged and reported."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from jaxformer.cli.arguments import Switch, parse
from jaxformer.cli.verify_outputs import (
    check_files,
    check_names,
    check_parent,
    exit_code,
    print_files,
    print_worst,
    write_files,
)
from jaxformer.errors import JaxformerError, UsageError

if TYPE_CHECKING:
    from jaxformer.parity.report.report import Report
    from jaxformer.parity.session import ParitySession

Mode = Literal["forward", "grad", "train", "generate"]
# The modes in which an option has an effect, if not in all.
ONLY_IN: dict[str, tuple[Mode, ...]] = {
    "steps": ("train",),
    "dropout": ("train",),
    "tokens": ("generate",),
    "dtype": ("forward", "grad"),
    "repro": ("forward", "grad"),
    "state": ("forward", "grad"),
    "batch": ("forward", "grad", "train"),
}


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Run two checkpoints side by side, and name the first place where they differ.

    A is run in PyTorch, B in JAX: each a .safetensors or .pt file, a Hugging Face folder or the
    folder of a run. Exit code 0: they are equal, up to rounding. 1: there is a bug, and the last
    line says where. 11: a part of B was not compared. Models of your own code: --torch
    MODULE:FUNCTION --jax MODULE:FUNCTION --inputs FILE.npz.
    """

    reference: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="A")]
    """The reference: a Hugging Face folder is run by transformers, if that is installed."""
    candidate: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="B")]
    """The candidate, which is verified."""
    data: str = "random"
    """What both read: a text file (or a corpus of train.py), or random tokens."""
    mode: Mode = "grad"
    """The outputs alone; gradients too; steps of training; or text generated token by token.
    train and generate are for language models with a head."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """The dtype whose rounding is measured, beside float64; default that of B's weights. For --mode
    forward and grad."""
    batch: int | None = None
    """How many texts; default 1. For --mode forward, grad and train."""
    length: int | None = None
    """How many tokens each text has; default 256, or as many as fit."""
    steps: int | None = None
    """How many steps of training; default 10. For --mode train."""
    tokens: int | None = None
    """How many tokens to generate; default 20. For --mode generate."""
    dropout: Switch = False
    """Train with dropout, both sides dropping the same units. For --mode train."""
    seed: int = 0
    """The seed of random tokens."""
    html: Path | None = None
    """Write the report to this file as a page for a browser."""
    json: Path | None = None
    """Write the report to this file as JSON."""
    against: Path | None = None
    """An earlier report (of --json); whatever got worse since then is an error too."""
    stream: Literal["auto", "always", "never"] = "auto"
    """Compare block by block from the files; auto: where whole models would not fit in memory."""
    state: Path | None = None
    """The folder from which such a comparison resumes after it was killed; default in the cache.
    For --mode forward and grad."""
    repro: Path | None = None
    """A folder to write, with a script that shows the first bug without A and B. For --mode forward
    and grad."""
    dialect_a: str | None = None
    """The dialect of A's array names; default what the checkpoint shows."""
    dialect_b: str | None = None
    """The dialect of B's array names; default what the checkpoint shows."""
    config_a: Path | None = None
    """A JSON file with settings of A, which replace those in the checkpoint."""
    config_b: Path | None = None
    """A JSON file with settings of B, which replace those in the checkpoint."""
    ignore: tuple[str, ...] = ()
    """Arrays of A and B to leave out, by name or pattern, and settings without effect."""
    force: Switch = False
    """Take a dialect even where the checkpoint's config is of another model_type."""
    encoding: str = "utf-8"
    """The encoding of the text."""
    unknown: Literal["error", "skip", "replace"] = "error"
    """What to do with characters that the models do not know."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, and use those that are there."""
    debug: Switch = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        for name in ("batch", "length", "steps", "tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1: got {value}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must be in [0, 2^63): got {self.seed}")
        if self.state is not None and self.stream == "never":
            raise ValueError("--state is for --stream always and auto: got --stream never")
        if not self.data:
            raise ValueError("--data must name a text file, or be random")
        for name, modes in ONLY_IN.items():
            if getattr(self, name) not in (None, False) and self.mode not in modes:
                raise ValueError(
                    f"--{name} is for --mode {' and '.join(modes)}: got --mode {self.mode}"
                )
        check_names(self.html, self.json)


def run(arguments: Sequence[str]) -> int:
    """Compares two checkpoints and prints the report on standard output.

    Args:
        arguments: of the command line.

    Returns:
        The exit code: 0 if the two are equal up to rounding, 1 if there is a bug, or if something
        got worse since an earlier report, 11 if a part of the candidate was not compared.

    Raises:
        JaxformerError: the comparison cannot be made.
    """
    if any(argument.partition("=")[0] in ("--torch", "--jax") for argument in arguments):
        from jaxformer.cli import verify_code

        return verify_code.run(arguments)
    options: VerifyOptions = parse(VerifyOptions, "jaxformer verify", arguments)

    from jaxformer.hardware.compilation_cache import use_compilation_cache
    from jaxformer.parity.recording.torch_values import require_torch
    from jaxformer.parity.report.files import load_report
    from jaxformer.parity.report.regressions import compare_reports

    require_torch()
    use_compilation_cache(options.compilation_cache)
    before = None if options.against is None else load_report(options.against)
    check_files(options.html, options.json)
    _check_repro(options.repro)

    import jax

    with jax.enable_x64(True):
        with _progress_bar() as progress:
            session = _open_session(options, progress)
            report = session.run(
                dtype=options.dtype,
                steps=options.steps,
                tokens=options.tokens,
                dropout=options.dropout,
            )
        repro = _write_repro(session, report, options.repro)
    worse = [] if before is None else compare_reports(report, before)
    try:
        write_files(report, options.html, options.json)
    finally:
        # A full disk is no reason to lose what was found.
        _print(report, worse, repro, options)
    return exit_code(report, worse)


def _check_repro(folder: Path | None) -> None:
    """Rejects, before anything is computed, a folder that could not be written at the end.

    Raises:
        UsageError: it is in use.
        ResourceError: the folder that it would be in is missing.
    """
    if folder is None:
        return
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UsageError(f"--repro {folder} exists: give the name of a new folder")
    check_parent(folder)


@contextlib.contextmanager
def _progress_bar() -> "Iterator[Callable[[int, int], None]]":
    """Yields what shows how far a long comparison is, where standard error is a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = TextColumn("comparing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


def _open_session(
    options: VerifyOptions, progress: "Callable[[int, int], None]"
) -> "ParitySession":
    from jaxformer.data.corpora import load_corpus
    from jaxformer.parity.session import ParitySession
    from jaxformer.parity.sources.checkpoints import open_source
    from jaxformer.parity.sources.tokens import TextInput
    from jaxformer.parity.streaming.choice import Streaming
    from jaxformer.porting.source_checks import check_patterns

    text = None
    if options.data != "random":
        corpus = load_corpus(options.data, encoding=options.encoding)
        text = TextInput(options.data, corpus.text, options.unknown)
    sources = [
        open_source(
            path,
            letter,
            dialect=dialect,
            config=config,
            ignore=options.ignore,
            force=options.force,
        )
        for path, letter, dialect, config in (
            (options.reference, "a", options.dialect_a, options.config_a),
            (options.candidate, "b", options.dialect_b, options.config_b),
        )
    ]
    check_patterns(*(source.checkpoint for source in sources))
    for source in sources:
        for warning in source.checkpoint.raw.warnings:
            print(f"jaxformer: warning: {warning}", file=sys.stderr)
    return ParitySession(
        *sources,
        mode=options.mode,
        text=text,
        seed=options.seed,
        batch=options.batch,
        length=options.length,
        streaming=Streaming(options.stream, options.state),
        progress=progress,
    )


def _write_repro(session: "ParitySession", report: "Report", folder: Path | None) -> str:
    """Writes the repro of the first bug, if it is wanted, and returns where or why not."""
    if folder is None or not report.root_causes:
        return ""
    try:
        session.write_repro(folder, report)
    except JaxformerError as error:
        return f"not written: {error}"
    return str(folder)


def _print(report: "Report", worse: Sequence[str], repro: str, options: VerifyOptions) -> None:
    """Prints the report; its last line is the verdict, or what got worse if all is equal."""
    from rich.markup import escape

    from jaxformer.hardware.screen import Screen
    from jaxformer.parity.report.terminal import print_report

    console = Screen(highlight=False, soft_wrap=True)
    for letter, side in (("A", "reference"), ("B", "candidate")):
        console.print(f"[dim]{letter}, {side}[/]  {escape(str(report.about[side]))}")
    inputs = f"{report.about['data']}; {report.about['inputs']}"
    console.print(f"[dim]inputs      [/]  {escape(inputs)}")
    console.print(f"[dim]compared    [/]  {escape(str(report.about['compared']))}")
    files = {"json": options.json, "html": options.html, "repro": repro}
    is_bug = report.verdict == "bug"
    print_files(console, files, options.against, worse, is_bug)
    console.print()
    print_report(report, console)
    if worse and not is_bug:
        print_worst(console, options.against, worse)
