"""Training runs as tables in the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from jaxformer.hardware.screen import Screen
from jaxformer.hardware.units import format_thousands
from jaxformer.inspection.runs import RunSummary

COLOURS = {"training": "cyan", "done": "green", "diverged": "red", "stopped": "yellow"}


def print_runs(runs: Sequence[RunSummary]) -> None:
    """Prints a line for each run: its state, its steps, its losses and its speed."""
    table = _table("run", "state", "steps", "training loss", "validation loss", "best", "tokens/s")
    for run in runs:
        best, speed = run.best, run.tokens_per_second
        table.add_row(
            escape(str(run.folder)),
            f"[{COLOURS[run.state]}]{run.state}[/]",
            f"{run.step:,}/{run.config.steps:,}",
            _loss(run.train_loss),
            _loss(run.val_loss),
            "-" if best is None else f"{best[1]:.4f} at {best[0]:,}",
            "-" if speed is None else format_thousands(speed),
            escape(run.config.data),
        )
    _print(table)


def print_differences(runs: Sequence[RunSummary], different: Mapping[str, Sequence[Any]]) -> None:
    """Prints the settings in which runs differ: a line for each, a column for each run."""
    if not different:
        Screen(highlight=False).print("all settings are equal")
        return
    table = _table("setting", *(escape(str(run.folder)) for run in runs), last=False)
    for name, values in different.items():
        table.add_row(name, *(escape("none" if v is None else str(v)) for v in values))
    _print(table)


def _table(*names: str, last: bool = True) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for place, name in enumerate(names):
        table.add_column(name, justify="left" if place < 2 else "right", no_wrap=True)
    if last:
        table.add_column("data")
    return table


def _loss(loss: float | None) -> str:
    return "-" if loss is None else f"{loss:.4f}"


def _print(table: Table) -> None:
    console = Screen(highlight=False)
    if not console.is_terminal:
        # Whoever reads the lines next folds them.
        console.width = 1000
    console.print(table)
