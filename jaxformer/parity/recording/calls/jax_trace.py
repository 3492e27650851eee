"""One pass of a JAX module with every submodule's call recorded, and copies in other dtypes."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxformer.attention
from jaxformer.execution.attention_backends import attention_kernel
from jaxformer.parameters import join_path
from jaxformer.parity.recording.calls.attention import RecordedWeights
from jaxformer.parity.recording.jax_values import float_arrays, integer_arrays, is_float
from jaxformer.parity.recording.module_calls import CallHandler, intercept_calls
from jaxformer.parity.recording.operators.evaluation import (
    Evaluate,
    evaluate_function,
    evaluate_in_numpy,
)
from jaxformer.parity.recording.operators.signatures import naming_unknown_numbers


@dataclasses.dataclass
class JaxCall:
    """One call of one JAX module: its arguments and its result.

    Attributes:
        args: positional arguments.
        kwargs: arguments by name.
        order: its place among all calls of the pass.
        around: the places of the calls that it was made in.
        output: whatever it returned.
        weights: of its attention, if it computed any.
        state: what the module's variables that are no parameters held before, by path within it.
        writes: whether it changed its state, or a list or dict that it was given.
        later: further calls of the same module.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    order: int
    output: Any = None
    weights: RecordedWeights | None = None
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    writes: bool = False
    later: list["JaxCall"] = dataclasses.field(default_factory=list)
    around: tuple[int, ...] = ()

    @property
    def inputs(self) -> list[Any]:
        """The float arrays among the arguments, positional ones first."""
        return float_arrays((self.args, self.kwargs))

    @property
    def input_names(self) -> list[str]:
        """What ``inputs`` are called where they were given by name, else ""."""
        found = jax.tree_util.tree_leaves_with_path((self.args, self.kwargs))
        keys = [path[1] if path[0].idx else None for path, leaf in found if is_float(leaf)]
        return [getattr(key, "key", "") for key in keys]

    @property
    def integers(self) -> list[Any]:
        """The integer arrays among the arguments, positional ones first."""
        return integer_arrays((self.args, self.kwargs))

    @property
    def outputs(self) -> list[Any]:
        """The float arrays of the result."""
        return float_arrays(self.output)

    @property
    def integer_outputs(self) -> list[Any]:
        """The integer arrays of the result."""
        return integer_arrays(self.output)

    @property
    def all(self) -> list["JaxCall"]:
        """This call and the further ones."""
        return [self, *self.later]

    @property
    def recorded(self) -> tuple[Any, ...]:
        """All that holds arrays, as one tree."""
        beginning = None if self.weights is None else self.weights.beginning
        return self.args, self.kwargs, self.output, self.state, beginning

    @recorded.setter
    def recorded(self, tree: tuple[Any, ...]) -> None:
        self.args, self.kwargs, self.output, self.state, beginning = tree
        if self.weights is not None:
            self.weights = dataclasses.replace(self.weights, beginning=beginning)

    def free(self) -> None:
        """Forgets all arrays."""
        self.args, self.kwargs, self.output, self.state = (), {}, None, {}


