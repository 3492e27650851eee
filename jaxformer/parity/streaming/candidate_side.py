"""The candidate without its weights: they are read from its files, block by block."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxformer.parameters import join_path, merge
from jaxformer.parity.recording.jax_modules import resolve
from jaxformer.parity.recording.memory import release
from jaxformer.parity.recording.module_calls import intercept_calls
from jaxformer.parity.recording.operators.candidates import Candidate
from jaxformer.parity.recording.operators.evaluation import evaluate_function, evaluator_of
from jaxformer.parity.recording.operators.host_calls import call_on_host
from jaxformer.parity.recording.operators.module_marks import marked_nnx
from jaxformer.parity.recording.torch_values import in_dtype
from jaxformer.parity.streaming.layout import CannotStreamError, Layout, is_within
from jaxformer.parity.streaming.products import FewRows, arrays_of, candidate_slices
from jaxformer.parity.streaming.state import State
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.abstract_modules import parameter_shapes
from jaxformer.porting.mapping.casts import DTYPES
from jaxformer.porting.mapping.position_tables import PositionTable
from jaxformer.porting.mapping.transfer import read_view

Tensors = Mapping[str, StoredTensor]


@dataclasses.dataclass(frozen=True)
class Given:
    """What a block or a large head was called with.

    Attributes:
        args: positional arguments.
        kwargs: named arguments.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class EmptyCandidate:
    """A JAX model without weights, into which those of a block are put as they are needed.

    Args:
        module: the model, with shapes in place of weights.
        layout: its parts.
        rows: the token ids that are read, ascending.

    Attributes:
        module: the same model, with arrays without memory in place of weights.
        given: what blocks and large heads were called with in the last pass, by path.
        made: what they returned, by path.
        variables: its parameters, by name.
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
            setattr(resolve(self.module, owner)[0], leaf, few)
        self.variables = {
            join_path(path): variable
            for path, variable in nnx.to_flat_state(nnx.state(self.module, nnx.Param))
        }
        self.given: dict[str, Given] = {}
        self.made: dict[str, np.ndarray] = {}

    def is_around(self, name: str) -> bool:
        """Returns whether a parameter is around the blocks, and held in memory."""
        owner = name.rpartition(".")[0]
        heads = {path.removesuffix(".attend") for path in self.layout.heads}
        is_inside = any(is_within(owner, unit) for unit in self.layout.units)
        return not is_inside and (owner in self.layout.lookups or owner not in heads)

    def load_around(self, tensors: Tensors, dtype: str) -> None:
        """Puts in place what is around the blocks; of large arrays only what is read."""
        for name, variable in self.variables.items():
            if not self.is_around(name):
                continue
            owner, table = name.rpartition(".")[0], tensors[name].read()
            if owner in self.layout.lookups:
                table = table[resolve(self.module, owner)[0].rows.array]
            variable.set_value(as_jax(table, dtype))

    @contextlib.contextmanager
    def loaded(self, path: str, tensors: Tensors, dtype: str) -> Iterator[None]:
        """Holds the weights of a block inside the ``with`` block."""
        names = [name for name in self.variables if is_within(name, path)]
        for name in names:
            self.variables[name].set_value(as_jax(read_view(tensors[name]), dtype))
        try:
            yield
        finally:
            for name in names:
                self.variables[name].set_value(self._empty[name])
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
    ) -> None:
        """Runs the model, block after block; what they were given and made is kept.

        Args:
            inputs: of the model.
            call: how to call it.
            tensors: its arrays, by name.
            dtype: to run in.
            state: keeps what the blocks return.
            progress: called after each block.
        """
        self.load_around(tensors, dtype)

        def run_unit(path: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self.given[path] = Given(args, kwargs)
            if path in self.layout.heads:
                self.made[path] = self._product(path, tensors, dtype, args[0])
                return self.made[path]
            name = f"{path}.candidate-{dtype}"
            known = state.load(name) if state else None
            if known is not None:
                output = known[0][0]
            else:
                with self.loaded(path, tensors, dtype):
                    output = _evaluated(self.module, path, args, kwargs, dtype)
                if state:
                    state.save(name, [np.asarray(output)])
            self.made[path] = np.asarray(output)
            progress()
            return output

        called = set()

        def handle(path: str, owner: Any, args: Any, kwargs: Any, original: Any) -> Any:
            if path not in self.layout.units and path not in self.layout.heads:
                return original(*args, **kwargs)
            if path in called:
                raise CannotStreamError(f"the candidate calls {path} more than once")
            called.add(path)
            # A block returns what it is given, changed: an array of the same shape.
            made = args[0]
            if path in self.layout.heads:
                made = jax.eval_shape(lambda: original(*args, **kwargs))
            return call_on_host(partial(run_unit, path), made, args, kwargs)

        definition, state_of = nnx.split(self.module)

        def run(leaves: Any) -> Any:
            module = nnx.merge(definition, leaves)
            with intercept_calls(module, handle):
                return call(module, in_dtype(inputs, dtype))

        evaluate_function(run, state_of, evaluate=evaluator_of(dtype))

    def _product(self, path: str, tensors: Tensors, dtype: str, x: Any) -> Any:
        owner, method = resolve(self.module, path)
        arrays = arrays_of(path.removesuffix(".attend"), tensors)
        within = "" if method == "__call__" else method
        parts = [
            _evaluated(own, within, (x,), {}, dtype)
            for _, own in candidate_slices(owner, arrays, dtype)
        ]
        return np.concatenate(parts, axis=-1)

    def as_model(
        self, names: Mapping[str, Any], call: Callable[..., Any], **marking: Any
    ) -> Candidate:
        """Returns a part of the model as a function of some of its parameters.

        Args:
            names: its parameters, by their names in the whole model: arrays of any numbers where
                others will take their place.
            call: calls the part, given the whole module and arguments.
            marking: see ``marked_nnx``.
        """
        definition: Any = nnx.split(self.module)[0]
        others = {n: v.get_value() for n, v in self.variables.items() if n not in names}

        def bind(given: Mapping[str, Any]) -> "_Bound":
            module = merge(definition, {**others, **given})
            module.eval()
            return _Bound(module, call)

        return Candidate(
            "NNX module", dict(names), bind,
            marked=lambda bound: marked_nnx(bound.module, with_inputs=True, **marking),
        )  # fmt: skip

    def unit(self, path: str) -> Candidate:
        """Returns a block as a model of its own, whose modules have their paths in the whole one.

        Of its parameters only the shapes are known, unless it is loaded.
        """
        names = {n: v.get_value() for n, v in self.variables.items() if is_within(n, path)}

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            return resolve(module, path)[0](*args, **kwargs)

        return self.as_model(names, call)


@dataclasses.dataclass(frozen=True)
class _Bound:
    """A module with arrays, and how a part of it is called."""

    module: Any
    run: Callable[..., Any]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.module, *args, **kwargs)


def _evaluated(
    module: Any, path: str, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: str
) -> Any:
    """Returns what a part of a module makes in a dtype."""
    definition, state = nnx.split(module)

    def run(leaves: Any) -> Any:
        owner, method = resolve(nnx.merge(definition, leaves), path)
        return getattr(owner, method)(*args, **kwargs)

    return evaluate_function(run, state, evaluate=evaluator_of(dtype))


def as_jax(array: np.ndarray, dtype: str) -> Any:
    """Returns an array for JAX in a dtype, which JAX transposes and casts faster than numpy."""
    if array.dtype.itemsize > DTYPES[dtype].itemsize:
        array = array.astype(DTYPES[dtype])
    if array.ndim == 2 and array.flags.f_contiguous:
        return jax.device_put(array.T).T.astype(dtype)
    return jax.device_put(array).astype(dtype)
