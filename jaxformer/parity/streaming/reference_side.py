"""Passes of the reference, whose weights are read from its files block by block."""

import contextlib
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.graphs.recording.torch_isolated import RawCall, record_calls
from jaxformer.parity.sources.checkpoints import as_tensor
from jaxformer.parity.streaming.empty_reference import EmptyReference
from jaxformer.parity.streaming.layout import CannotStreamError, Layout, is_within
from jaxformer.parity.streaming.products import add_products
from jaxformer.parity.streaming.state import State
from jaxformer.parity.trace import torch_trace, torch_values
from jaxformer.parity.trace.memory import release
from jaxformer.parity.trace.torch_recorder import CallRecorder, owner_of, tied_parameters


class ReferencePass:
    """One pass of the reference, in one dtype, with the weights of one block at a time.

    Args:
        empty: the reference.
        layout: its parts.
        rows: the token ids that are read, ascending.
        dtype: to run in.
        backward: whether gradients will be asked for.
        state: keeps what the blocks return.

    Attributes:
        arguments: what each block was called with.
        trace: the calls around the blocks.
        results: the float tensors that the model returned.
    """

    def __init__(
        self,
        empty: EmptyReference,
        layout: Layout,
        rows: np.ndarray,
        dtype: str,
        *,
        backward: bool = False,
        state: State | None = None,
        progress: Callable[[], None] = lambda: None,
    ):
        self.layout, self.dtype, self.backward = layout, dtype, backward
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
        self.results: list[Any] = []
        self.trace = torch_trace.Trace({}, [], {})
        self._leaves: dict[str, list[Any]] = {}
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
        return torch.nn.Parameter(self.to_tensor(array), requires_grad=self.backward)

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
        tied = tied_parameters(self.modules, kept) if self.backward else {}
        # A large head has no parameter that could be tied.
        heads = {pair.reference[0] for pair in self.layout.heads.values()}
        tied = {path: leaves for path, leaves in tied.items() if path not in heads}
        recorder = CallRecorder(self.backward, tied, copying=True)
        originals = {unit: self.modules[unit].forward for unit in self.layout.unit_references}
        for unit, original in originals.items():
            self.modules[unit].forward = functools.partial(self._answer, unit, original)
        tensors = [torch_values.tensor(x) for x in inputs]
        try:
            with (
                self._exact(),
                recorder.recording(kept),
                torch.enable_grad() if self.backward else torch.no_grad(),
            ):
                self.results = torch_values.floats(call(self.module, tensors))
        finally:
            for unit in originals:
                del self.modules[unit].forward
        self._shares = recorder.shares
        self.trace.calls.update(recorder.calls)
        self.trace.outputs.extend(torch_values.view(value) for value in self.results)

    def _answer(self, unit: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns what a block returns, which ends the gradient's way: see ``pull``."""
        torch = torch_trace.require_torch()
        path = self.layout.unit_references[unit]
        if unit in self.arguments:
            raise CannotStreamError(f"the reference calls {unit} more than once")
        self.arguments[unit] = (args, kwargs)
        name = f"{path}.reference-{self.dtype}"
        known = self.state.load(name) if self.state else None
        if known is None:
            with self._loaded(unit), torch.no_grad():
                output = original(*args, **kwargs)
            if self.state:
                arrays: list[np.ndarray] = []
                notes = _flatten(output, arrays)
                self.state.save(name, arrays, notes)
        else:
            output = _unflatten(known[1], known[0])
        leaves: list[Any] = []

        def cut(value: Any) -> Any:
            leaves.append(value.detach().requires_grad_(self.backward))
            return leaves[-1]

        output = map_floats(cut, output)
        self._leaves[unit] = leaves
        self.progress()
        return output

    def begin_backward(self, cotangents: Sequence[np.ndarray]) -> None:
        """Pulls gradients of the model's results back to what the blocks returned."""
        torch = torch_trace.require_torch()
        pairs = [
            (result, torch.from_numpy(cotangent))
            for result, cotangent in zip(self.results, cotangents, strict=False)
            if result.requires_grad
        ]
        with self._exact():
            torch.autograd.backward([r for r, _ in pairs], [c for _, c in pairs], retain_graph=True)
        # Logits are large.
        self.results.clear()
        self.trace.outputs.clear()

    def cotangents_of(self, unit: str) -> list[np.ndarray]:
        """Returns the gradients of what a block returned; all later blocks have been pulled."""
        gradients = [
            np.zeros(tuple(leaf.shape)) if leaf.grad is None else leaf.grad.numpy()
            for leaf in self._leaves[unit]
        ]
        self.trace.calls[unit].output_gradients[:] = gradients
        return gradients

    def pull(self, unit: str, gradients: Sequence[np.ndarray | None]) -> None:
        """Pulls the gradients of what a block was given further back."""
        torch = torch_trace.require_torch()
        given: list[Any] = []
        map_floats(given.append, self.arguments[unit])
        pairs = [
            (value, torch.from_numpy(np.ascontiguousarray(gradient)))
            for value, gradient in zip(given, gradients, strict=True)
            if gradient is not None and value.requires_grad
        ]
        if pairs:
            with self._exact():
                torch.autograd.backward(
                    [v for v, _ in pairs], [g for _, g in pairs], retain_graph=True
                )

    def finish(self) -> None:
        """Keeps the gradients of the parameters around the blocks; all blocks have been pulled."""
        self.trace.gradients.update(self._shares)
        tied = set(self._shares)
        for name, parameter in self.module.named_parameters():
            if not parameter.is_meta and parameter.grad is not None and name not in tied:
                self.trace.gradients[name] = parameter.grad.numpy()
        self._leaves.clear()

    def run_unit(
        self, unit: str, cotangents: Sequence[np.ndarray] | None
    ) -> tuple[torch_trace.Trace, list[np.ndarray | None]]:
        """Runs a block again, with every call in it recorded.

        Returns:
            Its calls and the gradients of its parameters; and those of what it was given.
        """
        trace, gradients, is_intact = self._run_unit(unit, cotangents, copying=False)
        if not is_intact:
            # A module overwrote recorded tensors in place, so the records must be copies.
            trace, gradients, _ = self._run_unit(unit, cotangents, copying=True)
        return trace, gradients

    @contextlib.contextmanager
    def loaded_unit(self, unit: str, trace: torch_trace.Trace) -> Iterator["LoadedUnit"]:
        """Gives a block with its weights inside the ``with`` block, to look into a bug."""
        with self._loaded(unit), self._exact():
            yield LoadedUnit(self.module, trace, unit, self.arguments[unit])

    def _run_unit(
        self, unit: str, cotangents: Sequence[np.ndarray] | None, *, copying: bool
    ) -> tuple[torch_trace.Trace, list[np.ndarray | None], bool]:
        torch = torch_trace.require_torch()
        backward = cotangents is not None
        kept = {
            path: module
            for path, module in self.modules.items()
            if is_within(path, unit) and owner_of(path, module) in self.layout.recorded
        }
        recorder = CallRecorder(backward, {}, copying)
        given: list[Any] = []

        def take(value: Any) -> Any:
            given.append(value.detach().requires_grad_(backward and value.requires_grad))
            return given[-1]

        args, kwargs = map_floats(take, self.arguments[unit])
        gradients: dict[str, np.ndarray] = {}
        with self._loaded(unit), contextlib.ExitStack() as stack:
            block = self.modules[unit]
            own = dict(block.named_parameters(prefix=unit))
            if backward:
                stack.enter_context(torch_trace.freeing_weights(block))
            stack.enter_context(self._exact())
            stack.enter_context(recorder.recording(kept))
            if self.dtype == "float64":
                stack.enter_context(recorder.recording_attention())
            stack.enter_context(torch.enable_grad() if backward else torch.no_grad())
            results = torch_values.floats(block(*args, **kwargs))
            if cotangents is not None:
                pulled = zip(results, cotangents, strict=True)
                pairs = [(r, torch.from_numpy(np.array(c))) for r, c in pulled if r.requires_grad]
                torch.autograd.backward([r for r, _ in pairs], [c for _, c in pairs])
            for name, parameter in own.items():
                if parameter.grad is not None:
                    gradients[name] = recorder.array(parameter.grad)
                parameter.grad = None
        back = [
            None if not value.requires_grad or value.grad is None else value.grad.numpy()
            for value in given
        ]
        trace = torch_trace.Trace(recorder.calls, [], gradients)
        return trace, back, recorder.is_intact()


@dataclasses.dataclass(frozen=True)
class LoadedUnit:
    """A block of the reference in memory.

    Attributes:
        module: the reference.
        trace: what was recorded of the block.
        unit: its path.
        arguments: what it is called with.
    """

    module: Any
    trace: torch_trace.Trace
    unit: str
    arguments: tuple[Any, Any]

    def record_calls(self, paths: Sequence[str]) -> dict[str, list[RawCall]]:
        """Runs the block, and returns every call of some of its modules as it was made."""
        args, kwargs = self.arguments
        return record_calls(
            self.module, paths, lambda module: module.get_submodule(self.unit)(*args, **kwargs)
        )


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
