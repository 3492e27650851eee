"""Values and errors that the processes of a run exchange.

They go through the key-value store of JAX's coordination service, never through the devices, so
that they arrive before JAX knows any device, while a device computes, and in a thread beside the
training. With one process nothing is sent.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from jaxformer import errors
from jaxformer.errors import (
    JaxformerError,
    ResourceError,
    Setting,
    StoppedError,
    is_out_of_memory,
)

T = TypeVar("T")

# Before every key.
PREFIX = "jaxformer"
# Processes may wait for each other as long as the work of one takes; a lost one is noticed before.
SECONDS = 7 * 24 * 3600
MILLISECONDS = 1000 * SECONDS
NUMBERS = itertools.count()
# The causes that the text of an error may name; TensorStore has one class for all its errors.
SYSTEM_REASONS = (
    "No space left on device",
    "Permission denied",
    "Read-only file system",
    "File too large",
    "Disk quota exceeded",
)


class ControlPlane:
    """Exchanges values between all processes, each of which makes the same calls in the same order.

    Args:
        topic: the same on every process. Of control planes with one topic, the first must be done
            with before the next is made.
        alone: whether this process works by itself, however many there are.

    Attributes:
        index: which process this is, from 0.
        count: how many there are.
        broken: whether an error was exchanged; nothing more can be.
        lost: whether a process was lost.
    """

    # By topic, the key that this process wrote last.
    _last_keys: ClassVar[dict[str, str]] = {}

    def __init__(self, topic: str, *, alone: bool = False):
        from jax._src import distributed

        state = distributed.global_state
        self.index: int = 0 if alone else state.process_id
        self.count: int = 1 if alone else state.num_processes
        self.broken = self.lost = False
        self._client: Any = state.client
        self._topic = topic
        self._name = f"{PREFIX}/{topic}/{0 if alone else next(NUMBERS)}"
        self._calls = itertools.count()

    def all_gather(self, function: Callable[[], Any]) -> list[Any]:
        """Calls ``function`` in every process and returns all results, in order of process.

        Results must be values that JSON can hold.

        Raises:
            JaxformerError: that of the first process in which it failed, in all of them.
            RuntimeError: a process was lost.
        """
        if self.count == 1:
            return [function()]
        own_error: Exception | None = None
        answer: dict[str, Any] = {}
        try:
            answer["value"] = function()
        except Exception as error:
            own_error = error
            answer["error"] = _serialize(error)
        answers = [json.loads(text) for text in self._exchange(json.dumps(answer))]
        for process, answer in enumerate(answers):
            if "error" in answer:
                self.broken = True
                if process == self.index and own_error is not None:
                    raise own_error
                raise _deserialize(process, answer["error"], already_reported=self.index != 0)
        return [answer["value"] for answer in answers]

    def all_or_raise(self, function: Callable[[], T]) -> T:
        """Calls ``function`` in every process and returns this process's own result, of any type.

        Raises:
            JaxformerError: that of the first process in which it failed, in all of them.
            RuntimeError: a process was lost.
        """
        results: list[T] = []
        self.all_gather(lambda: results.append(function()))
        return results[0]

    def on_primary(self, function: Callable[[], Any]) -> Any:
        """Calls ``function`` in process 0 alone and returns its result in every process.

        Raises:
            JaxformerError: that of process 0, in all of them.
            RuntimeError: a process was lost.
        """
        return self.all_gather(lambda: function() if self.index == 0 else None)[0]

    def barrier(self) -> None:
        """Returns once all processes have called it."""
        self.all_gather(lambda: None)

    def share_of_work(self, sizes: Mapping[str, int]) -> list[str]:
        """Returns this process's share of some names; all shares have about as many bytes.

        Args:
            sizes: bytes by name, the same in every process.
        """
        loads = [0] * self.count
        share = []
        for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
            process = loads.index(min(loads))
            loads[process] += sizes[name] + 1
            if process == self.index:
                share.append(name)
        return share

    def _exchange(self, text: str) -> list[str]:
        """Returns the texts of all processes, in order of process."""
        call = f"{self._name}/{next(self._calls)}"
        own_key = f"{call}/{self.index}"
        try:
            self._client.key_value_set(own_key, text)
            # One name for all barriers of a topic: the service remembers every name for good.
            self._client.wait_at_barrier(f"{PREFIX}/{self._topic}", MILLISECONDS)
            texts = {
                int(key.rsplit("/", 1)[1]): value
                for key, value in self._client.key_value_dir_get(f"{call}/")
            }
            # All have passed this barrier, so all have read the values of the one before.
            before, self._last_keys[self._topic] = self._last_keys.get(self._topic), own_key
            if before is not None:
                self._client.key_value_delete(before)
        except RuntimeError:
            self.broken = self.lost = True
            raise
        return [texts[process] for process in range(self.count)]


def merge_parts(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what each process has found, as one dict."""
    return {name: value for part in parts for name, value in part.items()}


def brief_reason(error: BaseException) -> str:
    """Returns why something failed, in one line."""
    text = str(error)
    if isinstance(error, JaxformerError):
        return text
    for reason in SYSTEM_REASONS:
        if reason in text:
            return reason
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return next(iter(text.strip().splitlines()), type(error).__name__)[:200]


def _serialize(error: Exception) -> dict[str, Any]:
    code = None
    if isinstance(error, JaxformerError):
        kind, code = type(error), error.exit_code
    elif isinstance(error, OSError) or is_out_of_memory(error):
        kind = ResourceError
    else:
        kind = JaxformerError
    # A setting in a message becomes a list.
    parts = error.args if isinstance(error, JaxformerError) else (brief_reason(error),)
    return {"kind": kind.__name__, "parts": parts, "code": code}


def _deserialize(
    process: int, fields: Mapping[str, Any], *, already_reported: bool
) -> JaxformerError:
    parts = [Setting(*part) if isinstance(part, list) else part for part in fields["parts"]]
    parts = [f"process {process}: ", *parts]
    kind = getattr(errors, fields["kind"], JaxformerError)
    if kind is StoppedError:
        error: JaxformerError = StoppedError(str(JaxformerError(*parts)), fields["code"] - 128)
    else:
        error = kind(*parts)
        error.exit_code = fields["code"] or kind.exit_code
    error.already_reported = already_reported
    return error
