"""The ATen operators of PyTorch, recorded as they are dispatched, with source lines."""

import contextlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.tape import Tape
from jaxformer.parity.recording.operators.torch_decompositions import decompositions
from jaxformer.parity.recording.operators.torch_stops import Stops
from jaxformer.parity.recording.operators.torch_weights import Weight
from jaxformer.parity.recording.torch_values import require_torch, view, widest

# How many arrays are looked at, after each operator, whether they can be forgotten.
LOOKED_AT = 8


class Softmax(NamedTuple):
    """A softmax of a run.

    Attributes:
        place: of the first operator after it, on the tape.
        scores: what it was taken of.
        weights: what it gave.
    """

    place: int
    scores: Value
    weights: Value


def make_recorder(
    tape: Tape,
    weights: dict[int, Weight],
    before_forgetting: Callable[[Value], None] | None = None,
) -> Any:
    """Returns a dispatch mode that records every operator onto a tape, in float64.

    Args:
        tape: of the run.
        weights: the parameters that are in memory only while an operator reads them, by where that
            memory begins.
        before_forgetting: called with each value whose array is let go of.
    """
    torch = require_torch()
    from torch.utils._python_dispatch import TorchDispatchMode

    table = decompositions()

    def widen(value: Any) -> Any:
        return widest(value) if isinstance(value, torch.dtype) else value

    class Recorder(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # Nothing is compiled here, and the compiler takes five seconds to import.
            return False

        def __init__(self) -> None:
            super().__init__()
            self.stack: list[str] = []
            # By the place in memory, which is kept, so that no other tensor gets it.
            self.known: dict[tuple[Any, ...], tuple[Value, int]] = {}
            self.by_storage: dict[int, list[tuple[Value, tuple[Any, ...]]]] = {}
            # Where the array of each value is in memory.
            self.storages: dict[int, int] = {}
            self.kept: list[np.ndarray] = []
            # Memory that is forgotten as soon as PyTorch does not hold it any more.
            self.waiting: deque[int] = deque()
            self.writers: dict[int, list[Value]] = {}
            self.versions: dict[int, int] = {}
            # Source and module of what autograd knows by a number.
            self.callers: dict[int, tuple[str, str]] = {}
            self.stops = Stops(_source)
            self.softmaxes: list[Softmax] = []

        def name(self, tensor: Any, name: str, kind: str = "parameter") -> Value:
            value = tape.add(view(tensor), kind, name)
            self.keep(tensor, value)
            weight = weights.get(self.storages[value.index])
            if weight is not None:
                value.stand_for(weight.read, tape.recent)
            return value

        def keep(self, tensor: Any, value: Value) -> None:
            place = place_of(tensor)
            storage = self.storages[value.index] = place[0]
            self.known[place] = value, self.versions.get(storage, 0)
            if value.is_quick and storage not in self.by_storage:
                self.waiting.append(storage)
            self.by_storage.setdefault(storage, []).append((value, place))

        def value(self, tensor: Any) -> Value:
            """Returns the value of a tensor; one that is not known is a constant."""
            storage = tensor.untyped_storage().data_ptr()
            version = self.versions.get(storage, 0)
            found = self.known.get(place_of(tensor))
            if found is not None and found[1] == version:
                return found[0]
            if storage in weights:
                # No operator made this view of a weight.
                weights.pop(storage).fill()
            data = view(tensor).copy()
            if found is None:
                value = tape.add(data, "constant")
            else:
                # Something wrote to memory that this tensor shares.
                sources = [found[0], *(self.writers.get(storage, []))]
                value = tape.record("written", sources, [data], lambda *_: [data])[0]
            self.keep(tensor, value)
            return value

        def gradient(self, tensor: Any) -> Value:
            """Returns the value of a parameter's gradient, which is forgotten soon."""
            value = self.value(tensor)
            marked = {self.storages[v.index] for v in value.mark_as_gradient() if v.is_quick}
            self.waiting.extend(marked)
            return value

        def caller(self) -> tuple[str, str]:
            """Returns the source line and the module of the operator that is running."""
            node = torch._C._current_autograd_node()
            if node is not None:
                return self.callers.get(node._sequence_nr(), ("", ""))
            found = _source(), self.stack[-1] if self.stack else ""
            # The number that autograd gave to this operator, if it will differentiate it.
            self.callers.setdefault(torch.autograd._get_sequence_nr() - 1, found)
            return found

        def before_write(self, tensor: Any) -> None:
            """Keeps what recorded values hold before an operator writes to their memory."""
            storage = tensor.untyped_storage().data_ptr()
            # Its numbers are no longer those that the module has.
            weights.pop(storage, None)
            for value, _ in self.by_storage.pop(storage, []):
                self.kept.append(value.data)
                value.data = value.data.copy()
            self.versions[storage] = self.versions.get(storage, 0) + 1

        def forget(self, most: int | None = None) -> None:
            """Lets go of memory that PyTorch does not hold any more.

            Args:
                most: how many pieces of memory are looked at; default all that wait.
            """
            waiting = len(self.waiting)
            for _ in range(waiting if most is None else min(most, waiting)):
                storage = self.waiting.popleft()
                values = self.by_storage.get(storage, [])
                is_quick = all(value.is_quick for value, _ in values)
                if not values or not is_quick or storage in self.versions:
                    continue
                if not _is_held_by(values[0][0].data, len(values)):
                    self.waiting.append(storage)
                    continue
                for value, place in self.by_storage.pop(storage):
                    if before_forgetting is not None:
                        before_forgetting(value)
                    self.known.pop(place, None)
                    value.forget(tape.recent)

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = {name: widen(value) for name, value in (kwargs or {}).items()}
            args = tuple(widen(value) for value in args)
            if func in table:
                with self:
                    made = table[func](*args, **kwargs)
                if made is not NotImplemented:
                    if func is torch.ops.aten._softmax.default:
                        self.softmaxes.append(
                            Softmax(len(tape.operators), self.value(args[0]), self.value(made))
                        )
                    return made
            self.forget(LOOKED_AT)
            flat, rebuild = _flatten(args, kwargs)
            # Operators that make a view read no numbers.
            read = set() if func.is_view else {t.untyped_storage().data_ptr() for t in flat}
            for storage in read & weights.keys():
                weights[storage].fill()
            inputs = [self.value(tensor) for tensor in flat]
            self.stops.note(func, flat, inputs)
            written = [
                arg
                for arg, spec in zip(args, func._schema.arguments, strict=False)
                if spec.alias_info is not None and spec.alias_info.is_write
                if isinstance(arg, torch.Tensor)
            ]
            for tensor in written:
                self.before_write(tensor)
            out = func(*args, **kwargs)
            out_flat = written or [t for t in _leaves(out) if isinstance(t, torch.Tensor)]
            if not out_flat:
                return out
            if "empty" in str(func):
                for tensor in out_flat:
                    # What was left in memory is no value of the run.
                    tensor.zero_()

            # A view may need numbers in order, and what is written to is not the operator's own.
            must_copy = bool(written) or "view" in str(func)

            def run(*arrays: Any) -> list[Any]:
                tensors = [_as_tensor(array, must_copy) for array in arrays]
                again_args, again_kwargs = rebuild(tensors)
                with float64_by_default():
                    made = func(*again_args, **again_kwargs)
                return [view(t) for t in _leaves(made) if isinstance(t, torch.Tensor)]

            numbers = {
                spec.name: float(arg)
                for arg, spec in zip(args, func._schema.arguments, strict=False)
                if isinstance(arg, int | float) and not isinstance(arg, bool)
            }
            source, module = self.caller()
            name = str(func).removeprefix("aten.").partition(".")[0]
            made = tape.record(
                name, inputs, [view(t) for t in out_flat], run,
                source=source, module=module, numbers=numbers,
                terms=inputs[0].shape[-1] if name == "bmm" else 0,
            )  # fmt: skip
            if name == "_safe_softmax":
                self.softmaxes.append(Softmax(len(tape.operators), inputs[0], made[0]))
            for tensor, value in zip(out_flat, made, strict=True):
                self.keep(tensor, value)
                if written:
                    self.writers.setdefault(tensor.untyped_storage().data_ptr(), []).append(value)
                if self.storages[value.index] in weights:
                    value.forget(tape.recent)
            for storage in read & weights.keys():
                weights[storage].empty()
            return out

    return Recorder()


@contextlib.contextmanager
def float64_by_default() -> Iterator[None]:
    """Makes what PyTorch computes of integers float64, as in the run itself."""
    torch = require_torch()
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(default)


def _is_held_by(array: np.ndarray, count: int) -> bool:
    """Returns whether the memory of a tensor's array is held by so many arrays, and no tensor."""
    torch = require_torch()
    # An array of a tensor keeps a tensor of its own alive.
    tensor, holders = array.base, getattr(torch._C, "_storage_Use_Count", None)
    if holders is None or not isinstance(tensor, torch.Tensor):
        return False
    # The storage that is asked is one more.
    return bool(holders(tensor.untyped_storage()._cdata) == count + 1)


def _as_tensor(array: np.ndarray, must_copy: bool) -> Any:
    """Returns an array as a tensor, of the same memory where that is possible and allowed."""
    if must_copy or not array.flags.writeable or min(array.strides, default=0) < 0:
        array = np.array(array, order="C")
    return require_torch().from_numpy(array)


def place_of(tensor: Any) -> tuple[Any, ...]:
    """Returns where the numbers of a tensor are in memory, and how they are read."""
    storage = tensor.untyped_storage().data_ptr()
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    else:
        yield value


def _flatten(args: Any, kwargs: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Returns the tensors of a call, and a function that puts others in their places."""
    from torch.utils._pytree import tree_flatten, tree_unflatten

    leaves, spec = tree_flatten((args, kwargs))
    torch = require_torch()
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

    def rebuild(tensors: list[Any]) -> Any:
        filled = list(others)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        return tree_unflatten(filled, spec)

    return [leaves[i] for i in places], rebuild


_TORCH = os.sep + os.path.join("site-packages", "torch") + os.sep
# Its lines say less than those that call it.
_EINOPS = os.sep + os.path.join("site-packages", "einops") + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_OWN = os.path.dirname(os.path.dirname(os.path.dirname(_HERE))) + os.sep
_MODULES = os.path.join("torch", "nn", "modules") + os.sep
# What calls a module, whichever it is.
_CALLS = os.path.join(_MODULES, "module.py")
_SMALL_MODULES = tuple(
    os.sep + name + ".py"
    for name in ("container", "linear", "normalization", "sparse", "dropout", "conv")
)


def _source() -> str:
    """Returns "path:line" of the innermost code that runs outside of torch, or of its module."""
    frame = sys._getframe(1)
    inside = innermost = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(_OWN):
            # The run itself: further out is the code that asked for the comparison.
            if name == f"{_HERE}torch_run.py" and frame.f_code.co_name in ("__init__", "backward"):
                return inside or innermost
        elif _TORCH not in name and _EINOPS not in name:
            return f"{name}:{frame.f_lineno}"
        elif _MODULES in name and not name.endswith(_CALLS):
            # The line of torch's own model, where the model is torch's, or a module by itself.
            innermost = innermost or f"{name}:{frame.f_lineno}"
            if not inside and not name.endswith(_SMALL_MODULES):
                inside = f"{name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return inside or innermost
