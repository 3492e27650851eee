"""Passes of the reference, whose weights are read from its files block by block."""

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.recording import torch_values
from jaxformer.parity.recording.calls import torch_trace
from jaxformer.parity.recording.calls.padding import find_padding
from jaxformer.parity.recording.calls.torch_recorder import CallRecorder
from jaxformer.parity.recording.memory import release
from jaxformer.parity.recording.reference_modules import owner_of
from jaxformer.parity.sources.checkpoints import as_tensor
from jaxformer.parity.streaming.empty_reference import EmptyReference
from jaxformer.parity.streaming.layout import CannotStreamError, Layout, is_within
from jaxformer.parity.streaming.products import add_products
from jaxformer.parity.streaming.state import State


class ReferencePass:
    """One pass of the reference, in one dtype, with the weights of one block at a time.

    Args:
        empty: the reference.
        layout: its parts.
        rows: the token ids that are read, ascending.
        dtype: to run in.
        state: keeps what the blocks return.

    Attributes:
        arguments: what each block was called with.
        trace: the calls around the blocks.
    """

    def __init__(
        self,
        empty: EmptyReference,
        layout: Layout,
        rows: np.ndarray,
        dtype: str,
        *,
        state: State | None = None,
        progress: Callable[[], None] = lambda: None,
    ):
        self.layout, self.dtype = layout, dtype
        self.state, self.progress = state, progress
        self.tensors = empty.tensors
        is_wide = dtype == "float64"
        self.module = (
            torch_trace.in_float64(empty.module)
            if is_wide
            else torch_trace.in_narrow(empty.module, dtype)
        )
        self.modules = torch_trace.modules_of(self.module)
        self.arguments: dict[str, tuple[Any, Any]] = {}
        self.trace = torch_trace.Trace({}, [])
        self._shapes = {id(p): p for p in self.module.parameters()}
        # Every parameter's places: several where it is tied.
        self._places: dict[int, list[tuple[str, Any, str]]] = defaultdict(list)
        for path, module in self.module.named_modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    self._places[id(parameter)].append((path, module, leaf))
        self._load_around(rows)

    def _load_around(self, rows: np.ndarray) -> None:
        """Loads what is around the blocks; of large arrays only what is read."""
        wide = [pair.reference[0] for pair in self.layout.heads.values()]
        wide = [path.removesuffix(".attend") for path in wide]
        lookups = {pair.reference[0] for pair in self.layout.lookups.values()}
        for key in self._places:
            paths = [path for path, _, _ in self._places[key]]
            if self._unit_of(paths[0]) is None and not {*wide, *lookups}.intersection(paths):
                self._set(key, self._read(self._name(key)))
        for path in lookups:
            _compact(self.modules[path], self._read(f"{path}.weight"), rows, self._tensor)
        for pair in self.layout.heads.values():
            path = pair.reference[0]
            read = self.read_head(path.removesuffix(".attend"))
            add_products(self.modules[path], path, read, self.to_tensor)

    def read_head(self, owner: str) -> Callable[[], dict[str, np.ndarray]]:
        """Returns how to read the arrays of a large head, in the dtype of the file."""
        names = [name for name in self.tensors if name.rpartition(".")[0] == owner]
        return lambda: {name.rpartition(".")[2]: self.tensors[name].read() for name in names}

    def _name(self, key: int) -> str:
        path, _, leaf = self._places[key][0]
        return f"{path}.{leaf}".lstrip(".")

    def _read(self, name: str) -> np.ndarray:
        return self.tensors[name].read()

    def to_tensor(self, array: np.ndarray) -> Any:
        """Returns an array as a tensor of the dtype of the pass."""
        dtype = getattr(torch_trace.require_torch(), self.dtype)
        return as_tensor(np.ascontiguousarray(array)).to(dtype)

    def _tensor(self, array: np.ndarray) -> Any:
        torch = torch_trace.require_torch()
        return torch.nn.Parameter(self.to_tensor(array), requires_grad=False)

    def _set(self, key: int, array: np.ndarray | None) -> None:
        """Puts an array in place of a parameter, or its shape again."""
        parameter = self._shapes[key] if array is None else self._tensor(array)
        for _, module, leaf in self._places[key]:
            module._parameters[leaf] = parameter

    def _unit_of(self, path: str) -> str | None:
        units = self.layout.unit_references
        return next((unit for unit in units if is_within(path, unit)), None)

    @contextlib.contextmanager
    def _loaded(self, unit: str) -> Iterator[None]:
        """Holds the weights of a block inside the ``with`` block."""
        keys = [k for k, places in self._places.items() if is_within(places[0][0], unit)]
        for key in keys:
            self._set(key, self._read(self._name(key)))
        try:
            yield
        finally:
            for key in keys:
                self._set(key, None)
            release(1 << 30)

    @contextlib.contextmanager
    def _exact(self) -> Iterator[None]:
        exact = self.dtype == "float64"
        wide = torch_trace.everything_in_float64() if exact else contextlib.nullcontext()
        with wide, torch_trace.without_fast_path():
            yield

    def run(self, inputs: Sequence[np.ndarray], call: Callable[[Any, Any], Any]) -> None:
        """Runs the model, and keeps what is around the blocks."""
        torch = torch_trace.require_torch()
        kept = {
            path: module
            for path, module in self.modules.items()
            if owner_of(path, module) in self.layout.recorded
            and (self._unit_of(path) in (None, path))
        }
        recorder = CallRecorder(copying=True)
        originals = {unit: self.modules[unit].forward for unit in self.layout.unit_references}
        for unit, original in originals.items():
            self.modules[unit].forward = functools.partial(self._answer, unit, original)
        tensors = [torch_values.tensor(x) for x in torch_values.in_dtype(inputs, self.dtype)]
        attends = bool(self.layout.others) and self.dtype == "float64"
        try:
            with (
                self._exact(),
                recorder.recording(kept, self.modules),
                recorder.recording_attention() if attends else contextlib.nullcontext(),
                torch.no_grad(),
            ):
                results = torch_values.floats(call(self.module, tensors))
        finally:
            for unit in originals:
                del self.modules[unit].forward
        self.trace.calls.update(recorder.calls)
        self.trace.padding = find_padding(recorder.calls.values())
        self.trace.called.update(recorder.called)
        self.trace.outputs.extend(torch_values.view(value) for value in results)

    def _answer(self, unit: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns what a block returns."""
        path = self.layout.unit_references[unit]
        if unit in self.arguments:
            raise CannotStreamError(f"the reference calls {unit} more than once")
        self.arguments[unit] = (args, kwargs)
        name = f"{path}.reference-{self.dtype}"
        known = self.state.load(name) if self.state else None
        if known is None:
            with self._loaded(unit):
                output = original(*args, **kwargs)
            if self.state:
                arrays: list[np.ndarray] = []
                notes = _flatten(output, arrays)
                self.state.save(name, arrays, notes)
        else:
            output = _unflatten(known[1], known[0])
        self.progress()
        return output

    def run_unit(self, unit: str) -> torch_trace.Trace:
        """Runs a block again, with every call in it recorded."""
        args, kwargs = self.arguments[unit]
        with self._loaded(unit), self._exact():
            return torch_trace.run(
                self.module, [],
                call=lambda module, inputs: module.get_submodule(unit)(*args, **kwargs),
                keep=lambda path: is_within(path, unit) and path in self.layout.recorded,
                weights=self.dtype == "float64",
            )  # fmt: skip

    @contextlib.contextmanager
    def loaded(self, unit: str) -> Iterator[None]:
        """Holds a block with its weights inside the ``with`` block, to be run by itself."""
        with self._loaded(unit), self._exact():
            yield


def _compact(
    module: Any, table: np.ndarray, rows: np.ndarray, parameter: Callable[[np.ndarray], Any]
) -> None:
    """Makes an embedding hold only some of its rows; it is called with the same ids."""
    torch = torch_trace.require_torch()
    rows = rows[rows < len(table)]
    module._parameters["weight"] = parameter(table[rows])
    if module.padding_idx is not None:
        place = int(np.searchsorted(rows, module.padding_idx))
        is_there = place < len(rows) and rows[place] == module.padding_idx
        module.padding_idx = place if is_there else None
    known, original = torch.from_numpy(rows), module.forward
    module.forward = lambda ids, *more: original(torch.searchsorted(known, ids), *more)


def map_floats(function: Callable[[Any], Any], value: Any) -> Any:
    """Returns a nested value with its float tensors replaced."""
    if torch_values.is_float(value):
        return function(value)
    if type(value) in (tuple, list):
        return type(value)(map_floats(function, inner) for inner in value)
    if type(value) is dict:
        return {name: map_floats(function, inner) for name, inner in value.items()}
    return value


def _flatten(value: Any, arrays: list[np.ndarray]) -> Any:
    """Returns the structure of what a block returned, as JSON has it."""
    if torch_values.is_float(value):
        arrays.append(torch_trace.as_numpy(value))
        return len(arrays) - 1
    if type(value) in (tuple, list):
        return [_flatten(inner, arrays) for inner in value]
    if value is None:
        return None
    raise CannotStreamError(f"a block of the reference returns a {type(value).__name__}")


def _unflatten(structure: Any, arrays: Sequence[np.ndarray]) -> Any:
    if isinstance(structure, list):
        return tuple(_unflatten(inner, arrays) for inner in structure)
    return None if structure is None else torch_values.tensor(arrays[structure])
