"""Calls of the modules of a JAX model, routed through a function of the caller's."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from flax import nnx

from jaxformer.execution.shared_traces import shared_traces
from jaxformer.layers import Embedding
from jaxformer.parameters import join_path

# Methods that are called like modules. Their path is that of the module + the method's name.
METHODS = {Embedding: ("attend",)}
# Called in place of a submodule's method: (path, owner, args, kwargs, original method).
CallHandler = Callable[[str, Any, tuple[Any, ...], dict[str, Any], Callable[..., Any]], Any]


@contextlib.contextmanager
def intercept_calls(module: Any, on_call: CallHandler) -> Iterator[None]:
    """Routes every call of a submodule of an NNX module inside the ``with`` block.

    Args:
        module: the model.
        on_call: what is called in place of a submodule.
    """
    # To walk through a module takes long beside the calls that are made in it.
    nodes = [(join_path(path), node) for path, node in nnx.iter_modules(module)]
    with shared_traces(False), _routed(nodes, on_call):
        yield


@contextlib.contextmanager
def intercept_calls_of_tree(tree: Any, on_call: CallHandler) -> Iterator[None]:
    """Does the same of a pytree of dataclasses that can be called, as a module of Equinox is."""
    with _routed(list(_callables_in(tree)), on_call):
        yield


def _callables_in(
    node: Any, path: str = "", around: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yields the dataclasses in a tree that can be called, with their paths as JAX writes them.

    Args:
        node: the tree, or a part of it.
        path: of the part.
        around: the parts that it is in, which settings may lead back to.
    """
    inside: Iterable[tuple[str, Any]] = ()
    if id(node) in around:
        return
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        if callable(node):
            yield path, node
        names = [field.name for field in dataclasses.fields(node)]
        inside = [(f".{name}", getattr(node, name, None)) for name in names]
    elif isinstance(node, list | tuple):
        inside = [(f"[{place}]", one) for place, one in enumerate(node)]
    elif isinstance(node, dict):
        inside = [(f"[{key!r}]", one) for key, one in node.items()]
    for name, one in inside:
        yield from _callables_in(one, f"{path}{name}".lstrip("."), (*around, id(node)))


@contextlib.contextmanager
def _routed(nodes: Iterable[tuple[str, Any]], on_call: CallHandler) -> Iterator[None]:
    """Routes the calls of modules, given with their paths, inside the ``with`` block."""
    nodes = list(nodes)
    paths = {id(node): path for path, node in nodes}
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
        for name in ("__call__", *called_methods(cls)):
            # ``type`` has a ``__call__`` too: the one that makes instances.
            if any(name in vars(base) for base in cls.__mro__):
                wrap(cls, name)
    try:
        yield
    finally:
        for cls, name, before in reversed(replaced):
            if before is None:
                delattr(cls, name)
            else:
                setattr(cls, name, before)


def called_methods(cls: type) -> tuple[str, ...]:
    """Returns the methods of a class that are called like modules."""
    return next((names for base, names in METHODS.items() if issubclass(cls, base)), ())
