"""What one equation of a jaxpr computes, with every float in float64.

A cast to a narrower float is left out, so that what remains of a difference is no rounding.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from jaxformer.parity.recording.jax_values import in_float64, is_number, on_host
from jaxformer.parity.recording.operators.collectives import inside_shard_map, on_one_device
from jaxformer.parity.recording.operators.numpy_operators import SEVERAL, numpy_function

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
# Operators that leave float64 numbers as they are.
SAME = {"reduce_precision", "copy", "copy_p", "optimization_barrier", "sharding_constraint"}
# Operators that must see the bits of the dtype that they were written for.
OWN_DTYPE = {"bitcast_convert_type", "nextafter", "pallas_call", "ffi_call", "custom_call"}


def needed(jaxpr: Any) -> list[Any]:
    """Returns the equations on which the outputs depend, in order."""
    wanted = {atom for atom in jaxpr.outvars if not isinstance(atom, Literal)}
    found = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not wanted.isdisjoint(equation.outvars):
            found.append(equation)
            wanted |= {atom for atom in equation.invars if not isinstance(atom, Literal)}
    return found[::-1]


def inlined(equation: Any) -> Any:
    """Returns the jaxpr that an equation only calls, None if it does anything else."""
    if equation.primitive.name == "shard_map":
        return inside_shard_map(equation)
    return equation.params.get(CALLS.get(equation.primitive.name))


def function_of(equation: Any) -> Callable[..., Sequence[Any]]:
    """Returns what computes an equation's outputs from its inputs, arrays on the host."""
    if equation.primitive.name in OWN_DTYPE:
        return _narrow(equation)
    return on_one_device(equation) or _wide(equation)


def function_as_written(equation: Any) -> Callable[..., Sequence[Any]]:
    """Returns what computes an equation's outputs in the dtypes that it was traced with."""
    in_numpy, primitive = _in_numpy(equation, exact=False), equation.primitive
    exchanged = on_one_device(equation)
    if exchanged is not None:
        return exchanged

    def run(*arrays: Any) -> Sequence[Any]:
        if in_numpy is not None:
            with np.errstate(all="ignore"):
                return in_numpy(*arrays)
        made = primitive.bind(*map(_for_jax, _alike(equation, arrays)), **equation.params)
        return list(map(on_host, made if primitive.multiple_results else [made]))

    return run


def function_in_jax(equation: Any) -> Callable[..., Sequence[Any]]:
    """Returns what computes an equation's outputs as JAX does, from arrays of either library."""
    primitive = equation.primitive
    exchanged = on_one_device(equation)
    if exchanged is not None:
        return exchanged

    def run(*arrays: Any) -> Sequence[Any]:
        made = primitive.bind(*map(_for_jax, arrays), **equation.params)
        return list(made) if primitive.multiple_results else [made]

    return run


def _for_jax(array: Any) -> Any:
    return jnp.asarray(array) if is_number(array) else array


def function_with_rounding(equation: Any) -> Callable[..., Sequence[Any]] | None:
    """Returns what computes an equation as it is written, from float64 and to float64.

    Returns:
        None if all its floats are float64.
    """
    atoms = (*equation.invars, *equation.outvars)
    narrow = [
        atom.aval.dtype
        for atom in atoms
        if jnp.issubdtype(atom.aval.dtype, jnp.floating) and atom.aval.dtype != np.float64
    ]
    if not narrow:
        return None
    run = function_as_written(equation)
    dtypes = [
        atom.aval.dtype if jnp.issubdtype(atom.aval.dtype, jnp.floating) else None
        for atom in equation.invars
    ]

    def rounded(*arrays: Any) -> Sequence[Any]:
        given = [
            array if dtype is None else np.asarray(array).astype(dtype)
            for array, dtype in zip(arrays, dtypes, strict=True)
        ]
        return [in_float64(array) for array in run(*given)]

    return rounded


def is_opaque(equation: Any) -> bool:
    """Returns whether an equation cannot be computed in float64."""
    name = equation.primitive.name
    return name in OWN_DTYPE and name not in ("bitcast_convert_type", "nextafter")


def exact_decimal(number: Any) -> Any:
    """Returns a float32 number as the decimal number that was written: 0.1, not 0.10000000149."""
    if isinstance(number, np.floating | float) or getattr(number, "dtype", None) == np.float32:
        narrow = np.float32(number)
        if np.isfinite(narrow) and float(narrow) == float(number):
            return np.float64(str(narrow))
    return number


def _shortest_decimal(number: Any, dtype: Any) -> float:
    """Returns the shortest decimal number that a dtype of few bits rounds to a number."""
    decimals = (float(f"{float(number):.{digits}g}") for digits in range(1, 6))
    return next((d for d in decimals if np.asarray(d, dtype) == number), float(number))


