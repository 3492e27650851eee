"""Our side: a pass with every sub-module's call noted, and single modules run on given inputs."""

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
from jaxformer.layers import Embedding
from jaxformer.parameters import join_path, split_path
from jaxformer.parity.trace.recorded_weights import RecordedWeights

# Methods that are called like modules: path of the module + name.
METHODS = {Embedding: ("attend",)}


@dataclasses.dataclass
class Call:
    """One call of one module: its arguments as they were, and its result.

    Attributes:
        args: positional.
        kwargs: by name.
        order: its place among all calls.
        output: whatever it returned.
        weights: of attention, if it computed such.
        later: further calls of the same module.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    order: int
    output: Any = None
    weights: RecordedWeights | None = None
    later: list["Call"] = dataclasses.field(default_factory=list)

    @property
    def inputs(self) -> list[Any]:
        """Its float arrays, positional ones first."""
        return floats((self.args, self.kwargs))

    @property
    def integers(self) -> list[Any]:
        """Its integer arrays, positional ones first."""
        return integers((self.args, self.kwargs))

    @property
    def outputs(self) -> list[Any]:
        """The float arrays of its result."""
        return floats(self.output)

    @property
    def all(self) -> list["Call"]:
        """This call and the further ones."""
        return [self, *self.later]


def floats(tree: Any) -> list[Any]:
    """The float arrays of a tree, in order."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def integers(tree: Any) -> list[Any]:
    """The integer arrays of a tree that have an axis, in order."""
    return [leaf for leaf in jax.tree.leaves(tree) if _is_integer(leaf)]


def refill(tree: Any, arrays: Sequence[Any], which: Callable[[Any], bool] | None = None) -> Any:
    """The tree with its float arrays replaced, as far as there are others; None keeps one."""
    waiting = list(arrays)
    leaves, structure = jax.tree.flatten(tree)
    for place, leaf in enumerate(leaves):
        if (which or is_float)(leaf) and waiting:
            other = waiting.pop(0)
            leaves[place] = leaf if other is None else other
    return jax.tree.unflatten(structure, leaves)


def refill_integers(tree: Any, arrays: Sequence[Any]) -> Any:
    """``refill`` for the integer arrays."""
    return refill(tree, arrays, _is_integer)


def bound(owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a module's call by the names of its parameters, defaults too."""
    try:
        found = inspect.signature(type(owner).__call__).bind(owner, *args, **kwargs)
    except (TypeError, ValueError):
        return {}
    found.apply_defaults()
    return dict(found.arguments)


def rebound(owner: Any, call: Call, values: Mapping[str, Any]) -> Call:
    """The call with some of its arguments replaced, by name."""
    found = inspect.signature(type(owner).__call__).bind(owner, *call.args, **call.kwargs)
    found.arguments.update(values)
    return dataclasses.replace(call, args=tuple(found.args[1:]), kwargs=dict(found.kwargs))


@contextlib.contextmanager
def watched(
    module: Any,
    on_call: Callable[[str, Any, tuple[Any, ...], dict[str, Any], Callable[..., Any]], Any],
) -> Iterator[None]:
    """Sends every call of a sub-module through ``on_call(path, owner, args, kwargs, original)``."""
    paths = {id(node): join_path(path) for path, node in nnx.iter_modules(module)}
    busy: set[tuple[int, str]] = set()
    undo: list[tuple[type, str, Any]] = []

    def wrap(cls: type, name: str) -> None:
        original = getattr(cls, name)

        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            path = paths.get(id(self))
            if path is None or (id(self), name) in busy:
                return original(self, *args, **kwargs)
            busy.add((id(self), name))
            try:
                here = path if name == "__call__" else f"{path}.{name}".lstrip(".")
                return on_call(here, self, args, kwargs, functools.partial(original, self))
            finally:
                busy.discard((id(self), name))

        undo.append((cls, name, cls.__dict__.get(name)))
        setattr(cls, name, call)

    for cls in {type(node) for _, node in nnx.iter_modules(module)}:
        for name in ("__call__", *_methods(cls)):
            # Every class has the ``__call__`` that makes its instances.
            if any(name in vars(base) for base in cls.__mro__):
                wrap(cls, name)
    try:
        yield
    finally:
        for cls, name, before in reversed(undo):
            if before is None:
                delattr(cls, name)
            else:
                setattr(cls, name, before)


def trace(module: Any, call: Callable[[Any], Any]) -> tuple[dict[str, Call], Any]:
    """One eager pass of our model.

    Returns:
        The first call of every sub-module, by path in the order of calls; and the result.
    """
    calls: dict[str, Call] = {}
    count = 0
    running: list[Call] = []

    def note(
        path: str, owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any], original: Any
    ) -> Any:
        nonlocal count
        made = Call(args, kwargs, count)
        count += 1
        if path in calls:
            calls[path].later.append(made)
        else:
            calls[path] = made
        running.append(made)
        try:
            made.output = original(*args, **kwargs)
        finally:
            running.pop()
        return made.output

    core = jaxformer.attention.scaled_dot_product_attention

    @functools.wraps(core)
    def see_weights(*args: Any, **kwargs: Any) -> Any:
        result = core(*args, **kwargs)
        if running and running[-1].weights is None:
            running[-1].weights = RecordedWeights.of(np.asarray(result[1]))
        return result

    jaxformer.attention.scaled_dot_product_attention = see_weights
    try:
        with watched(module, note):
            result = call(module)
    finally:
        jaxformer.attention.scaled_dot_product_attention = core
    return calls, result


