"""Which process of a run this one is, as its user says it; free of JAX."""

from dataclasses import dataclass

# Longer waits, in seconds, are taken for a mistake.
MAX_SECONDS = 86400


@dataclass(frozen=True)
class ProcessSettings:
    """Which process of how many this is; see docs/guides/hosts.md.

    Raises:
        ValueError: the settings do not go together, or one is out of its range; the message names
            it by its flag.
    """

    coordinator: str | None = None
    """HOST:PORT at which process 0 awaits the others; the same for all of them."""
    num_processes: int | None = None
    """How many processes train together, each with its own devices."""
    process_id: int | None = None
    """Which of them this is, from 0."""
    distributed: bool = False
    """Let JAX find the three settings above: SLURM, Open MPI, Kubernetes, Cloud TPU."""
    connect_timeout: int = 300
    """Seconds to wait for all processes at the start."""
    peer_timeout: int = 100
    """Seconds after which a process that does not answer is lost: all others then end."""

    def __post_init__(self) -> None:
        given = {
            "--coordinator": self.coordinator,
            "--num-processes": self.num_processes,
            "--process-id": self.process_id,
        }
        missing = [flag for flag, value in given.items() if value is None]
        if self.distributed and len(missing) < 3:
            raise ValueError(
                f"--distributed finds {', '.join(given)} by itself: leave out one or the others"
            )
        if 0 < len(missing) < 3:
            raise ValueError(
                f"{' and '.join(given)} go together: {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing"
            )
        for flag, seconds in (
            ("--connect-timeout", self.connect_timeout),
            ("--peer-timeout", self.peer_timeout),
        ):
            if not 1 <= seconds <= MAX_SECONDS:
                raise ValueError(f"{flag} must be in [1, {MAX_SECONDS}] s: got {seconds}")
        if self.coordinator is None or self.num_processes is None or self.process_id is None:
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"--coordinator must be HOST:PORT: got {self.coordinator}")
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"--process-id must be in [0, {self.num_processes}), the number of processes: got "
                f"{self.process_id}"
            )

    @property
    def has_peers(self) -> bool:
        """Whether there are other processes."""
        return self.distributed or self.coordinator is not None
