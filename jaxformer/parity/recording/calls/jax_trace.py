"""One pass of a JAX module with every submodule's call recorded, and copies in other dtypes."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxformer.attention
from jaxformer.execution.attention_backends import attention_kernel
from jaxformer.execution.shared_traces import shared_traces
from jaxformer.layers import Embedding
from jaxformer.parameters import join_path, map_parameters
from jaxformer.parity.recording.calls.attention import RecordedWeights
from jaxformer.parity.recording.jax_values import float_arrays, integer_arrays, is_float

# Methods that are called like modules. Their path is that of the module + the method's name.
METHODS = {Embedding: ("attend",)}
# Called in place of a submodule's method: (path, owner, args, kwargs, original method).
CallHandler = Callable[[str, Any, tuple[Any, ...], dict[str, Any], Callable[..., Any]], Any]


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


@contextlib.contextmanager
def intercept_calls(module: Any, on_call: CallHandler) -> Iterator[None]:
    """Routes every call of a submodule through ``on_call`` inside the ``with`` block."""
    # To walk through a module takes long beside the calls that are made in it.
    nodes = list(nnx.iter_modules(module))
    paths = {id(node): join_path(path) for path, node in nodes}
    busy: set[tuple[int, str]] = set()
    replaced: list[tuple[type, str, Any]] = []

    def wrap(cls: type, name: str) -> None:
        original = getattr(cls, name)

        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(self))
            if path is None or (id(self), name) in busy:
                return original(self, *args, **kwargs)
            busy.add((id(self), name))
            try:
                full_path = path if name == "__call__" else f"{path}.{name}".lstrip(".")
                return on_call(full_path, self, args, kwargs, functools.partial(original, self))
            finally:
                busy.discard((id(self), name))

        replaced.append((cls, name, cls.__dict__.get(name)))
        setattr(cls, name, call)

    for cls in {type(node) for _, node in nodes}:
        for name in ("__call__", *_called_methods(cls)):
            # ``type`` has a ``__call__`` too: the one that makes instances.
            if any(name in vars(base) for base in cls.__mro__):
                wrap(cls, name)
    try:
        with shared_traces(False):
            yield
    finally:
        for cls, name, before in reversed(replaced):
            if before is None:
                delattr(cls, name)
            else:
                setattr(cls, name, before)


def trace(
    module: Any,
    call: Callable[[Any], Any],
    *,
    keep: Callable[[str], bool] = lambda path: True,
    handle: CallHandler | None = None,
) -> tuple[dict[str, JaxCall], Any]:
    """Runs ``call(module)`` eagerly and records every call of a submodule.

    Args:
        module: the model.
        call: how to call it, or a part of it.
        keep: which calls to record, by path.
        handle: called in place of a recorded submodule.

    Returns:
        The first call of every submodule, by path in the order of calls; and the result.
    """
    calls: dict[str, JaxCall] = {}
    count = 0
    running: list[JaxCall] = []
    variables = _state_variables(module)

    def state_of(path: str) -> dict[str, Any]:
        start = f"{path}." if path else ""
        return {
            n.removeprefix(start): v.get_value()
            for n, v in variables.items()
            if n.startswith(start)
        }

    def record(
        path: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], original: Any
    ) -> Any:
        nonlocal count
        if not keep(path):
            return original(*args, **kwargs)
        # A cache may be written to later.
        given, named = _copy_containers((args, kwargs))
        around = tuple(call.order for call in running)
        made = JaxCall(given, named, count, state=state_of(path), around=around)
        count += 1
        if path in calls:
            calls[path].later.append(made)
        else:
            calls[path] = made
        running.append(made)
        try:
            if handle is None:
                made.output = original(*args, **kwargs)
            else:
                made.output = handle(path, owner, args, kwargs, original)
        finally:
            running.pop()
        made.writes = _leaves_differ(
            (made.args, made.kwargs, made.state), (args, kwargs, state_of(path))
        )
        return made.output

    core = jaxformer.attention.scaled_dot_product_attention

    @functools.wraps(core)
    def record_weights(*args: Any, **kwargs: Any) -> Any:
        result = core(*args, **kwargs)
        if running and running[-1].weights is None:
            running[-1].weights = RecordedWeights.of(np.asarray(result[1]))
        return result

    jaxformer.attention.scaled_dot_product_attention = record_weights
    try:
        # Whatever the length: another kernel has no weights to record.
        with attention_kernel("plain"), intercept_calls(module, record):
            result = call(module)
    finally:
        jaxformer.attention.scaled_dot_product_attention = core
    return calls, result


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


def in_dtype(module: Any, dtype: str | None) -> Any:
    """Returns a copy in evaluation mode, its float arrays cast unless the dtype is None.

    In float64 an int32, like the index of a cache, becomes int64, as Python's integers do.
    """

    def cast(leaf: Any) -> Any:
        if is_float(leaf):
            return jnp.asarray(leaf, dtype) if dtype else leaf
        is_short = dtype == "float64" and getattr(leaf, "dtype", None) == np.int32
        return jnp.asarray(leaf, np.int64) if is_short else leaf

    definition, state = nnx.split(module)
    copied = nnx.merge(definition, jax.tree.map(cast, state))
    copied.eval()
    return copied


def with_parameters(module: Any, parameters: Mapping[str, np.ndarray]) -> Any:
    """Returns a copy of the module with the given parameters, by path, replaced."""
    return map_parameters(
        module,
        lambda own: {n: jnp.asarray(parameters.get(n, value)) for n, value in own.items()},
    )


def resolve(module: Any, path: str) -> tuple[Any, str]:
    """Returns the module at a path, and the method to call: a path may end in a called method."""
    node = module
    parts = path.split(".") if path else []
    for place, part in enumerate(parts):
        if place == len(parts) - 1 and part in _called_methods(type(node)):
            return node, part
        node = node[int(part)] if part.isdigit() else getattr(node, part)
    return node, "__call__"


def parameters_of(module: Any) -> dict[str, Any]:
    """Returns the module's parameters by path; the module may hold other state too."""
    state = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {join_path(path): variable[...] for path, variable in state}


def dtype_of(module: Any) -> str:
    """Returns the dtype of the module's first parameter, or float32 if it has none."""
    for value in parameters_of(module).values():
        return str(value.dtype)
    return "float32"


def _called_methods(cls: type) -> tuple[str, ...]:
    return next((names for base, names in METHODS.items() if issubclass(cls, base)), ())
