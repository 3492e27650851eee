"""One JAX module run by itself: given inputs, and submodules that return given outputs."""

import dataclasses
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxformer.parameters import join_path, merge
from jaxformer.parity.recording import jax_modules
from jaxformer.parity.recording.calls import jax_trace
from jaxformer.parity.recording.calls.jax_programs import Program, Programs
from jaxformer.parity.recording.jax_values import (
    float_arrays,
    is_float,
    is_number,
    refill,
    refill_integers,
)
from jaxformer.parity.recording.module_calls import intercept_calls

# Gradients of some arrays, None for zero.
Gradients = Sequence[np.ndarray | None]


@dataclasses.dataclass(frozen=True)
class ForcedOutput:
    """The output that one call of a submodule is made to return.

    Attributes:
        template: what the call returned in the whole model, of any structure.
        arrays: the float arrays to put into the template, None to keep one.
        integers: the first integer arrays to put into it: which experts a router chose.
    """

    template: Any
    arrays: Sequence[np.ndarray | None]
    integers: Sequence[np.ndarray] = ()


@dataclasses.dataclass(frozen=True)
class IsolatedOutcome:
    """What an isolated run of one module gave. Submodules are named by path within the module.

    Attributes:
        outputs: the float arrays of its result.
        submodule_inputs: of each submodule, call by call, the float arrays it was called with.
        submodule_arguments: of each submodule, call by call, all its arguments by name, without
            their floats.
        integers: the integer arrays of its result.
        parameter_gradients: of its own parameters, by name within the module.
        input_gradients: of each float input.
        forced_output_gradients: of each submodule, call by call, of the arrays it returned.
    """

    outputs: list[np.ndarray]
    submodule_inputs: dict[str, list[list[np.ndarray]]]
    submodule_arguments: dict[str, list[dict[str, Any]]]
    integers: list[np.ndarray]
    parameter_gradients: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    input_gradients: list[np.ndarray] = dataclasses.field(default_factory=list)
    forced_output_gradients: dict[str, list[list[np.ndarray]]] = dataclasses.field(
        default_factory=dict
    )


