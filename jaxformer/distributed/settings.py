"""Which process of a run this one is, as its user says it; free of JAX."""

from dataclasses import dataclass

# Longer waits, in seconds, are taken for a mistake.
MAX_SECONDS = 86400
MAX_RESTARTS = 1_000_000


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
    """How many processes train together, each with its own devices; without --coordinator all of
    them are started on this machine."""
    process_id: int | None = None
    """Which of them this is, from 0."""
    distributed: bool = False
    """Let JAX find the three settings above: SLURM, Open MPI, Kubernetes, Cloud TPU."""
    connect_timeout: int = 300
    """Seconds to wait for all processes at the start."""
    peer_timeout: int = 100
    """Seconds after which a process that does not answer is lost: all others then end."""
    max_restarts: int = 0
    """How often the processes of this machine are started again, with --resume, after one of them
    was killed or does not answer."""

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
        if not 0 <= self.max_restarts <= MAX_RESTARTS:
            raise ValueError(
                f"--max-restarts must be in [0, {MAX_RESTARTS}]: got {self.max_restarts}"
            )
        if self.max_restarts and not self.starts_here:
            raise ValueError(
                "--max-restarts is for the processes of one machine: leave out --coordinator, "
                "--process-id and --distributed, or let your cluster start them again"
            )
        if self.starts_here and self.num_processes is not None and self.num_processes < 1:
            raise ValueError(f"--num-processes must be positive: got {self.num_processes}")
        if 0 < len(missing) < 3 and not self.starts_here:
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
    def starts_here(self) -> bool:
        """Whether this process only starts those that train, all of them on this machine."""
        if self.distributed or self.coordinator is not None or self.process_id is not None:
            return False
        return self.num_processes is not None or self.max_restarts > 0

    @property
    def has_peers(self) -> bool:
        """Whether there are other processes."""
        return self.distributed or self.coordinator is not None
