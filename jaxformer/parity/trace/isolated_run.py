"""One module of ours run by itself, on given inputs, its parts giving given answers."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.parity.trace import jax_trace as jax_trace


@dataclasses.dataclass(frozen=True)
class ForcedOutput:
    """What a part of a module answers in one call.

    Attributes:
        template: what it returned in the model.
        arrays: the float arrays to put into it, None to keep one.
    """

    template: Any
    arrays: Sequence[np.ndarray | None]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one module did by itself, its parts answering with given arrays.

    Attributes:
        output: the float arrays of its result.
        asked: of each part, call by call, the float arrays it was called with.
        arguments: of each part, call by call, all that it was called with, by name.
        parameter_gradients: of its own parameters, by name within the module.
        input_gradients: of each float input.
        answer_gradients: of each part, call by call, of the arrays it answered with.
    """

    output: list[np.ndarray]
    asked: dict[str, list[list[np.ndarray]]]
    arguments: dict[str, list[dict[str, Any]]]
    parameter_gradients: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    input_gradients: list[np.ndarray] = dataclasses.field(default_factory=list)
    answer_gradients: dict[str, list[list[np.ndarray]]] = dataclasses.field(default_factory=dict)


Gradients = Sequence[np.ndarray | None]


def run_isolated(
    module: Any,
    method: str,
    call: jax_trace.Call,
    answers: Mapping[str, Sequence[ForcedOutput]],
    *,
    cotangents: Gradients | None = None,
    asked_cotangents: Mapping[str, Sequence[Gradients]] | None = None,
    dtype: str = "float64",
) -> Outcome:
    """Runs one module on given inputs, and pulls given gradients back through it.

    Args:
        module: ours.
        method: which of its methods.
        call: its arguments.
        answers: what parts of it answer, call by call, by path within it.
        cotangents: gradients of the output's arrays, None for zero; None runs forward only.
        asked_cotangents: gradients of what each part is called with, call by call.
        dtype: what all float arrays are cast to.
    """
    definition, parameters, rest = jax_trace.split(module)
    answered = tuple(f"{path}." for path in answers)
    own = {name: p for name, p in parameters.items() if not f"{name}.".startswith(answered)}
    parts = {name: p for name, p in parameters.items() if name not in own}
    arguments: dict[str, list[dict[str, Any]]] = {}

    def cast(tree: Any) -> Any:
        return jax.tree.map(lambda a: jnp.asarray(a, dtype) if jax_trace.is_float(a) else a, tree)

    def pure(own: Any, inputs: Any, given: Any) -> tuple[list[Any], dict[str, list[list[Any]]]]:
        inner = jax_trace.merge(definition, {**own, **parts}, rest)
        asked: dict[str, list[list[Any]]] = {}

        def answer(
            path: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], original: Any
        ) -> Any:
            place = len(asked.get(path, ()))
            if place >= len(answers.get(path, ())):
                return original(*args, **kwargs)
            asked.setdefault(path, []).append(jax_trace.floats((args, kwargs)))
            arguments.setdefault(path, []).append(jax_trace.bound(owner, args, kwargs))
            return jax_trace.refill(cast(answers[path][place].template), given[path][place])

        args, kwargs = cast(jax_trace.refill((call.args, call.kwargs), inputs))
        with jax_trace.watched(inner, answer):
            output = getattr(inner, method)(*args, **kwargs)
        return jax_trace.floats(output), asked

    given = {path: [list(each.arrays) for each in one] for path, one in answers.items()}
    primals = cast((own, call.inputs, given))
    if cotangents is None:
        output, asked = pure(*primals)
        return Outcome(_numpy(output), _numpy(asked), arguments)
    (output, asked), pull = jax.vjp(pure, *primals)

    def filled(arrays: Sequence[Any], gradients: Gradients) -> list[Any]:
        padded = [*gradients, *[None] * len(arrays)]
        return [
            jnp.zeros_like(a) if g is None or g.shape != a.shape else jnp.asarray(g, a.dtype)
            for a, g in zip(arrays, padded, strict=False)
        ]

    def of(path: str, place: int) -> Gradients:
        rounds = (asked_cotangents or {}).get(path, [])
        return rounds[place] if place < len(rounds) else []

    gradients = pull(
        (
            filled(output, cotangents),
            {
                path: [filled(arrays, of(path, place)) for place, arrays in enumerate(rounds)]
                for path, rounds in asked.items()
            },
        )
    )
    return Outcome(_numpy(output), _numpy(asked), arguments, *map(_numpy, gradients))


def _numpy(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)
