"""The candidate without its weights: they are read from its files, block by block."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxformer.parameters import join_path, merge
from jaxformer.parity.recording.calls import jax_trace
from jaxformer.parity.recording.memory import release
from jaxformer.parity.recording.operators.evaluation import evaluator_of
from jaxformer.parity.recording.operators.host_calls import call_on_host
from jaxformer.parity.recording.torch_values import in_dtype
from jaxformer.parity.segments.calls.products import candidate_slices
from jaxformer.parity.streaming.layout import CannotStreamError, Layout, is_within
from jaxformer.parity.streaming.products import FewRows, arrays_of
from jaxformer.parity.streaming.state import State
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.abstract_modules import parameter_shapes
from jaxformer.porting.mapping.casts import DTYPES
from jaxformer.porting.mapping.position_tables import PositionTable
from jaxformer.porting.mapping.transfer import read_view

Tensors = Mapping[str, StoredTensor]


class EmptyCandidate:
    """A JAX model without weights, into which those of a block are put as they are needed.

    Args:
        module: the model, with shapes in place of weights.
        layout: its parts.
        rows: the token ids that are read, ascending.

    Attributes:
        module: the same model, with arrays without memory in place of weights.
    """

    def __init__(self, module: Any, layout: Layout, rows: np.ndarray):
        self.layout = layout
        split: Any = nnx.split(module)
        shapes = parameter_shapes(module)
        # A view of one zero: any use of it would be seen in the numbers.
        self._empty: dict[str, Any] = {
            name: np.broadcast_to(np.float32(0), s) for name, s in shapes.items()
        }
        self.module = merge(split[0], self._empty)
        self.module.eval()
        for path in layout.lookups:
            owner, _, leaf = path.rpartition(".")
            count = self._empty[f"{path}.embedding"].shape[0]
            few = FewRows(PositionTable(rows[rows < count]), self._empty[f"{path}.embedding"])
            setattr(jax_trace.resolve(self.module, owner)[0], leaf, few)
        self._variables = {
            join_path(path): variable
            for path, variable in nnx.to_flat_state(nnx.state(self.module, nnx.Param))
        }

    def load_around(self, tensors: Tensors, dtype: str) -> None:
        """Puts in place what is around the blocks; of large arrays only what is read."""
        heads = {path.removesuffix(".attend") for path in self.layout.heads}
        units = self.layout.units
        for name, variable in self._variables.items():
            owner = name.rpartition(".")[0]
            if any(is_within(owner, unit) for unit in units):
                continue
            if owner in self.layout.lookups:
                rows = jax_trace.resolve(self.module, owner)[0].rows.array
                table = tensors[name].read()[rows]
            elif owner in heads:
                continue
            else:
                table = tensors[name].read()
            variable.set_value(as_jax(table, dtype))

    @contextlib.contextmanager
    def loaded(self, path: str, tensors: Tensors, dtype: str) -> Iterator[None]:
        """Holds the weights of a block inside the ``with`` block."""
        names = [name for name in self._variables if is_within(name, path)]
        for name in names:
            self._variables[name].set_value(as_jax(read_view(tensors[name]), dtype))
        try:
            yield
        finally:
            for name in names:
                self._variables[name].set_value(self._empty[name])
            release(1 << 30)

    def run(
        self,
        inputs: Sequence[Any],
        call: Callable[[Any, Any], Any],
        tensors: Tensors,
        dtype: str,
        *,
        state: State | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> dict[str, jax_trace.JaxCall]:
        """Runs the model, block after block, and returns the calls around the blocks.

        Args:
            inputs: of the model.
            call: how to call it.
            tensors: its arrays, by name.
            dtype: to run in.
            state: keeps what the blocks return.
            progress: called after each block.
        """
        self.load_around(tensors, dtype)
        called = set()

        def run_unit(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            name = f"{path}.candidate-{dtype}"
            known = state.load(name) if state else None
            if known is not None:
                output = known[0][0]
            else:
                with self.loaded(path, tensors, dtype):
                    output = _evaluated(self.module, path, args, kwargs, dtype)
                if state:
                    state.save(name, [np.asarray(output)])
            progress()
            return output

        def handle(
            path: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], original: Any
        ) -> Any:
            if path in self.layout.heads:
                made = jax.eval_shape(lambda: original(*args, **kwargs))
                run = functools.partial(self._product, path, tensors, dtype)
                return call_on_host(run, made, args[0])
            if path not in self.layout.units:
                return original(*args, **kwargs)
            if path in called:
                raise CannotStreamError(f"the candidate calls {path} more than once")
            called.add(path)
            # A block returns what it is given, changed: an array of the same shape.
            return call_on_host(functools.partial(run_unit, path), args[0], args, kwargs)

        return jax_trace.trace(
            self.module,
            lambda module: call(module, in_dtype(inputs, dtype)),
            keep=lambda path: not self.layout.is_inner(path),
            handle=handle,
            evaluate=evaluator_of(dtype),
        )[0]

    def _product(self, path: str, tensors: Tensors, dtype: str, x: Any) -> Any:
        owner, method = jax_trace.resolve(self.module, path)
        arrays = arrays_of(path.removesuffix(".attend"), tensors)
        within = "" if method == "__call__" else method
        parts = [
            _evaluated(own, within, (x,), {}, dtype)
            for _, own in candidate_slices(owner, arrays, dtype)
        ]
        return np.concatenate(parts, axis=-1)

    def run_unit(
        self, path: str, call: jax_trace.JaxCall, dtype: str
    ) -> dict[str, jax_trace.JaxCall]:
        """Runs a block that is loaded again, on what it was given; returns every call in it."""
        return jax_trace.trace(
            self.module,
            lambda module: jax_trace.resolve(module, path)[0](*call.args, **call.kwargs),
            keep=lambda inner: is_within(inner, path),
            evaluate=evaluator_of(dtype),
        )[0]


def _evaluated(
    module: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: str
) -> Any:
    """Returns what a part of a module makes in a dtype."""

    def run(module: Any) -> Any:
        owner, method = jax_trace.resolve(module, path)
        return getattr(owner, method)(*args, **kwargs)

    evaluate = evaluator_of(dtype)
    return jax_trace.trace(module, run, keep=lambda path: False, evaluate=evaluate)[1]


def as_jax(array: np.ndarray, dtype: str) -> Any:
    """Returns an array for JAX in a dtype, which JAX transposes and casts faster than numpy."""
    if array.dtype.itemsize > DTYPES[dtype].itemsize:
        array = array.astype(DTYPES[dtype])
    if array.ndim == 2 and array.flags.f_contiguous:
        return jax.device_put(array.T).T.astype(dtype)
    return jax.device_put(array).astype(dtype)
