"""Both sides once more, forward, in a narrower dtype: what they and their modules return there.

What a dtype rounds is measured against the run in float64. The candidate is evaluated operator by
operator, as JAX rounds each of them; the reference by PyTorch. In float64 the candidate's run gives
what it makes with its own weights.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.parity.recording.jax_values import is_float
from jaxformer.parity.recording.operators.candidates import Caller, Candidate
from jaxformer.parity.recording.operators.evaluation import evaluator_of
from jaxformer.parity.recording.operators.module_marks import Mark
from jaxformer.parity.recording.operators.tracing import results_by_path
from jaxformer.parity.recording.result_parts import in_real_parts
from jaxformer.parity.recording.torch_values import (
    array,
    experts_one_by_one,
    floats,
    in_narrow,
    map_nested,
    require_torch,
    result_tensors,
    tensor,
    without_fast_path,
)
from jaxformer.parity.recording.torch_values import is_float as is_float_tensor


@dataclasses.dataclass(frozen=True)
class NarrowRun:
    """What one side makes in a dtype.

    Attributes:
        results: its float results, by path.
        returned: of each of its modules, by path, the float arrays that it returns, call by call.
        entered: the same of what enters its modules, where that is recorded.
    """

    results: Mapping[str, np.ndarray]
    returned: Mapping[str, Sequence[np.ndarray]]
    entered: Mapping[str, Sequence[np.ndarray]] = dataclasses.field(default_factory=dict)


def run_candidate_in(
    dtype: str, candidate: Candidate, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> NarrowRun:
    """Runs a candidate whose parameters and float inputs have a dtype.

    Args:
        dtype: of floats.
        candidate: the model.
        args: positional arguments, numpy arrays.
        kwargs: named ones.
    """
    sides: dict[str, dict[str, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    names: list[str] = []
    call, given = candidate.with_inputs(args, kwargs)

    def run(*given: Any) -> list[Any]:
        made = {n: leaf for n, leaf in results_by_path(call(*given)).items() if is_float(leaf)}
        names[:] = made
        return list(made.values())

    def keep(mark: Mark, made: Any) -> None:
        if mark.side in ("returned", "entered"):
            sides[mark.side][mark.path].append(np.asarray(made))

    with jax.enable_x64(dtype == "float64"):
        given = jax.tree.map(
            lambda leaf: jnp.asarray(leaf, dtype) if is_float(leaf) else leaf, given
        )
        found = evaluator_of(dtype)(
            jax.make_jaxpr(run)(*given),
            jax.tree.leaves(given),
            keep,
        )
    results = {name: np.asarray(made) for name, made in zip(names, found, strict=True)}
    entered = {
        path: [made for made in arrays if is_float(made)]
        for path, arrays in sides["entered"].items()
    }
    return NarrowRun(results, sides["returned"], entered)


def run_reference_in(
    dtype: str,
    module: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    caller: Caller | None = None,
    paths: Collection[str] | None = None,
) -> NarrowRun:
    """Runs a copy of a PyTorch module whose parameters and float inputs have a dtype.

    Args:
        dtype: of floats.
        module: it is not changed.
        args: positional arguments.
        kwargs: named ones.
        caller: how to call it, given it and its inputs; None to call it with them.
        paths: of the modules that count; default all.
    """
    torch = require_torch()
    narrow = in_narrow(module, dtype)
    returned: dict[str, list[np.ndarray]] = defaultdict(list)

    def cast(value: Any) -> Any:
        value = tensor(value) if isinstance(value, np.ndarray) else value
        return value.to(getattr(torch, dtype)) if is_float_tensor(value) else value

    def keep(path: str) -> Any:
        def kept(module: Any, args: Any, output: Any) -> None:
            returned[path] += map(array, floats(output))

        return kept

    given, named = map_nested(cast, list(args)), map_nested(cast, dict(kwargs))
    with ExitStack() as stack:
        for path, inner in narrow.named_modules():
            if paths is None or path in paths:
                stack.callback(inner.register_forward_hook(keep(path)).remove)
        stack.enter_context(experts_one_by_one(narrow))
        stack.enter_context(without_fast_path())
        stack.enter_context(torch.no_grad())
        output = narrow(*given, **named) if caller is None else caller(narrow, named or given)
    results = in_real_parts(result_tensors(output))
    return NarrowRun({path: array(one) for path, one in results if is_float_tensor(one)}, returned)
