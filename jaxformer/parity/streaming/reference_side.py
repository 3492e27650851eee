"""Passes of the reference, whose weights are read from its files block by block."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxformer.parity.matching.positions import Made, computes_tables
from jaxformer.parity.recording import torch_values
from jaxformer.parity.recording.memory import release
from jaxformer.parity.recording.operators.torch_calls import WatchedForward
from jaxformer.parity.recording.reference_modules import modules_of
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
        progress: called after each block.

    Attributes:
        module: the model, with what is around the blocks in the dtype of the pass.
        given: what each block and each large head was called with, by path: positional and named
            arguments.
        made: what each of them returned, by path.
        passed_on: of the floats that each of them returned after the first, by place, which of
            those that it was given they are.
        tables: what modules returned that compute tables of positions, by path.
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
            torch_values.in_float64(empty.module)
            if is_wide
            else torch_values.in_narrow(empty.module, dtype)
        )
        self.modules = modules_of(self.module)
        self.given: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.made: dict[str, Any] = {}
        self.passed_on: dict[str, dict[int, int]] = {}
        self.tables: dict[str, Made] = {}
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
                self._set(key, self.to_tensor(self._read(self._name(key))))
        for path in lookups:
            table = self._read(f"{path}.weight")
            _compact(self.modules[path], table, rows, self.to_parameter)
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
        dtype = getattr(torch_values.require_torch(), self.dtype)
        return as_tensor(np.ascontiguousarray(array)).to(dtype)

    def to_parameter(self, array: np.ndarray) -> Any:
        """Returns an array as a parameter of the dtype of the pass."""
        return _parameter(self.to_tensor(array))

    def _set(self, key: int, tensor: Any) -> None:
        """Puts a tensor in place of a parameter, or its shape again."""
        parameter = self._shapes[key] if tensor is None else _parameter(tensor)
        for _, module, leaf in self._places[key]:
            module._parameters[leaf] = parameter

    def _unit_of(self, path: str) -> str | None:
        units = self.layout.unit_references
        return next((unit for unit in units if is_within(path, unit)), None)

    @contextlib.contextmanager
    def loaded(self, unit: str, *, as_stored: bool = False) -> Iterator[Any]:
        """Holds the weights of a block inside the ``with`` block.

        Args:
            unit: its path.
            as_stored: whether in the dtype of the file.

        Yields:
            A model that has the block at its path, and no other; it calls the block.
        """
        keys = [k for k, places in self._places.items() if is_within(places[0][0], unit)]
        for key in keys:
            array = self._read(self._name(key))
            self._set(key, as_tensor(array) if as_stored else self.to_tensor(array))
        try:
            yield holder(self.modules[unit], unit)
        finally:
            for key in keys:
                self._set(key, None)
            release(1 << 30)

    @contextlib.contextmanager
    def _exact(self) -> Iterator[None]:
        exact = self.dtype == "float64"
        wide = torch_values.everything_in_float64() if exact else contextlib.nullcontext()
        with wide, torch_values.without_fast_path():
            yield

    def run(self, inputs: Sequence[np.ndarray], call: Callable[[Any, Any], Any]) -> None:
        """Runs the model, and keeps what blocks and large heads were given, and what they made."""
        torch = torch_values.require_torch()
        tensors = [torch_values.tensor(x) for x in torch_values.in_dtype(inputs, self.dtype)]
        with contextlib.ExitStack() as stack:
            for path, module in self.modules.items():
                if computes_tables(module) and self._unit_of(path) is None:
                    keep = partial(self._keep_table, path)
                    stack.callback(module.register_forward_hook(keep).remove)
            stack.enter_context(self._exact())
            stack.enter_context(torch.no_grad())
            stack.enter_context(answering(self.module, self.layout, self._answer))
            call(self.module, tensors)

    def _keep_table(self, path: str, module: Any, args: Any, output: Any) -> None:
        arrays = [torch_values.array(tensor) for tensor in torch_values.floats(output)]
        before = self.tables.get(path, Made(len(self.tables), []))
        self.tables[path] = Made(before.order, [*before.calls, arrays])

    def _answer(self, path: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns what a block or a head returns, after it was made or found."""
        if path in self.given:
            raise CannotStreamError(f"the reference calls {path} more than once")
        self.given[path] = args, kwargs
        if path not in self.layout.unit_references:
            self._keep(path, original(*args, **kwargs))
            return self.made[path]
        name = f"{self.layout.unit_references[path]}.reference-{self.dtype}"
        known = self.state.load(name) if self.state else None
        if known is None:
            with self.loaded(path):
                output = original(*args, **kwargs)
            if self.state:
                arrays: list[np.ndarray] = []
                notes = _flatten(output, arrays)
                self.state.save(name, arrays, notes)
        else:
            output = _unflatten(known[1], known[0])
        self._keep(path, output)
        self.progress()
        return output

    def _keep(self, path: str, output: Any) -> None:
        """Keeps what a block or a head returned."""
        self.made[path] = output
        given, made = (torch_values.floats(v) for v in (list(self.given[path]), output))
        self.passed_on[path] = {
            n: m
            for n, tensor in enumerate(made)
            if n
            for m, other in enumerate(given)
            if tensor.shape == other.shape and bool((tensor == other).all())
        }


