"""What the person at the terminal sees while a model trains."""

import math
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from jaxformer.hardware.memory import describe_peak_memory
from jaxformer.hardware.screen import Screen
from jaxformer.hardware.units import format_clock, format_thousands


class Reporter:
    """Shows a progress bar on a terminal, and plain lines elsewhere.

    Args:
        steps: of the whole run.
        first_step: how many of them were made before.
        console: where to write; default standard output.
        line_interval: seconds between plain lines.
        quiet: whether to show nothing.
    """

    def __init__(
        self,
        steps: int,
        first_step: int = 0,
        console: Console | None = None,
        line_interval: float = 5.0,
        *,
        quiet: bool = False,
    ):
        self.console = console or Screen(highlight=False, soft_wrap=True, quiet=quiet)
        self._steps = steps
        self._line_interval = line_interval
        self._last_line = 0.0
        self._val_loss = math.nan
        self._is_live = self.console.is_terminal
        self._bar = self._make_bar()
        self._task = self._bar.add_task(
            "train", total=steps, completed=first_step, numbers="compiling"
        )
        self._bar.start()

    def when_reader_leaves(self, call: Callable[[], None]) -> None:
        """Calls a function, instead of ending the run, once nobody reads what is shown."""
        if isinstance(self.console, Screen):
            self.console.reader_left = call

    def _make_bar(self) -> Progress:
        return Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=self.console,
            disable=self.console.quiet or not self._is_live,
        )

    def introduce(
        self, summary: dict[str, str], warnings: Sequence[str], notes: Sequence[str]
    ) -> None:
        """Shows what is about to run, by name, and what is to be known about it."""
        table = Table.grid(padding=(0, 2))
        for name, value in summary.items():
            table.add_row(f"[dim]{name}", escape(value))
        self.console.print(table)
        for warning in warnings:
            self.warn(warning)
        for note in notes:
            self.note(note)

    def steps_done(
        self, step: int, loss: float, tokens_per_second: float, ms: float, compute: str = ""
    ) -> None:
        """Shows how many steps are made, and how fast.

        Args:
            step: steps made so far.
            loss: of the last one, in nats per token.
            tokens_per_second: over the last call.
            ms: milliseconds a step took in it.
            compute: operations per second or utilization, in words.
        """
        numbers = f"loss {loss:.3f}"
        if math.isfinite(self._val_loss):
            numbers += f" · val {self._val_loss:.3f}"
        numbers += f" · {format_thousands(tokens_per_second)} tokens/s · {ms:.1f} ms/step"
        numbers += (f" · {compute}" if compute else "") + f" · {describe_peak_memory()}"
        self._bar.update(self._task, completed=step, numbers=numbers)
        now = time.monotonic()
        if not self._is_live and (
            now - self._last_line >= self._line_interval or step == self._steps
        ):
            self._last_line = now
            left = (self._steps - step) * ms / 1000
            self.console.print(f"step {step}/{self._steps} · {numbers} · ETA {format_clock(left)}")

    def evaluation(
        self,
        step: int,
        val_loss: float,
        seconds: float,
        *,
        unit: str = "char",
        bytes_per_token: float | None = None,
    ) -> None:
        """Shows a validation loss.

        Args:
            step: steps made so far.
            val_loss: in nats per token.
            seconds: that it took.
            unit: what a token is: char or token.
            bytes_per_token: of the text, on average, if that is known.
        """
        better = not val_loss >= self._val_loss
        self._val_loss = val_loss
        self.console.print(
            f"[bold]step {step}[/] · validation loss [bold]{val_loss:.4f}[/] nats/{unit} · "
            f"{_describe_loss(val_loss, unit, bytes_per_token)} · {seconds:.1f} s"
            + ("" if better else " · [yellow]higher than before")
        )

    def sample(self, text: str) -> None:
        """Shows a text that the model wrote."""
        for line in text.strip("\n").splitlines():
            self.console.print(f"  [dim]│[/] [italic]{escape(line)}")

    def note(self, message: str) -> None:
        """Shows one line."""
        self.console.print(escape(message))

    def warn(self, message: str) -> None:
        """Shows one line that should not be missed."""
        self.console.print(f"[yellow]warning:[/] {escape(message)}")

    def close(self) -> None:
        """Takes the progress bar away."""
        self._bar.stop()


def _describe_loss(loss: float, unit: str, bytes_per_token: float | None) -> str:
    """A loss in the units in which it is compared with those of other models."""
    bits = loss / math.log(2)
    if unit == "char":
        return f"{bits:.4f} bits/char"
    # exp overflows beyond 709.
    perplexity = f"perplexity {math.exp(min(loss, 700)):.2f}"
    if bytes_per_token is None:
        return perplexity
    return f"{perplexity} · {bits / bytes_per_token:.4f} bits/byte"
