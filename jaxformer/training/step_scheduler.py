"""When the compiled step is called, for how many steps, and when to stop, in all processes."""

import dataclasses
import signal
import types

from jaxformer.distributed import processes
from jaxformer.training.profiling import Profile

# A call of the compiled step should end often enough to notice a signal and to move the bar. On a
# GPU it costs 5 ms beside its steps.
SECONDS_PER_CALL = 1.0
# Processes need 1 to 4 ms to agree, so calls that are shorter than this share one agreement.
SECONDS_PER_AGREEMENT = 0.25


@dataclasses.dataclass
class StopSignal:
    """Notes the first SIGINT or SIGTERM; a second one ends the process at once.

    That nobody reads what the run shows is noted as SIGPIPE, by which other programs end.

    Used as a context manager: on leaving it the previous handlers are restored.
    """

    received: int | None = None

    def __enter__(self) -> "StopSignal":
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def note_lost_reader(self) -> None:
        """Stops the run as a signal does."""
        self.received = self.received or signal.SIGPIPE

    def _note(self, number: int, _frame: types.FrameType | None) -> None:
        if self.received is not None:
            processes.leave_at_once(128 + number)
        self.received = number


class StepScheduler:
    """Plans calls of the compiled step by the time that the calls before took.

    What depends on a clock or a signal is decided here, by process 0 for all of them; a signal that
    any process receives stops all of them after the same step.

    Args:
        stop: of this process.
        profile: may shorten a call; that of process 0 counts.
        most: how many steps a call can make.
    """

    def __init__(self, stop: StopSignal, profile: Profile, most: int):
        self._stop = stop
        self._profile = profile
        self._most = most
        self._count = 1
        self._seconds = SECONDS_PER_AGREEMENT

    def stop_signal(self) -> int | None:
        """Returns the signal that any process has received; all processes call this together."""
        received = processes.all_gather_ints([self._stop.received or 0])
        return max(number for (number,) in received) or None

    def plan(self, step: int, boundary: int) -> tuple[int, int]:
        """Plans the next calls; all processes call this together.

        Args:
            step: how many steps are made.
            boundary: the last step to plan for.

        Returns:
            How many steps a call makes, and the step at which to plan again: ``step`` itself after
            a signal.
        """
        count = self._profile.limit_call(step, min(self._count, boundary - step))
        calls = 1
        if processes.count() > 1 and not self._profile.active:
            calls = max(1, int(SECONDS_PER_AGREEMENT / (self._seconds * count)))
        plans = processes.all_gather_ints([self._stop.received or 0, count, calls])
        if any(number for number, _, _ in plans):
            return 0, step
        _, count, calls = plans[0]
        return count, min(boundary, step + count * calls)

    def record(self, step: int, made: int, seconds: float) -> None:
        """Notes a call that has returned.

        Args:
            step: how many steps were made before it.
            made: how many it made.
            seconds: what it took.
        """
        self._seconds = max(seconds / made, 1e-6)
        self._count = max(1, min(self._most, int(SECONDS_PER_CALL / self._seconds)))
        self._profile.record_call(step + made, made)
