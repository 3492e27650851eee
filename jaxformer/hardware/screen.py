"""The screen of a command, whose reader may leave before its end: ``jaxformer train | head``."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from rich.console import Console


def _end() -> NoReturn:
    raise BrokenPipeError


class Screen(Console):
    """A console on standard output, which shows nothing more once its reader has left.

    Attributes:
        reader_left: is called then; by default it ends the command, as other commands end.
    """

    reader_left: Callable[[], None] = staticmethod(_end)

    def on_broken_pipe(self) -> None:
        """Is called by rich when a line could not be written."""
        self.quiet = True
        # The interpreter would try to write the line once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        self.reader_left()