def _parameter(tensor: Any) -> Any:
    return torch_values.require_torch().nn.Parameter(tensor, requires_grad=False)


def holder(module: Any, path: str) -> Any:
    """Returns a model that has a module at its path, and calls it, or a method of it."""
    torch = torch_values.require_torch()

    class Holder(torch.nn.Module):  # type: ignore[name-defined]
        """Holds one module of a model."""

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            """Calls the module."""
            owner = self.get_submodule(path.removesuffix(".attend"))
            call = owner.attend if path.endswith(".attend") else owner
            return call(*args, **kwargs)

    made = around = Holder()
    *outer, last = path.removesuffix(".attend").split(".")
    for name in outer:
        inner = torch.nn.Module()
        around.add_module(name, inner)
        around = inner
    around.add_module(last, module)
    return made


@contextlib.contextmanager
def answering(module: Any, layout: Layout, answer: Callable[..., Any]) -> Iterator[None]:
    """Calls a function in place of blocks and large heads inside the ``with`` block.

    Args:
        module: the model.
        layout: its parts.
        answer: takes the path, the original function, and the arguments.
    """
    modules = modules_of(module)
    heads = [pair.reference[0] for pair in layout.heads.values()]
    replaced: list[tuple[Any, str, Any]] = []
    for path in [*layout.unit_references, *heads]:
        name = "attend" if path.endswith(".attend") else "forward"
        inner = modules[path]
        watched = vars(inner).get(name)
        if isinstance(watched, WatchedForward):
            # The call is recorded as before.
            replaced.append((watched, "original", watched.original))
            watched.original = _bound(answer, path, watched.original)
            continue
        original = getattr(inner, name)
        replaced.append((inner, name, vars(inner).get(name)))
        vars(inner)[name] = _bound(answer, path, original)
    try:
        yield
    finally:
        for inner, name, before in replaced:
            if before is None:
                del vars(inner)[name]
            else:
                vars(inner)[name] = before


def _bound(answer: Callable[..., Any], path: str, original: Callable[..., Any]) -> Any:
    return lambda *args, **kwargs: answer(path, original, *args, **kwargs)


def _compact(
    module: Any, table: np.ndarray, rows: np.ndarray, parameter: Callable[[np.ndarray], Any]
) -> None:
    """Makes an embedding hold only some of its rows; it is called with the same ids."""
    torch = torch_values.require_torch()
    rows = rows[rows < len(table)]
    module._parameters["weight"] = parameter(table[rows])
    if module.padding_idx is not None:
        place = int(np.searchsorted(rows, module.padding_idx))
        is_there = place < len(rows) and rows[place] == module.padding_idx
        module.padding_idx = place if is_there else None
    known, original = torch.from_numpy(rows), type(module).forward
    module.forward = _OfRows(known, original, module)


class _OfRows:
    """The lookup of an embedding that holds only some rows. A copy of the embedding has its own."""

    def __init__(self, rows: Any, original: Callable[..., Any], module: Any):
        self._rows, self._original, self._module = rows, original, module

    def __call__(self, ids: Any, *more: Any) -> Any:
        """Returns the rows of ids."""
        places = torch_values.require_torch().searchsorted(self._rows, ids)
        return self._original(self._module, places, *more)


def replace_floats(value: Any, tensors: Iterator[Any]) -> Any:
    """Returns a nested value with its float tensors replaced, in order."""
    if torch_values.is_float(value):
        return next(tensors)
    if type(value) in (tuple, list):
        return type(value)(replace_floats(inner, tensors) for inner in value)
    if type(value) is dict:
        return {name: replace_floats(inner, tensors) for name, inner in value.items()}
    return value


def _flatten(value: Any, arrays: list[np.ndarray]) -> Any:
    """Returns the structure of what a block returned, as JSON has it."""
    if torch_values.is_float(value):
        arrays.append(torch_values.as_numpy(value))
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
