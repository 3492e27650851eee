"""When the compiled step is called, for how many steps, and when to stop, in all processes."""

from jaxformer.distributed import processes
from jaxformer.training.profiling import Profile
from jaxformer.training.run_folder import StopSignal

# A call of the compiled step should end often enough to hear a signal and to move the bar.
SECONDS_PER_CALL = 0.5
# Processes need 1 to 4 ms to agree, so calls that are shorter than this share one agreement.
SECONDS_PER_AGREEMENT = 0.25


class StepScheduler:
    """Plans calls of the compiled step by the time that those before took.

    What depends on a clock or a signal is decided here, by process 0 for all of them; a signal that
    any process receives stops all of them after the same step.

    Args:
        stop: says when this process has received a signal.
        profile: may shorten a call; that of process 0 counts.
        most: how many steps a call can make.
    """

    def __init__(self, stop: StopSignal, profile: Profile, most: int):
        self._stop = stop
        self._profile = profile
        self._most = most
        self._count = 1
        self._seconds = SECONDS_PER_AGREEMENT

    def stopped(self) -> int | None:
        """The number of the signal that some process has received; all of them ask together."""
        return (
            max(given for (given,) in processes.all_gather_ints([self._stop.received or 0])) or None
        )

    def plan(self, step: int, boundary: int) -> tuple[int, int]:
        """What is made before the next question, all processes asking together.

        Args:
            step: how many steps are made.
            boundary: the last step to plan for.

        Returns:
            How many steps a call makes, and the step at which to ask again: this one after a
            signal.
        """
        count = self._profile.before(step, min(self._count, boundary - step))
        calls = 1
        if processes.count() > 1 and not self._profile.active:
            calls = max(1, int(SECONDS_PER_AGREEMENT / (self._seconds * count)))
        told = processes.all_gather_ints([self._stop.received or 0, count, calls])
        if any(given for given, _, _ in told):
            return 0, step
        _, count, calls = told[0]
        return count, min(boundary, step + count * calls)

    def record(self, seconds: float) -> None:
        """To be told what a step of the last call took, in seconds."""
        self._seconds = max(seconds, 1e-6)
        self._count = max(1, min(self._most, int(SECONDS_PER_CALL / self._seconds)))
