"""``train --dashboard``: curves, speed, memory and samples on one screen, while a model trains."""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from jaxformer.hardware.memory import describe_peak_memory
from jaxformer.hardware.units import format_clock, format_thousands
from jaxformer.training.logging.progress import Reporter

# A step, and the loss after it.
Point = tuple[int, float]
# The dots of a braille character, two in a row and four in a column.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
NO_DOTS = 0x2800
LABEL_WIDTH = 8


class Dashboard(Reporter):
    """Shows what ``Reporter`` is told on one screen; as a ``Reporter`` without a terminal.

    Args:
        settings: those of ``Reporter``.
    """

    def __init__(self, *settings: Any, **more: Any):
        self._begin = time.monotonic()
        self._losses: list[Point] = []
        self._val_losses: list[Point] = []
        self._numbers: dict[str, str] = {"loss": "compiling"}
        self._sample = ""
        super().__init__(*settings, **more)
        if not self._is_live:
            self.note("--dashboard needs a terminal, and this is none: progress is printed instead")

    def _make_bar(self) -> Progress:
        columns = (
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        hidden = self.console.quiet or not self._is_live
        return _Screen(self._draw, *columns, console=self.console, disable=hidden)

    def steps_done(
        self, step: int, loss: float, tokens_per_second: float, ms: float, compute: str = ""
    ) -> None:
        """Adds a point to the curve, and shows the speed and the memory; see ``Reporter``."""
        self._losses.append((step, loss))
        self._numbers = {
            "loss": f"{loss:.3f}",
            "validation": self._describe_validation(),
            "speed": f"{format_thousands(tokens_per_second)} tokens/s",
            "step": f"{ms:.1f} ms",
            "compute": compute,
            "memory": describe_peak_memory(),
        }
        super().steps_done(step, loss, tokens_per_second, ms, compute)

    def evaluation(self, step: int, val_loss: float, seconds: float, **settings: Any) -> None:
        """Adds a point to the curve of the validation; see ``Reporter``."""
        self._val_losses.append((step, val_loss))
        self._numbers["validation"] = self._describe_validation()
        if not self._is_live:
            super().evaluation(step, val_loss, seconds, **settings)

    def sample(self, text: str) -> None:
        """Shows a text that the model wrote, in place of the one before."""
        self._sample = text.strip("\n")
        if not self._is_live:
            super().sample(text)

    def _describe_validation(self) -> str:
        if not self._val_losses:
            return ""
        best_step, best = min(self._val_losses, key=lambda point: point[1])
        return f"{self._val_losses[-1][1]:.4f}, best {best:.4f} after step {best_step}"

    def _draw(self) -> RenderableType:
        """Returns what stands above the bar."""
        size = self.console.size
        rows = max(4, min(14, size.height - 16))
        lines = max(1, min(8, size.height - rows - 13))
        numbers = Table.grid(padding=(0, 2))
        for name, value in self._numbers.items():
            if value:
                numbers.add_row(f"[dim]{name}", value)
        numbers.add_row("[dim]time", format_clock(time.monotonic() - self._begin))
        curve = draw_curves(
            self._losses,
            self._val_losses,
            columns=size.width - LABEL_WIDTH - 5,
            rows=rows,
            ascii_only=self.console.options.ascii_only,
        )
        sample = Text("\n".join(self._sample.splitlines()[:lines]), no_wrap=True, style="italic")
        titles = "loss, nats per token: training, [bold red]validation[/]"
        return Group(
            Panel(curve, title=titles, title_align="left"),
            Panel(numbers, title="now", title_align="left"),
            Panel(sample, title="the last sample", title_align="left"),
        )


class _Screen(Progress):
    """A bar below something else that is drawn anew each time."""

    def __init__(self, draw: Callable[[], RenderableType], *columns: Any, **settings: Any):
        self._draw = draw
        super().__init__(*columns, **settings)

    def get_renderables(self) -> Iterable[RenderableType]:
        """Yields what is drawn, and then the bar."""
        yield self._draw()
        yield from super().get_renderables()


def draw_curves(
    losses: Sequence[Point],
    val_losses: Sequence[Point],
    *,
    columns: int,
    rows: int,
    ascii_only: bool = False,
) -> Text:
    """Returns the curves of both losses as text.

    Args:
        losses: of the training, by rising step.
        val_losses: of the validation, by rising step; each is one mark.
        columns: of characters, beside the labels.
        rows: of characters, above the labels.
        ascii_only: whether to draw without braille characters, in a coarser grid.
    """
    points = [(step, loss) for step, loss in (*losses, *val_losses) if math.isfinite(loss)]
    if not points:
        return Text("\n" * rows)
    across, down = (1, 1) if ascii_only else (2, 4)
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(loss for _, loss in points), max(loss for _, loss in points)

    def place(step: int, loss: float) -> tuple[int, int]:
        """Returns the column and the row of a point, in dots."""
        x = (step - first) / max(last - first, 1) * (columns * across - 1)
        y = (high - loss) / max(high - low, 1e-12) * (rows * down - 1)
        return round(x), round(y)

    cells = [[NO_DOTS] * columns for _ in range(rows)]
    before = None
    for x, y in _mean_of_columns([place(*point) for point in losses if math.isfinite(point[1])]):
        # A steep curve has no gaps.
        start = y if before is None else before
        for dot in range(min(start, y), max(start, y) + 1):
            cells[dot // down][x // across] |= DOTS[dot % down][x % across]
        before = y
    marks = {
        (y // down, x // across)
        for x, y in (place(*point) for point in val_losses if math.isfinite(point[1]))
    }
    labels = {0: f"{high:.3f}", rows - 1: f"{low:.3f}"}
    text = Text(no_wrap=True)
    for row, line in enumerate(cells):
        text.append(f"{labels.get(row, ''):>{LABEL_WIDTH}} ", "dim")
        for column, cell in enumerate(line):
            if (row, column) in marks:
                text.append("o" if ascii_only else "●", "bold red")
            elif cell == NO_DOTS:
                text.append(" ")
            else:
                text.append("*" if ascii_only else chr(cell), "cyan")
        text.append("\n")
    text.append(f"{'step':>{LABEL_WIDTH}} {first}{last:>{columns - len(str(first))}}", "dim")
    return text


def _mean_of_columns(dots: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns one dot for each column that has some, at their mean height."""
    found: dict[int, list[int]] = {}
    for x, y in dots:
        found.setdefault(x, []).append(y)
    return [(x, round(sum(ys) / len(ys))) for x, ys in found.items()]
