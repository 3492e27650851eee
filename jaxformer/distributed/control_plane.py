"""What the processes of a run tell each other: values, and that one of them refuses.

It goes through the key-value store of JAX's coordination service, never through the devices, so it
works before JAX knows any device, while one of them computes, and beside the training in another
thread. With one process nothing is sent.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from jaxformer import errors
from jaxformer.errors import JaxformerError, ResourceError, StoppedError, is_out_of_memory

T = TypeVar("T")

# Before every key.
PREFIX = "jaxformer"
# Processes may wait for each other as long as the work of one takes; a lost one is noticed before.
SECONDS = 7 * 24 * 3600
MILLISECONDS = 1000 * SECONDS
NUMBERS = itertools.count()


class ControlPlane:
    """A talk of all processes, in which every one of them says the same things in the same order.

    Args:
        what: it is about, the same on every process. Of talks about the same thing one ends before
            the next begins.
        alone: whether this process does it by itself, whoever else there is.

    Attributes:
        index: which process this is, from 0.
        count: how many there are.
        broken: whether an error was shared: there is no more to say.
        lost: whether a process was.
    """

    # By what talks are about, what this process said last.
    _said: ClassVar[dict[str, str]] = {}

    def __init__(self, what: str, *, alone: bool = False):
        from jax._src import distributed

        state = distributed.global_state
        self.index: int = 0 if alone else state.process_id
        self.count: int = 1 if alone else state.num_processes
        self.broken = self.lost = False
        self._client: Any = state.client
        self._what = what
        self._name = f"{PREFIX}/{what}/{0 if alone else next(NUMBERS)}"
        self._calls = itertools.count()

    def each(self, function: Callable[[], Any]) -> list[Any]:
        """What the function gives on each process, as JSON knows it, in order of process.

        Raises:
            JaxformerError: that of the first process on which it failed, on all of them.
            RuntimeError: a process was lost.
        """
        if self.count == 1:
            return [function()]
        refusal: Exception | None = None
        said: dict[str, Any] = {}
        try:
            said["value"] = function()
        except Exception as error:
            refusal = error
            said["refused"] = _described(error)
        heard = [json.loads(text) for text in self._gather(json.dumps(said))]
        for process, words in enumerate(heard):
            if "refused" in words:
                self.broken = True
                if process == self.index and refusal is not None:
                    raise refusal
                raise _rebuilt(process, words["refused"], already_reported=self.index != 0)
        return [words["value"] for words in heard]

    def all_or_raise(self, function: Callable[[], T]) -> T:
        """What the function gives on this process, which need not be known to JSON.

        Raises:
            JaxformerError: that of the first process on which it failed, on all of them.
            RuntimeError: a process was lost.
        """
        results: list[T] = []
        self.each(lambda: results.append(function()))
        return results[0]

    def first(self, function: Callable[[], Any]) -> Any:
        """What the function gives on process 0, which alone calls it.

        Raises:
            JaxformerError: that of process 0, on all of them.
        """
        return self.each(lambda: function() if self.index == 0 else None)[0]

    def barrier(self) -> None:
        """Returns once all processes have come this far."""
        self.each(lambda: None)

    def share(self, sizes: Mapping[str, int]) -> list[str]:
        """The names that fall to this process, so that all have about as many bytes to read."""
        loads = [0] * self.count
        mine = []
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            process = loads.index(min(loads))
            loads[process] += sizes[name] + 1
            if process == self.index:
                mine.append(name)
        return mine

    def _gather(self, text: str) -> list[str]:
        key = f"{self._name}/{next(self._calls)}"
        mine = f"{key}/{self.index}"
        try:
            self._client.key_value_set(mine, text)
            # One name for all of them: the service remembers every name it has heard.
            self._client.wait_at_barrier(f"{PREFIX}/{self._what}", MILLISECONDS)
            heard = {
                int(name.rsplit("/", 1)[1]): said
                for name, said in self._client.key_value_dir_get(f"{key}/")
            }
            # Whoever is here has heard what was said before, so nobody needs it any more.
            before, self._said[self._what] = self._said.get(self._what), mine
            if before is not None:
                self._client.key_value_delete(before)
        except RuntimeError:
            self.broken = self.lost = True
            raise
        return [heard[process] for process in range(self.count)]


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What each process has found, together."""
    return {name: value for part in parts for name, value in part.items()}


def one_line(error: BaseException) -> str:
    """The gist of an error in a line."""
    text = str(error)
    for known in ("No space left on device", "Permission denied", "Read-only file system"):
        if known in text and not isinstance(error, JaxformerError):
            return known
    if isinstance(error, JaxformerError):
        return text
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return next(iter(text.strip().splitlines()), type(error).__name__)[:200]


def _described(error: Exception) -> dict[str, Any]:
    code = None
    if isinstance(error, JaxformerError):
        kind, code = type(error), error.exit_code
    elif isinstance(error, OSError) or is_out_of_memory(error):
        kind = ResourceError
    else:
        kind = JaxformerError
    return {"kind": kind.__name__, "message": one_line(error), "code": code}


def _rebuilt(process: int, told: Mapping[str, Any], *, already_reported: bool) -> JaxformerError:
    message = f"process {process}: {told['message']}"
    kind = getattr(errors, told["kind"], JaxformerError)
    if kind is StoppedError:
        error: JaxformerError = StoppedError(message, told["code"] - 128)
    else:
        error = kind(message)
        error.exit_code = told["code"] or kind.exit_code
    error.already_reported = already_reported
    return error