def bind_arguments(owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a module's call by parameter name, with defaults."""
    try:
        bound = inspect.signature(type(owner).__call__).bind(owner, *args, **kwargs)
    except (TypeError, ValueError):
        return {}
    bound.apply_defaults()
    return dict(bound.arguments)


def replace_arguments(owner: Any, call: JaxCall, values: Mapping[str, Any]) -> JaxCall:
    """Returns the call with some of its arguments replaced, by parameter name."""
    bound = inspect.signature(type(owner).__call__).bind(owner, *call.args, **call.kwargs)
    bound.arguments.update(values)
    return dataclasses.replace(call, args=tuple(bound.args[1:]), kwargs=dict(bound.kwargs))


def trace(
    module: Any,
    call: Callable[[Any], Any],
    *,
    keep: Callable[[str], bool] = lambda path: True,
    handle: CallHandler | None = None,
    evaluate: Evaluate = evaluate_in_numpy,
) -> tuple[dict[str, JaxCall], Any]:
    """Runs ``call(module)`` once and records every call of a submodule.

    It is traced, and its operators are evaluated one by one, as those of isolated modules are.

    Args:
        module: the model.
        call: how to call it, or a part of it; JAX must be able to trace it.
        keep: which calls to record, by path.
        handle: called in place of a recorded submodule.
        evaluate: by what; by JAX where its own rounding is asked for.

    Returns:
        The first call of every submodule, by path in the order of calls; and the result.

    Raises:
        UsageError: the call reads numbers of what is traced.
    """
    definition, state = nnx.split(module)
    calls: dict[str, JaxCall] = {}
    traced: list[Any] = []
    result: Any = None

    def run(state: Any) -> list[Any]:
        nonlocal result
        inner = nnx.merge(definition, state)
        recorder = _Recorder(inner, calls, keep, handle)
        # Whatever the length: another kernel has no weights to record.
        with (
            attention_kernel("plain"),
            recorder.recording_attention(),
            intercept_calls(inner, recorder.record),
        ):
            result = call(inner)
        every = [one.recorded for first in calls.values() for one in first.all]
        leaves = jax.tree.leaves((every, result))
        traced[:] = {id(x): x for x in leaves if isinstance(x, jax.core.Tracer)}.values()
        return traced

    with naming_unknown_numbers():
        arrays = evaluate_function(run, state, evaluate=evaluate)
    # What is traced cannot be an index into an array of numpy.
    numbers = [x if is_float(x) else jnp.asarray(x) for x in arrays]
    known = {id(tracer): x for tracer, x in zip(traced, numbers, strict=True)}

    def fill(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: known.get(id(leaf), leaf), tree)

    for first in calls.values():
        for one in first.all:
            one.recorded = fill(one.recorded)
    return calls, fill(result)


class _Recorder:
    """Records the calls of the submodules of a model that is traced.

    Args:
        module: the model.
        calls: where the first call of each submodule is put, by path.
        keep: see ``trace``.
        handle: see ``trace``.
    """

    def __init__(
        self,
        module: Any,
        calls: dict[str, JaxCall],
        keep: Callable[[str], bool],
        handle: CallHandler | None,
    ):
        self._calls, self._keep, self._handle = calls, keep, handle
        self._variables = _state_variables(module)
        self._count = 0
        self._running: list[JaxCall] = []

    def record(
        self, path: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], original: Any
    ) -> Any:
        """Makes a call, and records it."""
        if not self._keep(path):
            return original(*args, **kwargs)
        # A cache may be written to later.
        given, named = _copy_containers((args, kwargs))
        around = tuple(call.order for call in self._running)
        made = JaxCall(given, named, self._count, state=self._state_of(path), around=around)
        self._count += 1
        if path in self._calls:
            self._calls[path].later.append(made)
        else:
            self._calls[path] = made
        self._running.append(made)
        try:
            if self._handle is None:
                made.output = original(*args, **kwargs)
            else:
                made.output = self._handle(path, owner, args, kwargs, original)
        finally:
            self._running.pop()
        made.writes = _leaves_differ(
            (made.args, made.kwargs, made.state), (args, kwargs, self._state_of(path))
        )
        return made.output

    def _state_of(self, path: str) -> dict[str, Any]:
        start = f"{path}." if path else ""
        return {
            n.removeprefix(start): v.get_value()
            for n, v in self._variables.items()
            if n.startswith(start)
        }

    @contextlib.contextmanager
    def recording_attention(self) -> Iterator[None]:
        """Records the weights of attentions inside the ``with`` block."""
        core = jaxformer.attention.scaled_dot_product_attention

        @functools.wraps(core)
        def record_weights(*args: Any, **kwargs: Any) -> Any:
            result = core(*args, **kwargs)
            if self._running and self._running[-1].weights is None:
                self._running[-1].weights = RecordedWeights.of(result[1])
            return result

        jaxformer.attention.scaled_dot_product_attention = record_weights
        try:
            yield
        finally:
            jaxformer.attention.scaled_dot_product_attention = core


def _state_variables(module: Any) -> dict[str, Any]:
    """Returns the variables of a module that a call may write to, by path."""
    return {
        join_path(path): node
        for path, node in nnx.iter_graph(module)
        if isinstance(node, nnx.Variable) and not isinstance(node, nnx.Param | nnx.RngState)
    }


def _copy_containers(tree: Any) -> Any:
    """Returns a tree with the same leaves, in lists and dicts of its own."""
    return jax.tree.map(lambda leaf: leaf, tree)


def _leaves_differ(one: Any, other: Any) -> bool:
    first, second = jax.tree.leaves(one), jax.tree.leaves(other)
    return len(first) != len(second) or any(a is not b for a, b in zip(first, second, strict=True))
