"""Training over several processes with JAX's own runtime: who is there, and what all agree on.

With one process everything is immediate and touches no network.
"""

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from jaxformer.distributed import shutdown as aborts
from jaxformer.distributed.control_plane import MILLISECONDS, PREFIX, ControlPlane
from jaxformer.distributed.peers import Peers
from jaxformer.distributed.settings import ProcessSettings
from jaxformer.errors import DeviceError, JaxformerError, UsageError

T = TypeVar("T")


@dataclasses.dataclass
class _Session:
    """What this process knows of itself and the others."""

    client: Any
    peers: Peers
    control_plane: ControlPlane


_session: _Session | None = None


def initialize(options: ProcessSettings, *, debug: bool = False) -> None:
    """Joins this process to the others; without a word in ``options`` there are no others.

    To be called before JAX is asked for devices.

    Args:
        options: where the coordinator is, how many processes there are and which this one is, or
            that JAX is to find it out (SLURM, Open MPI, Kubernetes, Cloud TPU).
        debug: leave the runtime's own log on standard error.

    Raises:
        UsageError: JAX finds no cluster, or the processes were not told the same.
        DeviceError: the coordinator or another process does not answer in time.
    """
    global _session
    if not options.has_peers:
        return
    _wait_for_coordinator(options)
    if not debug:
        aborts.quiet_runtime()

    def too_late() -> str:
        return (
            f"not all processes came within {options.connect_timeout} s: start each with the same "
            "--coordinator and --num-processes and its own --process-id, or give a longer "
            "--connect-timeout"
        )

    aborts.end_with(too_late)
    import jax
    from jax._src import distributed

    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is ours
    given: dict[str, Any] = {}
    if options.coordinator is not None:
        given = {
            "coordinator_address": options.coordinator,
            "num_processes": options.num_processes,
            "process_id": options.process_id,
            "cluster_detection_method": "deactivate",
        }
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=options.connect_timeout,
            # Our own watch comes first: the runtime ends a process without a word to its user.
            heartbeat_timeout_seconds=2 * options.peer_timeout + 30,
            shutdown_timeout_seconds=options.peer_timeout,
        )
    except (ValueError, ImportError, KeyError) as error:
        if options.coordinator is not None:
            raise
        raise UsageError(
            "--distributed: JAX finds no SLURM, Open MPI, Kubernetes or Cloud TPU around it "
            f"({str(error).splitlines()[0]}): give --coordinator, --num-processes and --process-id"
        ) from None
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise DeviceError(f"the processes could not be joined: {reason}") from None
    state = distributed.global_state
    coordinator = str(state.coordinator_address)
    peers = Peers(state.client, state.process_id, state.num_processes, options.peer_timeout)
    _session = _Session(state.client, peers, ControlPlane("run"))
    aborts.end_with(lambda: _why_aborted(coordinator, peers))
    peers.start()
    _check_same_count()


def _wait_for_coordinator(options: ProcessSettings) -> None:
    """Waits until the coordinator's port is open, or free where this process is the coordinator."""
    if options.coordinator is None:
        return
    host, _, port = options.coordinator.rpartition(":")
    address = (host.strip("[]"), int(port))
    if options.process_id == 0:
        if _answers(address):
            raise DeviceError(
                f"--coordinator {options.coordinator}: the port is in use, give another"
            )
        return
    end = time.monotonic() + options.connect_timeout
    while not _answers(address):
        if time.monotonic() > end:
            raise DeviceError(
                f"no coordinator answers at {options.coordinator} after {options.connect_timeout} "
                "s: start process 0 there, or give a longer --connect-timeout"
            )
        time.sleep(0.2)


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=2).close()
    except OSError:
        return False
    return True


def _why_aborted(coordinator: str, peers: Peers) -> str | None:
    """What to say where the runtime aborts this process; None where no peer is to blame."""
    if peers.index == 0:
        return None
    host, _, port = coordinator.rpartition(":")
    # The port of a process that was killed may still be open for a moment.
    end = time.monotonic() + 5
    while _answers((host.strip("[]"), int(port))):
        if time.monotonic() > end:
            return None
        time.sleep(0.1)
    return f"process 0 has died; {peers.exit_hint()}"


