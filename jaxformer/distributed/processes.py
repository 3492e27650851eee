"""Training in several processes with JAX's own runtime: start, agreement, end.

With one process all of this returns at once and touches no network.
"""

import dataclasses
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

from jaxformer.distributed import shutdown
from jaxformer.distributed.control_plane import MILLISECONDS, PREFIX, ControlPlane
from jaxformer.distributed.peers import Peers
from jaxformer.distributed.settings import ProcessSettings
from jaxformer.errors import DeviceError, JaxformerError, UsageError

T = TypeVar("T")


@dataclasses.dataclass
class _Session:
    """This process's connection to the others."""

    client: Any
    peers: Peers
    control_plane: ControlPlane


_session: _Session | None = None


def initialize(settings: ProcessSettings, *, debug: bool = False) -> None:
    """Connects this process to the others, if ``settings`` name any.

    It must be called before JAX is asked for devices.

    Args:
        settings: where the coordinator is, how many processes there are and which this one is; or
            that JAX is to find this out (SLURM, Open MPI, Kubernetes, Cloud TPU).
        debug: leave the runtime's own log on standard error.

    Raises:
        UsageError: JAX finds no cluster, or the processes were given different settings.
        DeviceError: the coordinator or another process does not answer in time.
    """
    global _session
    if not settings.has_peers:
        return
    _wait_for_coordinator(settings)
    if not debug:
        shutdown.quiet_runtime()

    def explain_timeout() -> str:
        return (
            f"not all processes came within {settings.connect_timeout} s: start each with the same "
            "--coordinator and --num-processes and its own --process-id, or give a longer "
            "--connect-timeout"
        )

    shutdown.explain_aborts(explain_timeout)
    import jax
    from jax._src import distributed

    jax.config.update("jax_enable_preemption_service", False)  # training handles SIGTERM
    given: dict[str, Any] = {}
    if settings.coordinator is not None:
        given = {
            "coordinator_address": settings.coordinator,
            "num_processes": settings.num_processes,
            "process_id": settings.process_id,
            "cluster_detection_method": "deactivate",
        }
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=settings.connect_timeout,
            # ``Peers`` notices first: the runtime ends a process without a message for its user.
            heartbeat_timeout_seconds=2 * settings.peer_timeout + 30,
            shutdown_timeout_seconds=settings.peer_timeout,
        )
    except (ValueError, ImportError, KeyError) as error:
        if settings.coordinator is not None:
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
    peers = Peers(state.client, state.process_id, state.num_processes, settings.peer_timeout)
    _session = _Session(state.client, peers, ControlPlane("run"))
    shutdown.explain_aborts(lambda: _why_aborted(coordinator, peers))
    peers.start()
    _check_same_count()


def _wait_for_coordinator(settings: ProcessSettings) -> None:
    """Waits for the coordinator's port to be open; in process 0, checks that it is free."""
    if settings.coordinator is None:
        return
    host, _, port = settings.coordinator.rpartition(":")
    address = (host.strip("[]"), int(port))
    if settings.process_id == 0:
        if _answers(address):
            raise DeviceError(
                f"--coordinator {settings.coordinator}: the port is in use, give another"
            )
        return
    end = time.monotonic() + settings.connect_timeout
    while not _answers(address):
        if time.monotonic() > end:
            raise DeviceError(
                f"no coordinator answers at {settings.coordinator} after "
                f"{settings.connect_timeout} s: start process 0 there, or give a longer "
                "--connect-timeout"
            )
        time.sleep(0.2)


def _answers(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=2).close()
    except OSError:
        return False
    return True


def _why_aborted(coordinator: str, peers: Peers) -> str | None:
    """Returns why the runtime aborts this process; None where no other process is the cause."""
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
    own = count()
    first = broadcast(own)
    if first != own:
        raise UsageError(f"--num-processes {own}: process 0 was given {first}")


def is_primary() -> bool:
    """Returns whether this process is the one that prints, writes files and decides."""
    return index() == 0


def index() -> int:
    """Returns which process this is, from 0."""
    return 0 if _session is None else _session.control_plane.index


def count() -> int:
    """Returns how many processes there are."""
    return 1 if _session is None else _session.control_plane.count


def all_gather_ints(values: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns the small integers of every process, in order of process, in all of them.

    With two processes on one machine it takes 1 to 2 ms.
    """
    if _session is None:
        return [tuple(values)]
    return [tuple(row) for row in _session.control_plane.all_gather(lambda: list(values))]


def broadcast(value: T) -> T:
    """Returns process 0's value, which JSON must be able to hold, in every process."""
    return on_primary(lambda: value)


def on_primary(function: Callable[[], T]) -> T:
    """Calls ``function`` in process 0 alone; the others wait for its result.

    Returns:
        The result, which JSON must be able to hold, in every process.

    Raises:
        JaxformerError: what it raised, in every process.
    """
    if _session is None:
        return function()
    result: T = _session.control_plane.on_primary(function)
    return result


def all_or_raise(function: Callable[[], T]) -> T:
    """Calls ``function`` in every process; an error in one is raised in all of them.

    Returns:
        This process's own result.

    Raises:
        JaxformerError: that of the first process that failed, in order of process.
    """
    return function() if _session is None else _session.control_plane.all_or_raise(function)


def check_equal(value: str, make_error: Callable[[str, str], JaxformerError]) -> None:
    """Checks that every process has the same value.

    Args:
        value: of this process.
        make_error: makes the error from process 0's value and this one's.

    Raises:
        JaxformerError: a process has another value than process 0; raised in all of them.
    """
    first = broadcast(value)

    def check() -> None:
        if value != first:
            raise make_error(first, value)

    all_or_raise(check)


def set_exit_hint(exit_hint: Callable[[], str]) -> None:
    """Sets what a process says, when it loses another, of what is saved and how to resume."""
    if _session is not None:
        _session.peers.exit_hint = exit_hint


def explain_loss(error: Exception) -> JaxformerError | None:
    """Returns what a runtime error means if another process is its cause; else None."""
    if _session is None or not isinstance(error, RuntimeError):
        return None
    return _session.peers.explain_loss(error)


def exit_if_peer_lost(error: Exception) -> None:
    """Ends this process with a message if the loss of another process caused the error.

    It waits for nothing else: what the lost process took part in will never be complete.
    """
    loss = explain_loss(error)
    if loss is not None:
        if not loss.already_reported:
            shutdown.print_error(str(loss))
        leave(loss.exit_code, str(loss), already_reported=loss.already_reported)


def leave(code: int, message: str = "", *, already_reported: bool = False) -> None:
    """Leaves the other processes; the last call of a command. Returns only if ``code`` is 0.

    Args:
        code: this process's exit code. If it is not 0, every other process ends with it too.
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
    shutdown.restore_abort()


def leave_at_once(code: int) -> NoReturn:
    """Ends this process now, and the others as soon as they notice."""
    if _session is not None:
        _session.peers.leave(code, "stopped at once", already_reported=False)
    os._exit(code)