def in_dtype(module: Any, dtype: str | None) -> Any:
    """A copy of the module in evaluation mode, its floats cast unless the dtype is None."""
    definition, parameters, rest = split(module)
    cast = functools.partial(
        jax.tree.map, lambda a: a.astype(dtype) if dtype and is_float(a) else a
    )
    copied = merge(definition, cast(parameters), cast(rest))
    copied.eval()
    return copied


def with_parameters(module: Any, parameters: Mapping[str, np.ndarray]) -> Any:
    """A copy of the module with some of its parameters replaced."""
    definition, own, rest = split(module)
    replaced = {name: jnp.asarray(parameters.get(name, value)) for name, value in own.items()}
    return merge(definition, replaced, rest)


def resolve(module: Any, path: str) -> tuple[Any, str]:
    """The module at a path, and the method to call: a path may end in one of ``METHODS``."""
    here = module
    parts = path.split(".") if path else []
    for place, part in enumerate(parts):
        if place == len(parts) - 1 and part in _methods(type(here)):
            return here, part
        here = here[int(part)] if part.isdigit() else getattr(here, part)
    return here, "__call__"


def parameters_of(module: Any) -> dict[str, Any]:
    """The module's parameters by path; it may have other state beside them."""
    return split(module)[1]


def dtype_of(module: Any) -> str:
    """The dtype of the first of its parameters; float32 where it has none."""
    for value in parameters_of(module).values():
        return str(value.dtype)
    return "float32"


def _methods(cls: type) -> tuple[str, ...]:
    return next((names for base, names in METHODS.items() if issubclass(cls, base)), ())


def split(module: Any) -> tuple[Any, dict[str, Any], Any]:
    """Without its arrays; its parameters by path; and what other state it has."""
    diverged: Any = nnx.split(module, nnx.Param, ...)
    definition, state, rest = diverged
    flat: Any = nnx.to_flat_state(state)
    return definition, {join_path(p): variable[...] for p, variable in flat}, rest


def merge(definition: Any, parameters: Mapping[str, Any], rest: Any) -> Any:
    """What ``split`` took apart, with these parameters."""
    flat: Any = {split_path(name): value for name, value in parameters.items()}
    return nnx.merge(definition, nnx.from_flat_state(flat), rest)


def is_float(leaf: Any) -> bool:
    """Whether it is an array of floats."""
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)


def _is_integer(leaf: Any) -> bool:
    is_known = hasattr(leaf, "dtype") and not isinstance(leaf, jax.core.Tracer)
    return is_known and jnp.issubdtype(leaf.dtype, jnp.integer) and leaf.ndim > 0
