"""A JAX function, evaluated operator by operator with every float in float64.

The function is traced to a jaxpr, so it does not matter which framework wrote it. Loops are
unrolled and calls are inlined. A cast to a narrower float is left out, so that what remains of a
difference is no rounding. Arrays that were computed before the call, such as tables in float32,
stay as they are.
"""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params

from jaxformer.parity.graphs.candidates import Candidate
from jaxformer.parity.graphs.numpy_operators import MOST_NUMBERS, VIEWS, numpy_function
from jaxformer.parity.graphs.tape import Tape, Value

# Operators that call a jaxpr, with the name of the argument that holds it.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_lin": "jaxpr",
    "xla_call": "call_jaxpr",
    "run_state": "jaxpr",
}
# Operators that must see the bits of the dtype that they were written for.
OWN_DTYPE = {"bitcast_convert_type", "nextafter", "pallas_call", "ffi_call", "custom_call"}
LIBRARIES = ("jax", "jaxlib", "flax", "equinox", "haiku", "jaxtyping", "penzai", "chex", "optax")


class JaxRun:
    """One run of a candidate, forward and, where it can be differentiated, backward.

    Args:
        candidate: the model.
        args: positional arguments, numpy arrays.
        kwargs: named arguments: arrays are inputs, everything else is passed on.
        tape: what the run is recorded on.
        known: arrays to use in place of some parameters, by path, in float64.
        backward: whether to prepare the backward pass.

    Attributes:
        tape: the same.
        no_gradients: why there is no backward pass; "" if there is one.
    """

    def __init__(
        self,
        candidate: Candidate,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tape: Tape,
        known: Mapping[str, Any],
        backward: bool = True,
    ):
        arrays = {name: value for name, value in kwargs.items() if isinstance(value, np.ndarray)}
        others = {name: value for name, value in kwargs.items() if name not in arrays}

        def call(parameters: Any, args: Sequence[Any], arrays: Mapping[str, Any]) -> Any:
            return candidate.call(parameters, *args, **arrays, **others)

        given = (candidate.parameters, list(args), arrays)
        self.tape = tape
        self._recorder = _Recorder(tape)
        self._traced = _trace(call, given, backward)
        self.no_gradients = self._traced.no_gradients
        leaves = jax.tree.leaves(given)
        values = []
        with jax.enable_x64(True):
            for name, leaf in zip(_leaf_names(given), leaves, strict=True):
                side, _, rest = name.partition(".")
                kind = "parameter" if side == "0" else "input"
                data = known.get(rest) if kind == "parameter" else None
                values.append(
                    tape.add(_host(_in_float64(leaf)) if data is None else data, kind, rest)
                )
            self._differentiated = [
                v for v, leaf in zip(values, leaves, strict=True) if _is_float(leaf)
            ]
            jaxpr = self._traced.forward
            made = self._recorder.run(jaxpr.jaxpr, _constants(tape, jaxpr.consts), values, "", "")
        count = self._traced.count
        tape.outputs, self._residuals = made[:count], made[count:]

    def backward(self, cotangents: Mapping[int, np.ndarray]) -> dict[int, Value]:
        """Records the backward pass.

        Args:
            cotangents: of outputs, by their place in ``tape.outputs``; the others have none.

        Returns:
            the gradient of each float parameter and input, by the index of its value.
        """
        jaxpr = self._traced.backward
        assert jaxpr is not None, self.no_gradients
        with jax.enable_x64(True):
            given = [
                self.tape.add(
                    cotangents.get(place, np.zeros(output.data.shape)),
                    "input",
                    f"cotangent {place}",
                )
                for place, output in enumerate(self.tape.outputs)
            ]
            gradients = self._recorder.run(
                jaxpr.jaxpr, _constants(self.tape, jaxpr.consts), [*self._residuals, *given], "", ""
            )
        return {v.index: g for v, g in zip(self._differentiated, gradients, strict=True)}

    def stops(self) -> list[str]:
        """Returns "path:line" of each place where the user's code stops gradients."""
        return list(dict.fromkeys(_stops(self._traced.plain().jaxpr)))


