"""Records how modules of two models are called, and runs one module by itself, in any dtype."""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxformer.execution.attention_backends import attention_kernel
from jaxformer.parameters import merge
from jaxformer.parity.recording.jax_modules import parameters_of
from jaxformer.parity.recording.jax_values import float_arrays, is_float
from jaxformer.parity.recording.module_calls import intercept_calls
from jaxformer.parity.recording.operators.evaluation import evaluate_function
from jaxformer.parity.recording.reference_modules import modules_of, owner_of
from jaxformer.parity.recording.torch_values import fresh


@dataclasses.dataclass(frozen=True)
class RecordedCall:
    """The first call of a module.

    Attributes:
        args: positional arguments.
        kwargs: named arguments.
        output: what it returned.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None


def record_reference(
    module: Any, paths: Collection[str], run: Callable[[], Any]
) -> dict[str, RecordedCall]:
    """Returns the first calls of modules of the reference, by path: as they were, with copies.

    Args:
        module: the whole model.
        paths: of the modules.
        run: runs the model.
    """
    found: dict[str, RecordedCall] = {}

    def enter(path: str, module: Any, args: Any, kwargs: Any) -> None:
        if path not in found:
            found[path] = RecordedCall(*fresh((args, kwargs)))

    def leave(path: str, module: Any, args: Any, output: Any) -> None:
        if found[path].output is None:
            found[path] = dataclasses.replace(found[path], output=fresh(output))

    with contextlib.ExitStack() as stack:
        for path, inner in modules_of(module).items():
            if path in paths and owner_of(path, inner) == path:
                before = inner.register_forward_pre_hook(partial(enter, path), with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(inner.register_forward_hook(partial(leave, path)).remove)
        run()
    return found


def record_candidate(
    module: Any, paths: Collection[str], call: Callable[[Any], Any]
) -> dict[str, RecordedCall]:
    """Returns the first calls of modules of the candidate, by path, in the dtype of its arrays.

    Args:
        module: the whole model.
        paths: of the modules.
        call: calls the model.
    """
    definition, state = nnx.split(module)
    found: dict[str, RecordedCall] = {}
    traced: list[Any] = []

    def run(state: Any) -> list[Any]:
        def keep(path: str, owner: Any, args: Any, kwargs: Any, original: Any) -> Any:
            given, named = jax.tree.map(lambda leaf: leaf, (args, kwargs))
            output = original(*args, **kwargs)
            if path in paths:
                found.setdefault(path, RecordedCall(given, named, output))
            return output

        inner = nnx.merge(definition, state)
        with attention_kernel("plain"), intercept_calls(inner, keep):
            call(inner)
        leaves = jax.tree.leaves([(one.args, one.kwargs, one.output) for one in found.values()])
        traced[:] = {id(x): x for x in leaves if isinstance(x, jax.core.Tracer)}.values()
        return traced

    arrays = evaluate_function(run, state)
    known = {id(tracer): array for tracer, array in zip(traced, arrays, strict=True)}

    def fill(one: RecordedCall) -> RecordedCall:
        parts = (one.args, one.kwargs, one.output)
        return RecordedCall(*jax.tree.map(lambda leaf: known.get(id(leaf), leaf), parts))

    return {path: fill(one) for path, one in found.items()}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a module of the candidate gives by itself.

    Attributes:
        outputs: the float arrays of its result.
        parameter_gradients: of its parameters, by name.
        input_gradients: of each float input.
    """

    outputs: list[np.ndarray]
    parameter_gradients: dict[str, np.ndarray]
    input_gradients: list[np.ndarray]


def run_candidate(
    module: Any,
    method: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    cotangents: Sequence[np.ndarray] | None,
    dtype: str,
) -> Outcome:
    """Runs one module of the candidate by itself; use it under ``jax.enable_x64(True)``.

    Args:
        module: with its weights.
        method: which of its methods is called.
        args: positional arguments.
        kwargs: named arguments.
        cotangents: of the float arrays of the result; None for no gradients.
        dtype: of all floats.
    """
    definition: Any = nnx.split(module)[0]
    leaves, structure = jax.tree.flatten((tuple(args), dict(kwargs)))
    places = [place for place, leaf in enumerate(leaves) if is_float(leaf)]

    def made(parameters: Any, floats: Sequence[Any]) -> list[Any]:
        filled = list(leaves)
        for place, array in zip(places, floats, strict=True):
            filled[place] = array
        given, named = jax.tree.unflatten(structure, filled)
        with attention_kernel("plain"):
            return float_arrays(getattr(merge(definition, parameters), method)(*given, **named))

    def run(parameters: Any, floats: Sequence[Any]) -> Any:
        if cotangents is None:
            return made(parameters, floats), {}, []
        outputs, pull_back = jax.vjp(made, parameters, floats)
        back = [jnp.asarray(c, o.dtype) for c, o in zip(cotangents, outputs, strict=True)]
        return outputs, *pull_back(back)

    own = {name: jnp.asarray(array, dtype) for name, array in parameters_of(module).items()}
    given = [jnp.asarray(leaves[place], dtype) for place in places]
    outputs, gradients, inputs = evaluate_function(run, own, given)
    return Outcome(list(outputs), dict(gradients), list(inputs))
