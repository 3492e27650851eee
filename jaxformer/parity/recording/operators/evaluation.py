"""Evaluates a jaxpr once: operator by operator, which compiles no program."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jaxformer.parity.recording.jax_values import on_host
from jaxformer.parity.recording.operators.equations import (
    function_as_written,
    function_in_jax,
    inlined,
    needed,
)

# Returns what computes the outputs of an equation from its inputs.
FunctionOf = Callable[[Any], Callable[..., Sequence[Any]]]
# Evaluates a jaxpr, given it and its arguments.
Evaluate = Callable[[Any, Sequence[Any]], list[Any]]


def evaluate_in_numpy(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a jaxpr, in the dtypes that it was traced with, on the host.

    Where it can, numpy computes them: fast, but it rounds in another way than JAX.

    Args:
        jaxpr: with its constants, or one that has none.
        arguments: of the jaxpr, arrays.
    """
    return _evaluate(jaxpr, arguments, function_as_written, on_host)


def evaluate_in_jax(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a jaxpr as JAX rounds them, each operator by itself.

    For the arguments see ``evaluate_in_numpy``.
    """
    return _evaluate(jaxpr, arguments, function_in_jax, lambda array: array)


def evaluate_function(
    function: Callable[..., Any], *trees: Any, evaluate: Evaluate = evaluate_in_numpy
) -> Any:
    """Returns what a function makes of trees of arrays: it is traced, and its jaxpr evaluated.

    Args:
        function: JAX can trace it.
        trees: its arguments.
        evaluate: by what.
    """
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*trees)
    return jax.tree.unflatten(jax.tree.structure(shapes), evaluate(jaxpr, jax.tree.leaves(trees)))


def evaluator_of(dtype: str) -> Evaluate:
    """Returns what evaluates a model in a dtype: of any but float64 its rounding is asked for."""
    return evaluate_in_numpy if dtype == "float64" else evaluate_in_jax


def _evaluate(
    jaxpr: Any,
    arguments: Sequence[Any],
    function_of: FunctionOf,
    convert: Callable[[Any], Any],
) -> list[Any]:
    """Returns the outputs of a jaxpr.

    Calls are inlined. A value is freed when no operator reads it any more.

    Args:
        jaxpr: see ``evaluate_in_numpy``.
        arguments: of the jaxpr.
        function_of: how its equations are computed.
        convert: makes of an array one that they take.
    """
    constants: Sequence[Any] = ()
    if isinstance(jaxpr, ClosedJaxpr):
        jaxpr, constants = jaxpr.jaxpr, jaxpr.consts
    values = dict(zip(jaxpr.constvars, map(convert, constants), strict=True))
    values |= dict(zip(jaxpr.invars, map(convert, arguments), strict=True))
    equations = needed(jaxpr)
    readers = [*(equation.invars for equation in equations), jaxpr.outvars]
    last = {
        atom: place
        for place, atoms in enumerate(readers)
        for atom in atoms
        if not isinstance(atom, Literal)
    }

    def read(atom: Any) -> Any:
        if not isinstance(atom, Literal):
            return values[atom]
        aval: Any = atom.aval
        return np.asarray(atom.val, aval.dtype)

    for place, equation in enumerate(equations):
        given = [read(atom) for atom in equation.invars]
        inner = inlined(equation)
        if inner is not None:
            made: Sequence[Any] = _evaluate(inner, given, function_of, convert)
        else:
            made = function_of(equation)(*given)
        del given
        values |= {
            atom: array for atom, array in zip(equation.outvars, made, strict=True) if atom in last
        }
        for atom in equation.invars:
            if not isinstance(atom, Literal) and last[atom] == place:
                values.pop(atom, None)
    return [read(atom) for atom in jaxpr.outvars]