def _stops(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "stop_gradient" and _is_called_by_user(equation):
            yield source_of(equation)
        for inner in jaxprs_in_params(equation.params):
            yield from _stops(inner)


def candidate_arrays(candidate: Candidate) -> dict[str, np.ndarray]:
    """Returns the float parameters of a candidate, by path, as they are."""
    leaves = zip(
        _leaf_names(candidate.parameters), jax.tree.leaves(candidate.parameters), strict=True
    )
    return {name: np.asarray(leaf) for name, leaf in leaves if _is_float(leaf)}


def _leaf_names(tree: Any) -> list[str]:
    return [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


@dataclasses.dataclass(frozen=True)
class _Traced:
    """A function's jaxprs.

    Attributes:
        forward: from all leaves to the float outputs, then what the backward pass reads.
        count: of the float outputs.
        backward: from what the backward pass reads and the outputs' cotangents to the gradients
            of the float leaves; None if there is none.
        plain: traces the function alone, to its float outputs.
        no_gradients: why there is no backward pass.
    """

    forward: ClosedJaxpr
    count: int
    backward: ClosedJaxpr | None
    plain: Callable[[], ClosedJaxpr]
    no_gradients: str = ""


def _trace(call: Callable[..., Any], given: Any, backward: bool) -> _Traced:
    """Traces a function: in float64 where it allows that, else as the user runs it."""
    with contextlib.suppress(TypeError, ValueError):
        return _trace_in(call, given, backward, True)
    return _trace_in(call, given, backward, False)


def _trace_in(call: Callable[..., Any], given: Any, backward: bool, wide: bool) -> _Traced:
    leaves, structure = jax.tree.flatten(given)
    shapes = [_shape(leaf, wide) for leaf in leaves]
    floats = [place for place, leaf in enumerate(leaves) if _is_float(leaf)]

    def run(some: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        filled = list(leaves)
        for place, leaf in zip(floats, some, strict=True):
            filled[place] = leaf
        return [
            leaf
            for leaf in jax.tree.leaves(call(*jax.tree.unflatten(structure, filled)))
            if _is_float(leaf)
        ]

    def forward(*leaves: Any) -> Any:
        return jax.vjp(lambda some: run(some, leaves), [leaves[place] for place in floats])

    def pull_back(pullback: Any, cotangents: Any) -> Any:
        return pullback(cotangents)[0]

    def trace_plain() -> ClosedJaxpr:
        def plain(*leaves: Any) -> list[Any]:
            return run([leaves[place] for place in floats], leaves)

        with jax.enable_x64(wide):
            return jax.make_jaxpr(plain)(*shapes)

    reason = "it was not asked for"
    if backward:
        try:
            with jax.enable_x64(wide):
                jaxpr, (outputs, pullback) = jax.make_jaxpr(forward, return_shape=True)(*shapes)
                gradients = jax.make_jaxpr(pull_back)(pullback, outputs)
            return _Traced(jaxpr, len(outputs), gradients, trace_plain)
        except Exception as error:  # Whatever a user's function cannot be differentiated for.
            reason = f"the candidate cannot be differentiated: {str(error).partition(chr(10))[0]}"
    jaxpr = trace_plain()
    return _Traced(jaxpr, len(jaxpr.jaxpr.outvars), None, trace_plain, reason)


def _shape(leaf: Any, wide: bool) -> Any:
    """Returns what stands for a leaf when a function is traced."""
    if _is_float(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, np.float64 if wide else np.float32)
    if not wide and _is_number(leaf) and leaf.dtype == np.int64:
        return np.asarray(leaf).astype(np.int32)
    return leaf


def _is_float(leaf: Any) -> bool:
    return _is_number(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _is_number(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _in_float64(leaf: Any) -> Any:
    return np.asarray(leaf).astype(np.float64) if _is_float(leaf) else leaf


def _host(array: Any) -> Any:
    """Returns an array on the host; of random keys, their bits."""
    return np.asarray(array if _is_number(array) else jax.random.key_data(array))


def _constants(tape: Tape, arrays: Sequence[Any]) -> list[Value]:
    return [_constant(tape, _in_float64(jnp.asarray(array))) for array in arrays]


def _constant(tape: Tape, array: Any) -> Value:
    return tape.add(_host(array), "constant")


def exact_decimal(number: Any) -> Any:
    """Returns a float32 number as the decimal number that was written: 0.1, not 0.10000000149."""
    if isinstance(number, np.floating | float) or getattr(number, "dtype", None) == np.float32:
        narrow = np.float32(number)
        if np.isfinite(narrow) and float(narrow) == float(number):
            return np.float64(str(narrow))
    return number


class _Recorder:
    """Evaluates jaxprs onto a tape."""

    def __init__(self, tape: Tape):
        self.tape = tape

    def run(
        self,
        jaxpr: Any,
        constants: Sequence[Value],
        arguments: Sequence[Value],
        source: str,
        module: str,
    ) -> list[Value]:
        """Evaluates a jaxpr and returns its outputs.

        Args:
            jaxpr: without its constants.
            constants: of the jaxpr.
            arguments: of the jaxpr.
            source: where it was called.
            module: whose call it was.
        """
        environment = dict(zip(jaxpr.constvars, constants, strict=True))
        environment |= dict(zip(jaxpr.invars, arguments, strict=True))

        def read(atom: Any) -> Value:
            if isinstance(atom, Literal):
                return _constant(self.tape, _literal(atom))
            return environment[atom]

        is_users = not source or _is_users_function(jaxpr)
        for equation in _needed(jaxpr):
            here = (source_of(equation) if is_users else "") or source
            name = str(equation.source_info.name_stack)
            inside = "/".join(part for part in (module, name) if part)
            made = self._equation(equation, [read(atom) for atom in equation.invars], here, inside)
            environment |= dict(zip(equation.outvars, made, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _closed(
        self, closed: Any, values: Sequence[Value], source: str, module: str
    ) -> list[Value]:
        if not isinstance(closed, ClosedJaxpr):
            return self.run(closed, [], values, source, module)
        return self.run(closed.jaxpr, _constants(self.tape, closed.consts), values, source, module)

    def _equation(
        self, equation: Any, values: list[Value], source: str, module: str
    ) -> Sequence[Value]:
        name, params = equation.primitive.name, equation.params
        if name in CALLS and CALLS[name] in params:
            return self._closed(params[CALLS[name]], values, source, module)
        if name == "scan":
            return self._scan(params, values, source, module)
        if name == "while":
            return self._while(params, values, source, module)
        if name == "cond":
            branch = int(np.clip(values[0].data, 0, len(params["branches"]) - 1))
            return self._closed(params["branches"][branch], values[1:], source, module)
        run = _narrow(equation) if name in OWN_DTYPE else _wide(equation)
        if name in OWN_DTYPE and name not in ("bitcast_convert_type", "nextafter"):
            self.tape.opaque.add(name)
        made = run(*(value.data for value in values))
        numbers = {
            key: float(value)
            for key, value in params.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        return self.tape.record(
            name, values, [_host(a) for a in made], run,
            source=source, module=module, numbers=numbers,
        )  # fmt: skip

    def _scan(
        self, params: Mapping[str, Any], values: list[Value], source: str, module: str
    ) -> list[Value]:
        fixed, count = params["num_consts"], params["num_carry"]
        constants, carry = values[:fixed], values[fixed : fixed + count]
        rows = values[fixed + count :]
        length = params["length"]
        stacked: list[list[Value]] = []
        for step in range(length)[:: -1 if params["reverse"] else 1]:
            one = [self._take(row, step, source, module) for row in rows]
            made = self._closed(params["jaxpr"], [*constants, *carry, *one], source, module)
            carry = made[:count]
            stacked.append(made[count:])
        if params["reverse"]:
            stacked.reverse()
        columns = [self._stack(list(c), source, module) for c in zip(*stacked, strict=True)]
        return [*carry, *columns]

    def _take(self, value: Value, step: int, source: str, module: str) -> Value:
        def take(array: Any) -> list[Any]:
            return [array[step]]

        made = take(value.data)
        return self.tape.record("index", [value], made, take, source=source, module=module)[0]

    def _stack(self, values: list[Value], source: str, module: str) -> Value:
        def stack(*arrays: Any) -> list[Any]:
            return [np.stack(arrays)]

        made = stack(*(value.data for value in values))
        return self.tape.record("stack", values, made, stack, source=source, module=module)[0]

    def _while(
        self, params: Mapping[str, Any], values: list[Value], source: str, module: str
    ) -> list[Value]:
        first, second = params["cond_nconsts"], params["body_nconsts"]
        condition, body = values[:first], values[first : first + second]
        carry = values[first + second :]
        while bool(
            self._closed(params["cond_jaxpr"], [*condition, *carry], source, module)[0].data
        ):
            carry = self._closed(params["body_jaxpr"], [*body, *carry], source, module)
        return carry


def _needed(jaxpr: Any) -> list[Any]:
    """Returns the equations on which the outputs depend, in order."""
    wanted = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    found = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not wanted.isdisjoint(equation.outvars):
            found.append(equation)
            wanted |= {atom for atom in equation.invars if not isinstance(atom, Literal)}
    return found[::-1]


def _literal(atom: Any) -> Any:
    value = atom.val
    dtype = atom.aval.dtype
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(exact_decimal(value) if dtype != np.float64 else value, np.float64)
    return np.asarray(value, dtype)


def _wide(equation: Any) -> Callable[..., Any]:
    """Returns what an equation computes, with float64 in place of every float."""
    primitive = equation.primitive
    name = primitive.name
    params = {key: _wide_dtype(value) for key, value in equation.params.items()}
    if name in ("reduce_precision", "copy", "copy_p", "optimization_barrier"):
        return lambda *arrays: list(arrays)
    if name in ("dot_general", "conv_general_dilated"):
        params["precision"] = None
    many = primitive.multiple_results
    small = _in_numpy(equation)

    def run(*arrays: Any) -> Sequence[Any]:
        if small is not None:
            with np.errstate(all="ignore"):
                return small(*arrays)
        with jax.enable_x64(True):
            wide = [jnp.asarray(a) for a in _alike(equation, arrays)]
            made = primitive.bind(*wide, **params)
            return [_host(array) for array in (made if many else [made])]

    return run


def _in_numpy(equation: Any) -> Callable[..., Sequence[Any]] | None:
    """Returns what computes an equation in numpy, None if that must be left to JAX."""
    atoms = (*equation.invars, *equation.outvars)
    if any(not isinstance(atom.aval.dtype, np.dtype) for atom in atoms) or len(atoms) == 1:
        return None
    is_large = max(atom.aval.size for atom in atoms) > MOST_NUMBERS
    if is_large and equation.primitive.name not in VIEWS:
        return None
    is_float = all(jnp.issubdtype(atom.aval.dtype, jnp.floating) for atom in equation.invars)
    function = numpy_function(equation.primitive.name, equation.params, is_float)
    if function is None:
        return None
    dtype = equation.outvars[0].aval.dtype
    dtype = np.dtype(np.float64) if jnp.issubdtype(dtype, jnp.floating) else dtype
    return lambda *arrays: [np.asarray(function(*_alike(equation, arrays)), dtype)]


def _alike(equation: Any, arrays: Sequence[Any]) -> Iterator[Any]:
    """Yields arguments; integers have the dtype that the equation has, and keys are keys."""
    for atom, array in zip(equation.invars, arrays, strict=True):
        dtype = atom.aval.dtype
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            yield jax.random.wrap_key_data(jnp.asarray(array), impl=dtype._impl.name)
        elif not jnp.issubdtype(dtype, jnp.floating):
            yield np.asarray(array, dtype)
        else:
            yield array


def _wide_dtype(value: Any) -> Any:
    if isinstance(value, np.dtype | type) and value is not bool:
        try:
            return np.dtype(np.float64) if jnp.issubdtype(value, jnp.floating) else value
        except TypeError:
            return value
    return value


def _narrow(equation: Any) -> Callable[..., Any]:
    """Returns what an equation computes in the dtypes that it was traced with, then in float64."""
    primitive, params = equation.primitive, equation.params

    def run(*arrays: Any) -> Sequence[Any]:
        with jax.enable_x64(True):
            narrow = [
                jnp.asarray(a, atom.aval.dtype) if _is_number(a) else a
                for atom, a in zip(equation.invars, _alike(equation, arrays), strict=True)
            ]
            made = primitive.bind(*narrow, **params)
            made = made if primitive.multiple_results else [made]
            return [_in_float64(_host(array)) for array in made]

    return run


_ROOTS = tuple(os.sep + os.path.join("site-packages", name) + os.sep for name in LIBRARIES)
# Files of JAX between a function of ``jax.lax`` and its equation.
_TRACING = tuple(
    os.path.join("jax", "_src", part)
    for part in ("lax", "interpreters", "core.py", "source_info_util.py", "tree_util.py")
)
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def _is_users(path: str) -> bool:
    """Returns whether a file is neither of a library below the models nor of this package."""
    return not (path.startswith(("<frozen", _HERE)) or any(root in path for root in _ROOTS))


def source_of(equation: Any) -> str:
    """Returns "path:line" of the innermost code of the user that made an equation, or ""."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if _is_users(frame.file_name):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


def _is_called_by_user(equation: Any) -> bool:
    """Returns whether code of the user called a function of ``jax.lax`` itself."""
    traceback = equation.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    callers = (f.file_name for f in frames if not any(part in f.file_name for part in _TRACING))
    return _is_users(next(callers, _HERE))


def _is_users_function(jaxpr: Any) -> bool:
    """Returns whether a jaxpr is of a function of the user.

    One of a function of JAX itself may come from a cache, with the traceback of its first call.
    """
    where = jaxpr.debug_info.func_src_info or ""
    return " at " in where and _is_users(where.rpartition(" at ")[2])