def literal(atom: Any) -> Any:
    """Returns the number that is written into a jaxpr; a float as the decimal that was meant."""
    value = atom.val
    dtype = atom.aval.dtype
    if jnp.issubdtype(dtype, jnp.floating):
        if dtype.itemsize < 4:
            value = _shortest_decimal(value, dtype)
        elif dtype == np.float32:
            value = exact_decimal(value)
        return np.asarray(value, np.float64)
    if dtype == np.complex64:
        real, imaginary = np.float32(value.real), np.float32(value.imag)
        return np.asarray(complex(exact_decimal(real), exact_decimal(imaginary)))
    return np.asarray(value, dtype)


def _wide(equation: Any) -> Callable[..., Any]:
    """Returns what an equation computes, with float64 in place of every float."""
    primitive = equation.primitive
    name = primitive.name
    params = {key: _widened(value) for key, value in equation.params.items()}
    if name in SAME:
        return lambda *arrays: list(arrays)
    if name in ("dot_general", "conv_general_dilated"):
        params["precision"] = None
    many = primitive.multiple_results
    small = _in_numpy(equation, exact=True)

    def run(*arrays: Any) -> Sequence[Any]:
        if small is not None:
            with np.errstate(all="ignore"):
                return small(*arrays)
        with jax.enable_x64(True):
            wide = [jnp.asarray(a) for a in _alike(equation, arrays)]
            made = primitive.bind(*wide, **params)
            return [on_host(array) for array in (made if many else [made])]

    return run


def _in_numpy(equation: Any, *, exact: bool) -> Callable[..., Sequence[Any]] | None:
    """Returns what computes an equation in numpy, None if that must be left to JAX.

    Args:
        equation: of any jaxpr.
        exact: whether floats are float64, whatever dtype they have in the jaxpr.
    """
    atoms = (*equation.invars, *equation.outvars)
    if any(not isinstance(atom.aval.dtype, np.dtype) for atom in atoms) or len(atoms) == 1:
        return None
    is_float = all(jnp.issubdtype(atom.aval.dtype, jnp.floating) for atom in equation.invars)
    size = max(atom.aval.size for atom in atoms)
    function = numpy_function(equation.primitive.name, equation.params, is_float, size)
    if function is None:
        return None
    dtype = equation.outvars[0].aval.dtype
    if exact and jnp.issubdtype(dtype, jnp.inexact):
        is_real = jnp.issubdtype(dtype, jnp.floating)
        dtype = np.dtype(np.float64 if is_real else np.complex128)
    # Integers have the dtype that the equation has. This is run thousands of times.
    read = [atom.aval.dtype for atom in equation.invars]
    own = [None if jnp.issubdtype(one, jnp.inexact) else one for one in read]
    is_one = equation.primitive.name not in SEVERAL

    def run(*arrays: Any) -> Sequence[Any]:
        given = [
            array if one is None else np.asarray(array, one)
            for array, one in zip(arrays, own, strict=True)
        ]
        made = function(*given)
        return [np.asarray(one, dtype) for one in ([made] if is_one else made)]

    return run


def _alike(equation: Any, arrays: Sequence[Any]) -> Iterator[Any]:
    """Yields arguments; integers have the dtype that the equation has, and keys are keys."""
    for atom, array in zip(equation.invars, arrays, strict=True):
        dtype = atom.aval.dtype
        if jnp.issubdtype(dtype, jax.dtypes.prng_key):
            yield jax.random.wrap_key_data(jnp.asarray(array), impl=dtype._impl.name)
        elif not jnp.issubdtype(dtype, jnp.inexact):
            yield np.asarray(array, dtype)
        else:
            yield array


def _widened(value: Any) -> Any:
    """Returns an argument of an equation for float64: a dtype, or how a scatter adds up."""
    if isinstance(value, jax.sharding.Sharding):
        # Its mesh may be one inside of ``jax.shard_map``, which is known nowhere else.
        return None
    if isinstance(value, ClosedJaxpr):
        return _wide_jaxpr(value)
    if isinstance(value, Jaxpr):
        return _wide_jaxpr(ClosedJaxpr(value, ())).jaxpr
    if isinstance(value, np.dtype | type) and value is not bool:
        try:
            if jnp.issubdtype(value, jnp.complexfloating):
                return np.dtype(np.complex128)
            return np.dtype(np.float64) if jnp.issubdtype(value, jnp.floating) else value
        except TypeError:
            return value
    return value


def _wide_jaxpr(closed: ClosedJaxpr) -> ClosedJaxpr:
    with jax.enable_x64(True):
        shapes = [jax.ShapeDtypeStruct(a.shape, _widened(a.dtype)) for a in closed.in_avals]
        return jax.make_jaxpr(jaxpr_as_fun(closed))(*shapes)


def _narrow(equation: Any) -> Callable[..., Any]:
    """Returns what an equation computes in the dtypes that it was traced with, then in float64."""
    primitive, params = equation.primitive, equation.params

    def run(*arrays: Any) -> Sequence[Any]:
        with jax.enable_x64(True):
            narrow = [
                jnp.asarray(a, atom.aval.dtype) if is_number(a) else a
                for atom, a in zip(equation.invars, _alike(equation, arrays), strict=True)
            ]
            made = primitive.bind(*narrow, **params)
            made = made if primitive.multiple_results else [made]
            return [in_float64(on_host(array)) for array in made]

    return run