def _check_same_count() -> None:
    mine = count()
    told = broadcast(mine)
    if told != mine:
        raise UsageError(f"--num-processes {mine}: process 0 was told {told}")


def is_first() -> bool:
    """Whether this process is the one that talks, writes and decides."""
    return index() == 0


def index() -> int:
    """Which process this is, from 0."""
    return 0 if _session is None else _session.control_plane.index


def count() -> int:
    """How many processes there are."""
    return 1 if _session is None else _session.control_plane.count


def all_gather_ints(values: Sequence[int]) -> list[tuple[int, ...]]:
    """Small integers of every process, in their order, told to all of them.

    Two processes on one machine need 1 to 2 ms for it.
    """
    if _session is None:
        return [tuple(values)]
    return [tuple(told) for told in _session.control_plane.each(lambda: list(values))]


def broadcast(value: T) -> T:
    """A value of the first process, which JSON can hold, told to all of them."""
    return on_primary(lambda: value)


def on_primary(function: Callable[[], T]) -> T:
    """Calls ``function`` in the first process alone; the others wait for what comes of it.

    Returns:
        Its result, which JSON can hold, in every process.

    Raises:
        JaxformerError: what it raised, in every process.
    """
    if _session is None:
        return function()
    told: T = _session.control_plane.first(function)
    return told


def all_or_raise(function: Callable[[], T]) -> T:
    """Calls ``function`` in every process; where one refuses, all of them do.

    Returns:
        This process's own result.

    Raises:
        JaxformerError: what the first process to refuse raised, in the order of processes.
    """
    return function() if _session is None else _session.control_plane.all_or_raise(function)


def same_everywhere(value: str, refusal: Callable[[str, str], JaxformerError]) -> None:
    """Checks that every process has the same value.

    Args:
        value: of this process.
        refusal: makes the error from process 0's value and this one's.

    Raises:
        JaxformerError: a process has another value than process 0; raised in all of them.
    """
    first = broadcast(value)

    def check() -> None:
        if value != first:
            raise refusal(first, value)

    all_or_raise(check)


def on_loss(exit_hint: Callable[[], str]) -> None:
    """Says what a process that loses another one is to end with: what is saved, how to go on."""
    if _session is not None:
        _session.peers.exit_hint = exit_hint


def explain(error: Exception) -> JaxformerError | None:
    """What the runtime's error means where another process is to blame for it, or None."""
    if _session is None or not isinstance(error, RuntimeError):
        return None
    return _session.peers.explain(error)


def end_if_lost(error: Exception) -> None:
    """Ends this process, with a word, where ``explain`` blames another process for the error.

    Nothing else is waited for: what the others took part in will never be complete.
    """
    refusal = explain(error)
    if refusal is not None:
        if not refusal.already_reported:
            aborts.show(str(refusal))
        leave(refusal.exit_code, str(refusal), already_reported=refusal.already_reported)


def leave(code: int, message: str = "", *, already_reported: bool = False) -> None:
    """Parts from the others, to be called last; returns only where all is well.

    Args:
        code: what this process ends with. If not 0, every other process ends with it too.
        message: why.
        already_reported: whether the others know already.
    """
    global _session
    if _session is None:
        return
    session, _session = _session, None
    if code:
        session.peers.leave(code, message, already_reported=already_reported)
    import jax

    session.client.wait_at_barrier(f"{PREFIX}/end", MILLISECONDS)
    session.peers.stop()
    jax.distributed.shutdown()
    aborts.restore()


def leave_at_once(code: int) -> NoReturn:
    """Ends this process, and with it the others, as soon as they can be told."""
    if _session is not None:
        _session.peers.leave(code, "stopped at once", already_reported=False)
    os._exit(code)
