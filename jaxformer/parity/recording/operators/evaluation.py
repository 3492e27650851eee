"""Evaluates a jaxpr once: operator by operator, in numpy, which compiles nothing."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from jaxformer.parity.recording.jax_values import on_host
from jaxformer.parity.recording.operators.equations import function_as_written, inlined, needed


def evaluate(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    """Returns the outputs of a jaxpr, in the dtypes that it was traced with.

    Calls are inlined. A value is freed when no operator reads it any more.

    Args:
        jaxpr: with its constants, or one that has none.
        arguments: of the jaxpr, arrays on the host.
    """
    constants: Sequence[Any] = ()
    if isinstance(jaxpr, ClosedJaxpr):
        jaxpr, constants = jaxpr.jaxpr, [on_host(array) for array in jaxpr.consts]
    values = dict(zip(jaxpr.constvars, constants, strict=True))
    values |= dict(zip(jaxpr.invars, arguments, strict=True))
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
        made = (
            evaluate(inner, given) if inner is not None else function_as_written(equation)(*given)
        )
        del given
        values |= {
            atom: array for atom, array in zip(equation.outvars, made, strict=True) if atom in last
        }
        for atom in equation.invars:
            if not isinstance(atom, Literal) and last[atom] == place:
                values.pop(atom, None)
    return [read(atom) for atom in jaxpr.outvars]
