"""Marks in a candidate's jaxpr: what a module returns, and which one is running.

A mark is an operator of JAX that changes nothing and has a name. It stays in the jaxpr wherever the
framework puts the call: under ``jit``, ``checkpoint`` or a gradient. What enters a module has no
mark: its code may ask whether two arguments are the same object.
"""

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxformer.parameters import join_path
from jaxformer.parity.recording.jax_values import is_float
from jaxformer.parity.recording.module_calls import intercept_calls, intercept_calls_of_tree

# The operator of a mark, and how the names that are written here begin.
OPERATOR, BEGINNING = "name", "jaxformer"


@dataclasses.dataclass(frozen=True)
class Mark:
    """That an array of floats is what a module returns.

    Attributes:
        class_name: of the module.
        path: of the module.
    """

    class_name: str
    path: str

    @classmethod
    def of(cls, equation: Any) -> "Mark | None":
        """Returns the mark that an equation of a jaxpr is; None for any other."""
        name = str(equation.params.get("name"))
        if equation.primitive.name != OPERATOR or not name.startswith(f"{BEGINNING} "):
            return None
        _, class_name, path = name.split(" ", 2)
        return cls(class_name, path)

    def put(self, value: Any, given: Any) -> Any:
        """Returns an array, or a tuple of arrays, with this mark; all else as it is.

        A list or a dict may be one that somebody writes to later: it stays the same object. So does
        what the module was given.

        Args:
            value: what the module returns.
            given: its arguments.
        """
        if isinstance(value, jax.core.Tracer) and is_float(value):
            if any(value is one for one in jax.tree.leaves(given)):
                return value
            return checkpoint_name(value, f"{BEGINNING} {self.class_name} {self.path}")
        if type(value) is tuple:
            return tuple(self.put(one, given) for one in value)
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return type(value)._make(self.put(one, given) for one in value)
        return value


def module_of_scope(name: str) -> str | None:
    """Returns the path of the module that a name around an operator stands for, if it was marked.

    Args:
        name: that stands around an operator of a jaxpr.
    """
    beginning = f"{BEGINNING} "
    return name.removeprefix(beginning) if name.startswith(beginning) else None


@contextlib.contextmanager
def marked_nnx(module: Any) -> Iterator[None]:
    """Marks the calls of the modules of an NNX module inside the ``with`` block."""
    with intercept_calls(module, _named_and_marked):
        yield


@contextlib.contextmanager
def marked_tree(module: Any) -> Iterator[None]:
    """Marks the calls of the modules of an Equinox module inside the ``with`` block."""
    with intercept_calls_of_tree(module, _named_and_marked):
        yield


@contextlib.contextmanager
def marked_linen() -> Iterator[None]:
    """Marks the calls of Linen modules inside the ``with`` block; Linen names what runs itself."""
    from flax import linen

    with linen.intercept_methods(_interceptor(lambda module: join_path(module.path))):
        yield


@contextlib.contextmanager
def marked_haiku() -> Iterator[None]:
    """Marks the calls of Haiku's modules inside the ``with`` block; Haiku names what runs itself.

    A function that Haiku has not made, which has an ``apply`` too, has no modules of it.
    """
    haiku = sys.modules.get("haiku")
    if haiku is None:
        yield
        return

    with haiku.intercept_methods(_interceptor(lambda module: module.module_name)):
        yield


def _interceptor(path_of: Callable[[Any], str]) -> Callable[..., Any]:
    """Returns what Linen and Haiku call in place of a method, given what finds a module's path."""

    def call(following: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name != "__call__":
            return following(*args, **kwargs)
        return _marked(path_of(context.module), context.module, following, args, kwargs)

    return call


def _named_and_marked(
    path: str, module: Any, args: Any, kwargs: Any, call: Callable[..., Any]
) -> Any:
    """Calls a module with marks, and with its path around the operators that run in it."""
    with jax.named_scope(f"{BEGINNING} {path}"):
        return _marked(path, module, call, args, kwargs)


def _marked(path: str, module: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a module, and marks what it returns."""
    return Mark(type(module).__name__, path).put(call(*args, **kwargs), (args, kwargs))
