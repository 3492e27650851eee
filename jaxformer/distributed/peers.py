"""Watches the other processes of a run: if one is lost, all end, each with a message.

Every process counts up a heartbeat in the coordination service's key-value store. Process 0 watches
all of them, the others watch process 0, so that the traffic grows with the number of processes and
not with its square. What ended the run is written down once, by the process that notices it first,
and read by all.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxformer.distributed import shutdown
from jaxformer.distributed.control_plane import PREFIX
from jaxformer.errors import DeviceError, JaxformerError

# What collectives say when the other end of a connection is gone: gloo, NCCL, the runtime itself.
# They raise one class for all errors, so their text is all that there is to go by.
CONNECTION_LOST = re.compile(
    r"connection (closed|reset|refused)|closed by peer|socket closed|broken pipe|unavailable|"
    r"gloo|nccl|remote process|timed out waiting|deadline.exceeded|unhealthy|heartbeat|aborted",
    re.IGNORECASE,
)


def is_connection_lost(error: Exception) -> bool:
    """Returns whether a collective failed because another process may be gone."""
    return CONNECTION_LOST.search(str(error)) is not None


@dataclasses.dataclass(frozen=True)
class _Ending:
    """What ended a run.

    Attributes:
        process: the one that is lost or has failed; None where it is not known which.
        loss: how it was lost, in words; empty where it ended with an error of its own.
        code: the exit code of that error.
        message: of that error.
    """

    process: int | None
    loss: str = ""
    code: int = 0
    message: str = ""


class Peers:
    """The heartbeats of all processes, and what ended the run.

    Args:
        client: of the coordination service.
        index: which process this is.
        count: how many there are.
        timeout: seconds without a heartbeat after which a process is lost.

    Attributes:
        exit_hint: returns what is saved and how to resume, in words.
    """

    def __init__(self, client: Any, index: int, count: int, timeout: float):
        self.index = index
        self.exit_hint: Callable[[], str] = lambda: "no step was saved"
        self._client = client
        self._count = count
        self._timeout = timeout
        self._interval = min(2.0, timeout / 8)
        self._beats: dict[int, str] = {}
        self._ending: _Ending | None = None
        self._stopped = threading.Event()
        self._main_ends = threading.Event()
        self._leaving = threading.RLock()
        self._threads = [
            threading.Thread(target=target, daemon=True, name=f"jaxformer-{target.__name__}")
            for target in (self._beat, self._watch)
        ]

    def start(self) -> None:
        """Starts to send heartbeats and to watch those of the others."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends both threads."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(self._timeout)

    def explain_loss(self, error: Exception) -> JaxformerError | None:
        """Returns why a collective failed, if another process is the cause; else None."""
        self._main_ends.set()
        if not is_connection_lost(error):
            return None if self._ending is None else self._as_error(self._ending)
        before = dict(self._beats)
        if not self._wait_for_ending(3):
            silent = [k for k in range(1, self._count) if before.get(k) == self._beats.get(k)]
            if self.index == 0 and silent:
                self._write_ending(_Ending(silent[0], loss="has died"))
            elif not self._wait_for_ending(3):
                self._write_ending(_Ending(None, loss="has died"))
        return self._as_error(self._ending or _Ending(None, loss="has died"))

    def leave(self, code: int, message: str, *, already_reported: bool) -> None:
        """Ends this process, and the others with it unless they know already.

        Args:
            code: the exit code of all of them.
            message: why.
            already_reported: whether the others know.
        """
        self._main_ends.set()
        with self._leaving:
            shutdown.end_aborts_with(code)
            self._call_with_timeout(lambda: self._announce(code, message, already_reported))
            _exit(code)

    def _wait_for_ending(self, turns: int) -> bool:
        """Returns whether something is known to have ended the run, now or within some turns."""
        end = time.monotonic() + turns * self._interval
        while self._ending is None and time.monotonic() < end:
            time.sleep(self._interval / 4)
        return self._ending is not None

    def _announce(self, code: int, message: str, already_reported: bool) -> None:
        """Lets the others know that this process ends; process 0 waits until all of them have."""
        if not already_reported:
            self._write_ending(_Ending(self.index, code=code, message=message))
        self._client.key_value_set(f"{PREFIX}/left/{self.index}", "", allow_overwrite=True)
        # The coordinator goes last: with it goes what the others have yet to read.
        while self.index == 0 and self._is_anyone_left():
            time.sleep(self._interval / 4)

    def _is_anyone_left(self) -> bool:
        left = {int(k.rsplit("/", 1)[1]) for k, _ in self._list("left")}
        lost = -1 if self._ending is None else self._ending.process
        return bool(set(range(1, self._count)) - left - {lost})

    def _call_with_timeout(self, function: Callable[[], None]) -> None:
        """Calls what a lost coordinator may hold up or make fail."""

        def call() -> None:
            with contextlib.suppress(Exception):
                function()

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(3 * self._interval)

    def _list(self, folder: str) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = self._client.key_value_dir_get(f"{PREFIX}/{folder}/")
        return found

    def _write_ending(self, ending: _Ending) -> None:
        """Writes down what ended the run, unless something else did before."""
        with contextlib.suppress(Exception):
            text = json.dumps(dataclasses.asdict(ending))
            self._client.key_value_set(f"{PREFIX}/news/ended", text)
        with contextlib.suppress(Exception):
            self._read_news()

    def _read_news(self) -> None:
        news = {name.rsplit("/", 1)[1]: value for name, value in self._list("news")}
        if self.index != 0 and "beat" in news:
            self._beats[0] = news["beat"]
        if "ended" in news:
            self._ending = _Ending(**json.loads(news["ended"]))

    def _beat(self) -> None:
        number = 0
        while not self._stopped.wait(self._interval):
            number += 1
            key = "news/beat" if self.index == 0 else f"alive/{self.index}"
            with contextlib.suppress(Exception):
                self._client.key_value_set(f"{PREFIX}/{key}", str(number), allow_overwrite=True)
                if self.index == 0:
                    for name, value in self._list("alive"):
                        self._beats[int(name.rsplit("/", 1)[1])] = value
                self._read_news()

    def _watch(self) -> None:
        # Turns are counted and not seconds: to one that was itself asleep, all others seem silent.
        watched = range(1, self._count) if self.index == 0 else [0]
        seen: dict[int, str | None] = {}
        silent = dict.fromkeys(watched, 0)
        turns_since_ending = 0
        while not self._stopped.wait(self._interval):
            for peer in watched:
                beat = self._beats.get(peer)
                silent[peer] = 0 if beat != seen.get(peer) else silent[peer] + 1
                seen[peer] = beat
            if self._main_ends.is_set():
                return
            if self._ending is None:
                late = [p for p in watched if silent[p] * self._interval >= self._timeout]
                if late:
                    ending = _Ending(late[0], loss=f"has not answered for {self._timeout:g} s")
                    self._ending = ending
                    if self.index == 0:
                        self._call_with_timeout(functools.partial(self._write_ending, ending))
                    self._exit_for(self._ending)
            elif self._ending.process != self.index:
                # The main thread has time to meet the loss itself; a collective may hold it up.
                turns_since_ending += 1
                if turns_since_ending > 3 or self.index != 0:
                    self._exit_for(self._ending)

    def _as_error(self, ending: _Ending) -> JaxformerError:
        if ending.loss:
            who = "another process" if ending.process is None else f"process {ending.process}"
            return DeviceError(f"{who} {ending.loss}; {self.exit_hint()}")
        error = JaxformerError(f"process {ending.process}: {ending.message}")
        error.exit_code = ending.code
        error.already_reported = self.index != 0
        return error

    def _exit_for(self, ending: _Ending) -> None:
        with self._leaving:
            error = self._as_error(ending)
            if not error.already_reported:
                shutdown.print_error(str(error))
            shutdown.end_aborts_with(error.exit_code)
            if ending.process != 0:
                self._call_with_timeout(lambda: self._announce(error.exit_code, "", True))
            _exit(error.exit_code)


def _exit(code: int) -> None:
    shutdown.flush_output()
    os._exit(code)
