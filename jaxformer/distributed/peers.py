"""A watch over the other processes of a run: whoever is lost ends all of them, with a word.

Every process counts up a beat in the coordination service's key-value store. Process 0 watches all
beats, the others watch that of process 0, so the traffic grows with the number of processes and not
with its square. What ends the run is written down once, by whoever meets it first, and read by all.
"""

import contextlib
import json
import os
import re
import threading
import time
from typing import Any

from jaxformer.distributed import shutdown as aborts
from jaxformer.distributed.control_plane import PREFIX
from jaxformer.errors import DeviceError, JaxformerError

# What collectives say when the other end of a connection is gone: gloo, NCCL, the runtime itself.
LOST = re.compile(
    r"connection (closed|reset|refused)|closed by peer|socket closed|broken pipe|unavailable|"
    r"gloo|nccl|remote process|timed out waiting|deadline.exceeded|unhealthy|heartbeat|aborted",
    re.IGNORECASE,
)


class Peers:
    """The beats of all processes, and what ended the run.

    Args:
        client: of the coordination service.
        index: which process this is.
        count: how many there are.
        timeout: after so many seconds without a beat a process is lost.

    Attributes:
        exit_hint: says what is saved and how to go on.
    """

    def __init__(self, client: Any, index: int, count: int, timeout: float):
        self.index = index
        self.exit_hint = lambda: "no step was saved"
        self._client = client
        self._count = count
        self._timeout = timeout
        self._interval = min(2.0, timeout / 8)
        self._beats: dict[int, str] = {}
        self._ended: dict[str, Any] | None = None
        self._stopped = threading.Event()
        self._main_ends = threading.Event()
        self._ending = threading.RLock()
        self._threads = [
            threading.Thread(target=target, daemon=True, name=f"jaxformer-{target.__name__}")
            for target in (self._beat, self._watch)
        ]

    def start(self) -> None:
        """Begins to beat and to watch."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends both."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(self._timeout)

    def explain(self, error: Exception) -> JaxformerError | None:
        """Why a collective failed, if another process is to blame."""
        self._main_ends.set()
        if not LOST.search(str(error)):
            return None if self._ended is None else self._refusal(self._ended)
        before = dict(self._beats)
        if self._wait_for_end(3):
            return self._refusal(self._ended or {})
        silent = [k for k in range(1, self._count) if before.get(k) == self._beats.get(k)]
        if self.index == 0 and silent:
            self._write_end({"process": silent[0], "what": "has died"})
        elif not self._wait_for_end(3):
            self._write_end({"process": None, "what": "has died"})
        return self._refusal(self._ended or {"process": None, "what": "has died"})

    def _wait_for_end(self, turns: int) -> bool:
        """Whether something is known to have ended the run, now or within some turns."""
        end = time.monotonic() + turns * self._interval
        while self._ended is None and time.monotonic() < end:
            time.sleep(self._interval / 4)
        return self._ended is not None

    def leave(self, code: int, message: str, *, already_reported: bool) -> None:
        """Ends this process, and the others with it if they do not know yet.

        Args:
            code: of all of them.
            message: why.
            already_reported: whether they know.
        """
        self._main_ends.set()
        with self._ending:
            self._briefly(lambda: self._part(code, message, already_reported))
            _end(code)

    def _part(self, code: int, message: str, already_reported: bool) -> None:
        if not already_reported:
            self._write_end({"process": self.index, "code": code, "message": message})
        self._client.key_value_set(f"{PREFIX}/left/{self.index}", "", allow_overwrite=True)
        # The coordinator goes last: with it goes what the others have yet to read.
        while self.index == 0 and self._unaware():
            time.sleep(self._interval / 4)

    def _unaware(self) -> bool:
        left = {int(k.rsplit("/", 1)[1]) for k, _ in self._dir("left")}
        lost = -1 if self._ended is None else self._ended["process"]
        return bool(set(range(1, self._count)) - left - {lost})

    def _briefly(self, function: Any) -> None:
        """Calls what a lost coordinator may hold up, or fail."""

        def call() -> None:
            with contextlib.suppress(Exception):
                function()

        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(3 * self._interval)

    def _dir(self, name: str) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = self._client.key_value_dir_get(f"{PREFIX}/{name}/")
        return found

    def _write_end(self, what: dict[str, Any]) -> None:
        """Notes what ended the run, unless something else did before."""
        with contextlib.suppress(Exception):
            self._client.key_value_set(f"{PREFIX}/news/ended", json.dumps(what))
        with contextlib.suppress(Exception):
            self._read_news()

    def _read_news(self) -> None:
        news = {name.rsplit("/", 1)[1]: value for name, value in self._dir("news")}
        if self.index != 0 and "beat" in news:
            self._beats[0] = news["beat"]
        if "ended" in news:
            self._ended = json.loads(news["ended"])

    def _beat(self) -> None:
        number = 0
        while not self._stopped.wait(self._interval):
            number += 1
            mine = "news/beat" if self.index == 0 else f"alive/{self.index}"
            with contextlib.suppress(Exception):
                self._client.key_value_set(f"{PREFIX}/{mine}", str(number), allow_overwrite=True)
                if self.index == 0:
                    for name, value in self._dir("alive"):
                        self._beats[int(name.rsplit("/", 1)[1])] = value
                self._read_news()

    def _watch(self) -> None:
        # Turns are counted and not seconds: to one that was itself asleep, all others seem silent.
        watched = range(1, self._count) if self.index == 0 else [0]
        seen: dict[int, str | None] = {}
        silent = dict.fromkeys(watched, 0)
        told = 0
        while not self._stopped.wait(self._interval):
            for peer in watched:
                beat = self._beats.get(peer)
                silent[peer] = 0 if beat != seen.get(peer) else silent[peer] + 1
                seen[peer] = beat
            if self._main_ends.is_set():
                return
            if self._ended is None:
                late = [p for p in watched if silent[p] * self._interval >= self._timeout]
                if late:
                    what = f"has not answered for {self._timeout:g} s"
                    self._ended = {"process": late[0], "what": what}
                    if self.index == 0:
                        self._briefly(lambda: self._write_end(self._ended or {}))
                    self._end_as(self._ended)
            elif self._ended["process"] != self.index:
                # Time for the main thread to meet it; it may be held up in a collective.
                told += 1
                if told > 3 or self.index != 0:
                    self._end_as(self._ended)

    def _refusal(self, ended: dict[str, Any]) -> JaxformerError:
        if "what" in ended:
            who = "another process" if ended["process"] is None else f"process {ended['process']}"
            return DeviceError(f"{who} {ended['what']}; {self.exit_hint()}")
        error = JaxformerError(f"process {ended['process']}: {ended['message']}")
        error.exit_code = ended["code"]
        error.already_reported = self.index != 0
        return error

    def _end_as(self, ended: dict[str, Any]) -> None:
        with self._ending:
            refusal = self._refusal(ended)
            if not refusal.already_reported:
                aborts.show(str(refusal))
            if ended["process"] != 0:
                self._briefly(lambda: self._part(refusal.exit_code, "", True))
            _end(refusal.exit_code)


def _end(code: int) -> None:
    aborts.flush()
    os._exit(code)
