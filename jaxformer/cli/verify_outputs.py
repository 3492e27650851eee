"""What ``jaxformer verify`` writes and prints of a report, whatever the two models were made of."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxformer.errors import ResourceError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from jaxformer.parity.report.report import Report

# A part of the candidate was not compared, and no bug was found in the rest.
INCOMPLETE = 11
# How many of the things that got worse are listed.
MAX_WORSE = 20


def check_names(html: Path | None, json: Path | None) -> None:
    """Requires that a page and a JSON file are two files.

    Raises:
        ValueError: both have the same name.
    """
    if html is not None and json is not None and html.absolute() == json.absolute():
        raise ValueError(f"--html and --json name the same file: {html.absolute()}")


def check_files(*paths: Path | None) -> None:
    """Rejects, before anything is computed, files that could not be written at the end.

    Raises:
        UsageError: one is a folder.
        ResourceError: the folder of a file is missing.
    """
    for path in filter(None, paths):
        check_parent(path)
        if path.is_dir():
            raise UsageError(f"{path} is a folder: name a file in it")


def check_parent(path: Path) -> None:
    """Requires the folder in which a file or folder is to be written.

    Raises:
        ResourceError: it is missing.
    """
    if not path.absolute().parent.is_dir():
        raise ResourceError(f"{path}: the folder {path.parent} does not exist; make it first")


def write_files(report: "Report", html: Path | None, json: Path | None) -> None:
    """Writes a report to the files that were asked for.

    Raises:
        ResourceError: one cannot be written.
    """
    from jaxformer.parity.report.files import save_json
    from jaxformer.parity.report.html.writer import write_html

    if json is not None:
        save_json(report, json)
    if html is not None:
        write_html(report, html)


def exit_code(report: "Report", worse: Sequence[str] = ()) -> int:
    """Returns the exit code of a command, given a report and what got worse since another one."""
    return 1 if worse else {"bug": 1, "incomplete": INCOMPLETE}.get(report.verdict, 0)


def print_files(
    console: "Console",
    files: Mapping[str, object],
    against: Path | None,
    worse: Sequence[str],
    is_bug: bool,
) -> None:
    """Prints, before the report, what was written and what got worse.

    Args:
        console: where it is printed.
        files: where what was written is, by its kind; what is empty was not written.
        against: the file of the earlier report, if there is one.
        worse: what got worse since that.
        is_bug: whether the last line is the report's; else it is the first thing that got worse.
    """
    from rich.markup import escape

    from jaxformer.parity.report.text import one_line

    for kind, path in files.items():
        if path:
            console.print(f"[dim]{kind:<12}[/]  {escape(str(path))}")
    if against is not None:
        count = f"{len(worse)} things got worse" if worse else "nothing got worse"
        console.print(f"[dim]against     [/]  {escape(str(against))}: {count}")
        for line in worse[0 if is_bug else 1 :][:MAX_WORSE]:
            console.print(escape(f"  {one_line(line)}"), style="red")


def print_worst(console: "Console", against: Path | None, worse: Sequence[str]) -> None:
    """Prints the last line of a report that is no bug, but worse than an earlier one."""
    from rich.markup import escape

    from jaxformer.parity.report.text import one_line

    console.print(escape(f"worse than {against}: {one_line(worse[0])}"), style="bold red")
