"""Evaluates a jaxpr once, operator by operator: no program is compiled of the whole."""

import dataclasses
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
from jaxformer.parity.recording.operators.module_marks import Mark

# Returns what computes the outputs of an equation from its inputs.
FunctionOf = Callable[[Any], Callable[..., Sequence[Any]]]
# Evaluates a jaxpr, given it, its arguments and what is called with its marks.
Evaluate = Callable[..., list[Any]]
# Called with a mark and the array that has it.
Note = Callable[[Mark, Any], Any]


def evaluate_in_numpy(
    jaxpr: Any, arguments: Sequence[Any], note: Note = lambda mark, array: None
) -> list[Any]:
    """Returns the outputs of a jaxpr, in the dtypes that it was traced with, on the host.

    Where it can, numpy computes them: fast, but it rounds in another way than JAX.

    Args:
        jaxpr: with its constants, or one that has none.
        arguments: of the jaxpr, arrays.
        note: called with each array that has a mark.
    """
    return _evaluate(jaxpr, arguments, function_as_written, on_host, note)


def evaluate_in_jax(
    jaxpr: Any, arguments: Sequence[Any], note: Note = lambda mark, array: None
) -> list[Any]:
    """Returns the outputs of a jaxpr as JAX rounds them, each operator by itself.

    Args:
        jaxpr: see ``evaluate_in_numpy``.
        arguments: of the jaxpr, arrays.
        note: called with each array that has a mark.
    """
    return _evaluate(jaxpr, arguments, function_in_jax, lambda array: array, note)


@dataclasses.dataclass(frozen=True)
class TracedFunction:
    """A function of trees of arrays, as a jaxpr.

    Attributes:
        jaxpr: from the leaves of its arguments to those of its result.
        structure: of its result.
    """

    jaxpr: ClosedJaxpr
    structure: Any

    def evaluate(self, *trees: Any, evaluate: Evaluate = evaluate_in_numpy) -> Any:
        """Returns what the function makes of arguments of the shapes that it was traced with."""
        return jax.tree.unflatten(self.structure, evaluate(self.jaxpr, jax.tree.leaves(trees)))


def trace_function(function: Callable[..., Any], *trees: Any) -> TracedFunction:
    """Returns a function, which JAX can trace, as a jaxpr; ``trees`` are its arguments."""
    jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*trees)
    return TracedFunction(jaxpr, jax.tree.structure(shapes))


def evaluate_function(
    function: Callable[..., Any], *trees: Any, evaluate: Evaluate = evaluate_in_numpy
) -> Any:
    """Returns what a function makes of trees of arrays: it is traced, and its jaxpr evaluated.

    Args:
        function: JAX can trace it.
        trees: its arguments.
        evaluate: by what.
    """
    return trace_function(function, *trees).evaluate(*trees, evaluate=evaluate)


def evaluator_of(dtype: str) -> Evaluate:
    """Returns what evaluates a model in a dtype: of any but float64 its rounding is asked for."""
    return evaluate_in_numpy if dtype == "float64" else evaluate_in_jax


def _evaluate(
    jaxpr: Any,
    arguments: Sequence[Any],
    function_of: FunctionOf,
    convert: Callable[[Any], Any],
    note: Note = lambda mark, array: None,
) -> list[Any]:
    """Returns the outputs of a jaxpr. Calls are inlined.

    Args:
        jaxpr: see ``evaluate_in_numpy``.
        arguments: of the jaxpr.
        function_of: how its equations are computed.
        convert: makes of an array one that they take.
        note: called with each array that has a mark.
    """
    constants: Sequence[Any] = ()
    if isinstance(jaxpr, ClosedJaxpr):
        jaxpr, constants = jaxpr.jaxpr, jaxpr.consts

    def compute(equation: Any, given: list[Any]) -> Sequence[Any]:
        inner = inlined(equation)
        if inner is not None:
            return _evaluate(inner, given, function_of, convert, note)
        mark = Mark.of(equation)
        if mark is not None:
            note(mark, given[0])
            return given
        return function_of(equation)(*given)

    def read_literal(atom: Any) -> np.ndarray:
        return np.asarray(atom.val, atom.aval.dtype)

    known = [convert(array) for array in (*constants, *arguments)]
    return interpret(jaxpr, known, compute, read_literal)


def interpret(
    jaxpr: Any,
    known: Sequence[Any],
    compute: Callable[[Any, list[Any]], Sequence[Any]],
    read_literal: Callable[[Any], Any],
) -> list[Any]:
    """Goes through the equations of a jaxpr, in order, and returns its outputs.

    A value is let go of when no equation reads it any more.

    Args:
        jaxpr: without its constants.
        known: its constants, then its arguments: arrays, or what else stands for them.
        compute: returns what an equation makes of what it reads.
        read_literal: returns a number that is written into the jaxpr, in the same form.
    """
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), known, strict=True))
    equations = needed(jaxpr)
    readers = [*(equation.invars for equation in equations), jaxpr.outvars]
    last = {
        atom: place
        for place, atoms in enumerate(readers)
        for atom in atoms
        if not isinstance(atom, Literal)
    }

    def read(atom: Any) -> Any:
        return read_literal(atom) if isinstance(atom, Literal) else values[atom]

    for place, equation in enumerate(equations):
        made = compute(equation, [read(atom) for atom in equation.invars])
        values |= {
            atom: value for atom, value in zip(equation.outvars, made, strict=True) if atom in last
        }
        for atom in equation.invars:
            if not isinstance(atom, Literal) and last[atom] == place:
                values.pop(atom, None)
    return [read(atom) for atom in jaxpr.outvars]