class IsolatedModule:
    """One module as a pure function of its own parameters and of what enters it.

    Args:
        module: the JAX module.
        method: which of its methods to call.
        call: its arguments.
        forced_outputs: what submodules return, call by call, by path within the module.
        dtype: to which all float arrays are cast.
        programs: of other modules, one of which may serve this one too; default none.

    Attributes:
        call: its arguments.
        own: its parameters, without those of submodules whose outputs are given.
        given: the float arrays that submodules return, call by call, by path.
        arguments: of the last call: of each submodule, call by call, all its arguments by name.
        integers: the integer arrays of the last result.
        callers: of the last call: of each submodule, call by call, the frames of code that called
            it, the innermost first: path and line.
    """

    def __init__(
        self,
        module: Any,
        method: str,
        call: jax_trace.JaxCall,
        forced_outputs: Mapping[str, Sequence[ForcedOutput]],
        dtype: str = "float64",
        programs: Programs | None = None,
    ):
        split: Any = nnx.split(module, nnx.Param, ...)
        self._definition, _, rest = split
        # As it was before the call, which may have written to it.
        rest = nnx.from_flat_state(
            [
                (
                    path,
                    v.replace(call.state[name]) if (name := join_path(path)) in call.state else v,
                )
                for path, v in nnx.to_flat_state(rest)
            ]
        )
        parameters = jax_modules.parameters_of(module)
        forced = tuple(f"{path}." for path in forced_outputs)
        self.own = {n: p for n, p in parameters.items() if not f"{n}.".startswith(forced)}
        unused = {n: p for n, p in parameters.items() if n not in self.own}
        self.call = call
        self._method, self._dtype = method, dtype
        templates = {p: [one.template for one in calls] for p, calls in forced_outputs.items()}
        integers = {p: [list(one.integers) for one in calls] for p, calls in forced_outputs.items()}
        # What it reads beside what ``__call__`` is given.
        self._around = rest, unused, (call.args, call.kwargs), templates, integers
        self._programs = Programs() if programs is None else programs
        self.given = {p: [list(one.arrays) for one in calls] for p, calls in forced_outputs.items()}
        self.arguments: dict[str, list[dict[str, Any]]] = {}
        self.integers: list[Any] = []
        self.callers: dict[str, list[list[tuple[str, int]]]] = {}

    def cast(self, tree: Any) -> Any:
        """Returns a tree with its float arrays in the dtype of the run."""
        return jax.tree.map(lambda a: _as_dtype(a, self._dtype) if is_float(a) else a, tree)

    def __call__(
        self, own: Any, inputs: Any, given: Any, integers: Sequence[Any] = ()
    ) -> tuple[list[Any], dict[str, list[list[Any]]]]:
        """Returns the float arrays of the result, and of each submodule those that entered it.

        Args:
            own: parameters, like ``own``.
            inputs: the float arrays among the arguments.
            given: arrays like ``given``.
            integers: the integer arrays among the arguments; default those of the call.
        """
        return self._run(self._around, own, inputs, given, integers)

    def _run(
        self, around: Any, own: Any, inputs: Any, given: Any, integers: Sequence[Any] = ()
    ) -> tuple[list[Any], dict[str, list[list[Any]]]]:
        rest, unused, called, templates, chosen = around
        inner = merge(self._definition, {**own, **unused}, rest)
        entered: dict[str, list[list[Any]]] = {}
        self.arguments, self.callers = {}, {}

        def return_forced(
            path: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], original: Any
        ) -> Any:
            number = len(entered.get(path, ()))
            if number >= len(templates.get(path, ())):
                return original(*args, **kwargs)
            entered.setdefault(path, []).append(float_arrays((args, kwargs)))
            bound = jax_trace.bind_arguments(owner, args, kwargs)
            self.arguments.setdefault(path, []).append(bound)
            # Without a frame to begin at, how many are left out depends on Python's version.
            frames = traceback.walk_stack(sys._getframe())
            lines = [(frame.f_code.co_filename, line) for frame, line in frames]
            self.callers.setdefault(path, []).append(lines)
            # Numbers of numpy cannot be indexed by what is traced.
            numbers = [jnp.asarray(array) for array in chosen[path][number]]
            template = refill_integers(self.cast(templates[path][number]), numbers)
            return refill(template, given[path][number])

        args, kwargs = self.cast(refill(refill_integers(called, integers), inputs))
        with intercept_calls(inner, return_forced):
            output = getattr(inner, self._method)(*args, **kwargs)
        self.integers = [a for a in _no_floats(output) if a.ndim and a.dtype != bool]
        return float_arrays(output), entered

    @property
    def jaxpr(self) -> Any:
        """The forward run as a jaxpr."""
        return jax.make_jaxpr(self.__call__)(*self._primals()).jaxpr

    def _primals(self) -> Any:
        """Returns what ``__call__`` takes: parameters, inputs, given arrays, each on the host."""
        primals = self.own, self.call.inputs, self.given
        return jax.tree.map(lambda a: _in_numpy(a, self._dtype) if is_float(a) else a, primals)

    def run(
        self,
        cotangents: Gradients | None = None,
        submodule_cotangents: Mapping[str, Sequence[Gradients]] | None = None,
    ) -> IsolatedOutcome:
        """Runs it on the inputs of its call, and pulls given gradients back through it.

        It is traced, or an equal module was, and its operators are evaluated one by one.

        Args:
            cotangents: gradients of the output's arrays; None runs forward only.
            submodule_cotangents: gradients of what enters each submodule, call by call.
        """
        is_pulled = cotangents is not None
        primals = self._primals()
        kind = self._definition, self._method, self._dtype, is_pulled
        program = self._programs.find(
            kind, self._around, primals, lambda: Program(self._traced, is_pulled)
        )
        (outputs, entered), (arguments, integers), pull = program.forward(self._around, primals)
        arguments = _without_tracers(refill(program.kept, arguments, _is_no_float))
        if cotangents is None:
            return IsolatedOutcome(outputs, entered, arguments, integers)

        def find_cotangents(path: str, number: int) -> Gradients:
            calls = (submodule_cotangents or {}).get(path, [])
            return calls[number] if number < len(calls) else []

        directions = (
            _fill_zeros(outputs, cotangents),
            {
                path: [
                    _fill_zeros(arrays, find_cotangents(path, number))
                    for number, arrays in enumerate(calls)
                ]
                for path, calls in entered.items()
            },
        )
        gradients = program.backward(pull, directions)
        return IsolatedOutcome(outputs, entered, arguments, integers, *gradients)

    def _traced(self, around: Any, *primals: Any) -> tuple[Any, Any, Any]:
        """Runs while it is traced; returns floats, other numbers, and what is not traced."""
        floats = self._run(around, *primals)
        return floats, (_no_floats(self.arguments), self.integers), self.arguments


def _is_no_float(leaf: Any) -> bool:
    """Returns whether a leaf is an array of integers or truth values."""
    return is_number(leaf) and not is_float(leaf)


def _no_floats(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if _is_no_float(leaf)]


def _without_tracers(tree: Any) -> Any:
    """Returns a tree with None in place of what was traced and has no numbers."""
    return jax.tree.map(lambda a: None if isinstance(a, jax.core.Tracer) else a, tree)


def _in_numpy(array: Any, dtype: Any) -> Any:
    return np.asarray(array).astype(dtype, copy=False)


def _fill_zeros(arrays: Sequence[Any], gradients: Gradients) -> list[Any]:
    """Returns one gradient for each array: zero where none, or one of another shape, is given."""
    padded = [*gradients, *[None] * len(arrays)]
    return [
        np.zeros(a.shape, a.dtype) if g is None or g.shape != a.shape else _in_numpy(g, a.dtype)
        for a, g in zip(arrays, padded, strict=False)
    ]


def _as_dtype(array: Any, dtype: Any) -> Any:
    """Returns an array for JAX; numpy's are cast by numpy, which compiles nothing."""
    if isinstance(array, np.ndarray):
        return jax.device_put(array.astype(dtype, copy=False), may_alias=False)
    return jnp.asarray(array, dtype)
