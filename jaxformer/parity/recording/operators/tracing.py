"""The jaxprs of a candidate: of its results, and of its backward pass."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxprs_in_params

from jaxformer.parity.recording.jax_values import (
    is_complex,
    is_float,
    is_number,
    is_whole,
    leaf_names,
)
from jaxformer.parity.recording.operators.candidates import Candidate
from jaxformer.parity.recording.operators.signatures import naming_unknown_numbers
from jaxformer.parity.recording.operators.sources import (
    is_called_by_user,
    line_of_function,
    source_of,
)
from jaxformer.parity.recording.result_parts import in_real_parts, opened


def candidate_arrays(candidate: Candidate) -> dict[str, np.ndarray]:
    """Returns the float parameters of a candidate, by path, as they are; no caches."""
    leaves = zip(
        leaf_names(candidate.parameters), jax.tree.leaves(candidate.parameters), strict=True
    )
    return {
        name: np.asarray(leaf)
        for name, leaf in leaves
        if is_float(leaf) and name not in candidate.caches
    }


@dataclasses.dataclass(frozen=True)
class Traced:
    """A function's jaxprs.

    Attributes:
        forward: from all leaves to the float outputs, then the choices, then what the backward pass
            reads.
        names: paths of the float outputs in the result; parts of complex ones are outputs too.
        choices: paths of the outputs of integers and truth values.
        backward: from what the backward pass reads and the outputs' cotangents to the gradients
            of the float leaves; None if there is none.
        plain: traces the function alone, to its float outputs and choices.
        no_gradients: why there is no backward pass.
    """

    forward: ClosedJaxpr
    names: tuple[str, ...]
    choices: tuple[str, ...]
    backward: ClosedJaxpr | None
    plain: Callable[[], ClosedJaxpr]
    no_gradients: str = ""


def trace(call: Callable[..., Any], given: Any, backward: bool) -> Traced:
    """Traces a function: in float64 where it allows that, else as the user runs it.

    Random numbers are drawn as the user draws them: of float64 they would be other numbers.

    Raises:
        UsageError: it reads numbers of what is traced.
    """
    with contextlib.suppress(TypeError, ValueError):
        traced = _trace_in(call, given, backward, True)
        if jnp.result_type(float) == np.float64 or not _draws(traced.forward.jaxpr):
            return traced
    with naming_unknown_numbers():
        return _trace_in(call, given, backward, False)


def _trace_in(call: Callable[..., Any], given: Any, backward: bool, wide: bool) -> Traced:
    leaves, structure = jax.tree.flatten(given)
    shapes = [_shape(leaf, wide) for leaf in leaves]
    floats = [place for place, leaf in enumerate(leaves) if is_float(leaf)]

    # Of each kind of results, once the function was run.
    paths: dict[str, tuple[str, ...]] = {}

    def run(some: Sequence[Any], leaves: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        filled = list(leaves)
        for place, leaf in zip(floats, some, strict=True):
            filled[place] = leaf
        named = results_by_path(call(*jax.tree.unflatten(structure, filled)))
        made = {name: leaf for name, leaf in named.items() if is_float(leaf)}
        choices = {name: leaf for name, leaf in named.items() if is_whole(leaf)}
        paths.update(floats=tuple(made), choices=tuple(choices))
        return list(made.values()), list(choices.values())

    def forward(*leaves: Any) -> Any:
        outputs, pullback, choices = jax.vjp(
            lambda some: run(some, leaves), [leaves[place] for place in floats], has_aux=True
        )
        return outputs, choices, pullback

    def pull_back(pullback: Any, cotangents: Any) -> Any:
        return pullback(cotangents)[0]

    def trace_plain() -> ClosedJaxpr:
        def plain(*leaves: Any) -> Any:
            return run([leaves[place] for place in floats], leaves)

        with jax.enable_x64(wide):
            return jax.make_jaxpr(plain)(*shapes)

    reason = "it was not asked for"
    if backward:
        try:
            with jax.enable_x64(wide):
                jaxpr, (outputs, _, pullback) = jax.make_jaxpr(forward, return_shape=True)(*shapes)
                gradients = jax.make_jaxpr(pull_back)(pullback, outputs)
            return Traced(jaxpr, paths["floats"], paths["choices"], gradients, trace_plain)
        except Exception as error:  # Whatever a user's function cannot be differentiated for.
            reason = f"the candidate cannot be differentiated: {str(error).partition(chr(10))[0]}"
    jaxpr = trace_plain()
    return Traced(jaxpr, paths["floats"], paths["choices"], None, trace_plain, reason)


def results_by_path(result: Any) -> dict[str, Any]:
    """Returns the arrays that a function returned, by path; of complex ones the two parts."""
    result = jax.tree.map(opened, result)
    return dict(in_real_parts(zip(leaf_names(result), jax.tree.leaves(result), strict=True)))


def _shape(leaf: Any, wide: bool) -> Any:
    """Returns what stands for a leaf when a function is traced."""
    if is_float(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, np.float64 if wide else np.float32)
    if is_complex(leaf):
        return jax.ShapeDtypeStruct(leaf.shape, np.complex128 if wide else np.complex64)
    if not wide and is_number(leaf) and leaf.dtype == np.int64:
        return np.asarray(leaf).astype(np.int32)
    return leaf


def _draws(jaxpr: Any) -> bool:
    """Returns whether a jaxpr draws random bits for numbers of 64 bits."""
    return any(
        equation.primitive.name == "random_bits" and equation.params["bit_width"] == 64
        for equation in _equations(jaxpr)
    )


def stops(jaxpr: Any) -> Iterator[str]:
    """Returns "path:line" of each place where the user's code stops gradients."""
    return map(source_of, stopping(jaxpr))


def stopping(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations by which the user's code stops gradients."""
    for equation in _equations(jaxpr):
        if equation.primitive.name == "stop_gradient" and is_called_by_user(equation):
            yield equation


def rules(jaxpr: Any) -> Iterator[str]:
    """Yields "path:line" of each function of the user that says what a gradient is."""
    for equation in _equations(jaxpr):
        rule = equation.params.get("bwd") or equation.params.get("jvp_jaxpr_fun")
        if hasattr(rule, "debug_info"):
            yield line_of_function(rule)


def narrow_casts(jaxpr: Any) -> Iterator[tuple[str, str]]:
    """Yields "path:line" of each place that rounds floats to fewer bits, and their new dtype."""
    for equation in _equations(jaxpr):
        if equation.primitive.name != "convert_element_type":
            continue
        before, after = (atom.aval.dtype for atom in (*equation.invars, *equation.outvars))
        is_float = jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating)
        if is_float and jnp.finfo(after).nmant < jnp.finfo(before).nmant:
            yield source_of(equation), after.name


def _equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of all that it calls."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _equations(inner)
