"""What the processes of a run tell each other about a checkpoint.

A save goes on beside the training, so its words must not come between the collectives of the
devices: they go through the service that ``jax.distributed`` keeps on process 0. With one process
nothing is sent.
"""

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxformer import errors
from jaxformer.errors import JaxformerError, ResourceError

# The loss of a process is noticed long before.
SECONDS = 24 * 3600
MILLISECONDS = 1000 * SECONDS
NUMBERS = itertools.count()


class Exchange:
    """The words of one save or restore; every process makes them in the same order.

    Args:
        what: it is about, the same on every process.
        alone: whether this process does it by itself, whoever else there is.

    Attributes:
        broken: whether an error was shared: there is no more to say.
        lost: whether a process was.
    """

    def __init__(self, what: str, *, alone: bool = False):
        import jax

        self.index: int = 0 if alone else jax.process_index()
        self.count: int = 1 if alone else jax.process_count()
        self.broken = self.lost = False
        self._name = f"jaxformer/{what}/{0 if alone else next(NUMBERS)}"
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
            known = type(error) if isinstance(error, JaxformerError) else ResourceError
            said |= {"error": one_line(error), "kind": known.__name__}
        heard = [json.loads(text) for text in self._gather(json.dumps(said))]
        for process, words in enumerate(heard):
            if "error" in words:
                self.broken = True
                if process == self.index and refusal is not None:
                    raise refusal
                kind = getattr(errors, words["kind"])
                heard_of: JaxformerError = kind(f"process {process}: {words['error']}")
                heard_of.told_elsewhere = self.index != 0
                raise heard_of
        return [words["value"] for words in heard]

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
        from jax._src import distributed

        client: Any = distributed.global_state.client
        key = f"{self._name}/{next(self._calls)}"
        try:
            client.key_value_set(f"{key}/{self.index}", text)
            client.wait_at_barrier(f"{key}/said", MILLISECONDS)
            heard = [
                client.blocking_key_value_get(f"{key}/{process}", MILLISECONDS)
                for process in range(self.count)
            ]
            client.wait_at_barrier(f"{key}/heard", MILLISECONDS)
            client.key_value_delete(f"{key}/{self.index}")
        except RuntimeError:
            self.broken = self.lost = True
            raise
        return heard


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
