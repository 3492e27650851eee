"""What was injected, and what became of it."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any


@dataclasses.dataclass
class Tally:
    """The outcome of one kind of fault.

    Attributes:
        fault: its name.
        injected: how many.
        held: how many of them were detected or survived in every respect.
        made_again: the most steps that one fault cost: made after the last durable checkpoint.
        durable_lost: steps that were durable before a fault and could not be restored after it.
        unreadable: checkpoints that bore a step's name after a fault and could not be restored.
        files_changed: files and folders that a failed command made, changed or removed.
        seconds: of all of it.
        skipped: why nothing was injected.
        failures: what did not hold, in words.
    """

    fault: str
    injected: int = 0
    held: int = 0
    made_again: int = 0
    durable_lost: int = 0
    unreadable: int = 0
    files_changed: int = 0
    seconds: float = 0.0
    skipped: str = ""
    failures: list[str] = dataclasses.field(default_factory=list)

    @contextlib.contextmanager
    def injection(self, what: str) -> Iterator["Check"]:
        """Counts one fault; it held if nothing was said to be wrong within."""
        check = Check(what)
        yield check
        self.injected += 1
        self.held += not check.wrong
        self.failures += check.wrong

    @contextlib.contextmanager
    def aside(self, what: str) -> Iterator["Check"]:
        """Looks at what all of them have left; counts none."""
        check = Check(what)
        yield check
        self.failures += check.wrong

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Adds the time that passes within."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds = round(self.seconds + time.monotonic() - began, 1)

    def row(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


class Check:
    """What is wrong with the outcome of one injection."""

    def __init__(self, what: str):
        self.what = what
        self.wrong: list[str] = []

    def that(self, good: bool, summary: object) -> None:
        """Notes what was seen where something is not as it must be."""
        if not good:
            self.wrong.append(f"{self.what}: {summary}")
