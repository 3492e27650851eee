"""``jaxformer tokenize``: options, and a folder of tokens made of texts."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jaxformer.cli.arguments import Switch, parse
from jaxformer.cli.progress import byte_bar
from jaxformer.errors import UsageError
from jaxformer.execution.cores import count_cores

if TYPE_CHECKING:
    from rich.console import Console

LINE_SECONDS = 10.0


@dataclass(frozen=True)
class TokenizeOptions:
    """Make a folder of tokens of texts, for train --data.

    A command that was ended at any moment goes on where it was when it is given again.
    """

    sources: Annotated[
        tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="SOURCE...")
    ] = ()
    """Texts, .jsonl, .parquet, all also as .gz or .zst (not Parquet), folders of them, and folders
    saved by Hugging Face's datasets; with --download datasets of its hub, OWNER/NAME@COMMIT or
    OWNER/NAME@COMMIT/PATH, where PATH may be a pattern. Records of a prompt and an answer, or of
    messages, are conversations: their answers alone are trained on."""
    out: Path | None = None
    """The folder to make."""
    tokenizer: str | None = None
    """A tokenizer.json, a folder with one, chars, or bytes."""
    train_bpe: int | None = None
    """In its place: train a tokenizer of so many tokens on the texts."""
    val: tuple[Path, ...] = ()
    """Texts to validate with; default a part of the sources."""
    val_fraction: float = 0.0005
    """The share of each source to validate with: the end of a text, every so many-th record."""
    field: str = "text"
    """The field of a record, or the column of a table, that has its text."""
    end_of_text: str | None = None
    """The token after every document, or none; default the one that the tokenizer names, or
    the config.json of the model in its folder."""
    workers: int | None = None
    """Processes; default as many as there are cores."""
    shard_tokens: int = 1 << 26
    """Tokens of a shard."""
    download: Switch = False
    """Fetch sources of the Hugging Face hub over the network."""
    check: Switch = False
    """Read the folder --out again, and compare every file with its SHA-256."""
    debug: Switch = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise ValueError(f"--val-fraction must be in [0, 1): got {self.val_fraction}")
        for name in ("workers", "shard_tokens", "train_bpe"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be positive: got {value}")


def run(arguments: Sequence[str]) -> None:
    """Makes a folder of tokens, or checks one.

    Raises:
        JaxformerError: it cannot be made, or it is damaged.
    """
    options: TokenizeOptions = parse(TokenizeOptions, "jaxformer tokenize", arguments)
    if options.out is None:
        raise UsageError("--out says which folder to make")

    from jaxformer.data.making import TokenSettings, check_folder, make_folder

    if options.check:
        if options.sources:
            raise UsageError("--check reads the folder --out alone: leave out the sources")
        index = check_folder(options.out)
    else:
        if not options.sources:
            raise UsageError("name a file or folder of texts")
        own = {"sources", "val", "out", "workers", "model_end"}
        names = TokenSettings.__dataclass_fields__.keys() - own
        sources, val = (options.sources, options.val)
        if options.download:
            sources, val = _fetch(sources), _fetch(val)
        settings = TokenSettings(
            **{name: getattr(options, name) for name in names},
            sources=sources,
            val=val,
            out=options.out,
            workers=options.workers or count_cores(),
            model_end=_end_of_model(options),
        )
        with _progress() as report:
            index = make_folder(settings, report)
    for line in _summarize(index, options.out):
        print(line)


def _end_of_model(options: TokenizeOptions) -> int | None:
    """Returns the id with which the model in a tokenizer's folder ends a text, if it is asked."""
    folder = options.tokenizer
    if options.end_of_text is not None or folder is None or not Path(folder).is_dir():
        return None
    from jaxformer.porting.checkpoint import stored_end_of_text

    return stored_end_of_text(Path(folder))


def _fetch(sources: tuple[Path, ...]) -> tuple[Path, ...]:
    """Returns the sources with what is on the hub fetched; shows how far it is."""
    from rich.console import Console
    from rich.markup import escape

    from jaxformer.data.hub import fetch_sources

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with byte_bar(console, "fetching", None) as advance:

        def begin(size: int, left_out: list[str]) -> None:
            names = f"; left out: {', '.join(left_out[:8])}" if left_out else ""
            more = f" and {len(left_out) - 8:,} more" if len(left_out) > 8 else ""
            console.print(escape(f"{size / 1e6:,.1f} MB to fetch{names}{more}"))

        return fetch_sources(sources, begin, advance)


def _summarize(index: dict[str, Any], out: Path) -> list[str]:
    lines = []
    for name, split in index["splits"].items():
        length = split["bytes"] / max(1, split["tokens"])
        lines.append(
            f"{name}: {split['tokens']:,} tokens in {split['documents']:,} documents and "
            f"{len(split['shards']):,} shards, {length:.2f} bytes a token"
            + (f"; {split['answers']:,} tokens of answers count" if "answers" in split else "")
        )
    return [*lines, f"{out}: {index['vocab_size']:,} different tokens, {index['dtype']}"]


@contextmanager
def _progress() -> Iterator[Callable[[int, int, int], None]]:
    """Shows a bar on a terminal and lines elsewhere; gives what they are to show."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    bar = Progress(
        TextColumn("[bold]tokenizing"),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TextColumn("{task.fields[tokens]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    lines = _Lines(console)
    with bar:
        task = bar.add_task("tokenizing", total=None, tokens="")

        def report(total: int, done: int, tokens: int) -> None:
            bar.update(task, total=total, advance=done, tokens=f"{tokens:,} tokens")
            lines.report(total, done, tokens)

        yield report


class _Lines:
    """Writes a line now and then where there is no terminal."""

    def __init__(self, console: "Console"):
        self._console = console
        self._begin = self._last = time.monotonic()
        self._done = 0

    def report(self, total: int, done: int, tokens: int) -> None:
        self._done += done
        now = time.monotonic()
        if self._console.is_terminal or now - self._last < LINE_SECONDS:
            return
        self._last = now
        speed = self._done / (now - self._begin)
        self._console.print(
            f"{self._done / 1e6:,.0f} of {total / 1e6:,.0f} MB · {speed / 1e6:.1f} MB/s · "
            f"{tokens:,} tokens"
        )
