"""Marks in a candidate's jaxpr: what enters a module, what it returns, and which one is running.

A mark is an operator of JAX that changes nothing and has a name. It stays in the jaxpr wherever the
framework puts the call: under ``jit``, ``checkpoint`` or a gradient.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
from flax import linen
from jax.ad_checkpoint import checkpoint_name

from jaxformer.parameters import join_path
from jaxformer.parity.recording.jax_values import is_float
from jaxformer.parity.recording.module_calls import intercept_calls, intercept_calls_of_tree

# The operator of a mark, and how the names that are written here begin.
OPERATOR, BEGINNING = "name", "jaxformer"


@dataclasses.dataclass(frozen=True)
class Mark:
    """One array of floats that enters a module, or that the module returns.

    Attributes:
        kind: which of the two.
        class_name: of the module.
        path: of the module.
    """

    kind: Literal["enter", "return"]
    class_name: str
    path: str

    @classmethod
    def of(cls, equation: Any) -> "Mark | None":
        """Returns the mark that an equation of a jaxpr is; None for any other."""
        name = str(equation.params.get("name"))
        if equation.primitive.name != OPERATOR or not name.startswith(f"{BEGINNING} "):
            return None
        _, kind, class_name, path = name.split(" ", 3)
        return cls(kind, class_name, path)  # type: ignore[arg-type]

    def put(self, value: Any) -> Any:
        """Returns an array, or a tuple of arrays, with this mark; all else as it is.

        A list or a dict may be one that somebody writes to later: it stays the same object.
        """
        if isinstance(value, jax.core.Tracer) and is_float(value):
            return checkpoint_name(value, f"{BEGINNING} {self.kind} {self.class_name} {self.path}")
        if isinstance(value, tuple):
            marked = map(self.put, value)
            return type(value)(*marked) if hasattr(value, "_fields") else tuple(marked)
        return value


def is_scope(name: str) -> bool:
    """Returns whether a name around an operator was written here."""
    return name.startswith(f"{BEGINNING} ")


def module_of_scope(name: str) -> str:
    """Returns the path of the module that a name around an operator stands for."""
    return name.removeprefix(f"{BEGINNING} ")


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

    def call(following: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if context.method_name != "__call__":
            return following(*args, **kwargs)
        return _marked(join_path(context.module.path), context.module, following, args, kwargs)

    with linen.intercept_methods(call):
        yield


def _named_and_marked(
    path: str, module: Any, args: Any, kwargs: Any, call: Callable[..., Any]
) -> Any:
    """Calls a module with marks, and with its path around the operators that run in it."""
    with jax.named_scope(f"{BEGINNING} {path}"):
        return _marked(path, module, call, args, kwargs)


def _marked(path: str, module: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a module with marks on what enters it and on what it returns."""
    enters, returns = (Mark(kind, type(module).__name__, path) for kind in ("enter", "return"))
    given = {name: enters.put(value) for name, value in kwargs.items()}
    return returns.put(call(*map(enters.put, args), **given))
