"""A trace of some steps of a run: what devices and host did, and when."""

from pathlib import Path

import jax

from jaxformer.training.logging.progress import Reporter

# The first call of a compiled function does work that no later one does.
WARM_UP_CALLS = 2


class Profile:
    """Traces ``steps`` steps after warm-up with ``jax.profiler``; training survives its failure.

    Used as a context manager: leaving it writes what was traced so far.

    Args:
        folder: where the trace goes.
        steps: how many to trace; None traces nothing.
        reporter: shows where the trace is, or why there is none.
    """

    def __init__(self, folder: Path, steps: int | None, reporter: Reporter):
        self._folder = folder
        self._left = steps or 0
        self._reporter = reporter
        self._calls = 0
        self._first: int | None = None
        self._last = 0

    @property
    def active(self) -> bool:
        """Whether there are steps still to trace."""
        return self._left > 0

    def limit_call(self, step: int, count: int) -> int:
        """Begins the trace when it is time; to be called before each call of the compiled step.

        Args:
            step: how many steps were made.
            count: how many the call would make.

        Returns:
            How many it may make, so that the trace ends with the call.
        """
        self._calls += 1
        if not self._left or self._calls <= WARM_UP_CALLS:
            return count
        if self._first is None:
            try:
                jax.profiler.start_trace(self._folder)
            except Exception as error:
                self._give_up(error)
                return count
            self._first = step + 1
        return min(count, self._left)

    def record_call(self, step: int, made: int) -> None:
        """Ends the trace when it is time; to be called after each call, with its results there.

        Args:
            step: how many steps were made.
            made: how many of them by this call.
        """
        if self._first is None:
            return
        self._last = step
        self._left = max(0, self._left - made)
        if not self._left:
            self._write()

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._first is not None:
            self._write()
        elif self._left:
            self._reporter.warn("no profile: the run ended before its warm-up did")

    def _write(self) -> None:
        first, self._first, self._left = self._first, None, 0
        try:
            jax.profiler.stop_trace()
            trace = max(self._folder.rglob("*.trace.json.gz"), key=lambda p: p.stat().st_mtime)
        except Exception as error:
            self._give_up(error)
            return
        self._reporter.note(
            f"profile of steps {first} to {self._last}: open {trace} at https://ui.perfetto.dev, "
            f"or all of it with: pip install xprof && xprof --logdir {self._folder}"
        )

    def _give_up(self, error: Exception) -> None:
        self._left = 0
        self._reporter.warn(
            f"no profile ({str(error) or type(error).__name__}); training continues"
        )
