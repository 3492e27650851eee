"""The jaxprs of isolated modules, shared by modules that differ in their numbers alone.

To trace a module, forward and backward, takes longer than to evaluate a small one. The layers of a
model have the same jaxprs, so that each kind of module is traced once.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxformer.parity.recording.jax_values import float_arrays, is_float, on_host, refill
from jaxformer.parity.recording.operators.evaluation import TracedFunction, trace_function

# From what a module reads and the arrays that it is differentiated by: floats, other numbers, and
# what is kept of the trace.
RunModule = Callable[..., tuple[Any, Any, Any]]


class Program:
    """One module as jaxprs, forward and backward, which are evaluated operator by operator.

    Args:
        run: runs the module; it is called once, to be traced.
        is_pulled: whether gradients are pulled back through it.

    Attributes:
        kept: what the trace gave beside arrays.
    """

    def __init__(self, run: RunModule, is_pulled: bool):
        self._run, self._is_pulled = run, is_pulled
        self._forward: TracedFunction | None = None
        self._backward: TracedFunction | None = None
        self.kept: Any = None

    def forward(self, around: Any, primals: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Returns the module's floats, its other numbers, and what ``backward`` takes.

        Args:
            around: what it reads; its floats may be others than those it was traced with.
            primals: what it is differentiated by, likewise.
        """
        floats = float_arrays(around)
        if self._forward is None:
            run = self._run

            def forward(floats: Sequence[Any], primals: Sequence[Any]) -> Any:
                def made(*primals: Any) -> Any:
                    found, others, self.kept = run(refill(around, floats), *primals)
                    return found, others

                if not self._is_pulled:
                    return *made(*primals), None
                found, pull, others = jax.vjp(made, *primals, has_aux=True)
                return found, others, pull

            self._forward = trace_function(forward, floats, primals)
            # It would keep the weights of the module that was traced.
            del self._run
        return self._forward.evaluate(floats, primals)

    def backward(self, pull: Any, directions: Any) -> Any:
        """Returns the gradients of ``primals``, given those of the floats."""
        if self._backward is None:
            self._backward = trace_function(lambda pull, given: pull(given), pull, directions)
        return self._backward.evaluate(pull, directions)


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What modules have in common that one program serves.

    Attributes:
        about: the module's definition, and how it is run.
        structure: of all that it reads.
        leaves: the shape and dtype of each float, and any other leaf as it is.
    """

    about: tuple[Any, ...]
    structure: Any
    leaves: tuple[Any, ...]


class Programs:
    """The programs of a model's modules."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], list[tuple[_Kind, Program]]] = {}

    def find(
        self, about: tuple[Any, ...], around: Any, primals: Any, make: Callable[[], Program]
    ) -> Program:
        """Returns the program of a module, made anew if there is none of an equal one.

        Args:
            about: the module's definition, and how it is run.
            around: what it reads. All but floats is written into its program.
            primals: what it is differentiated by.
            make: makes a program.
        """
        leaves, structure = jax.tree.flatten((around, primals))
        kind = _Kind(about, structure, tuple(map(_content, leaves)))
        alike = self._known.setdefault(kind.leaves, [])
        for known, program in alike:
            if known == kind:
                return program
        program = make()
        alike.append((kind, program))
        return program


def _content(leaf: Any) -> Any:
    """Returns what two leaves have in common for which one program serves."""
    if is_float(leaf):
        return "float", leaf.shape, str(leaf.dtype)
    if hasattr(leaf, "dtype"):
        array = on_host(leaf)
        return array.shape, str(array.dtype), array.tobytes()
    is_plain = isinstance(leaf, bool | int | float | complex | str | bytes)
    # Anything else is itself alone.
    return (type(leaf), leaf) if is_plain else _Itself(leaf)


@dataclasses.dataclass(frozen=True, eq=False)
class _Itself:
    """A leaf that equals no other one; it is held, so that no other gets its identity."""

    leaf: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.leaf is other.leaf

    def __hash__(self) -> int:
        return id(self.leaf)
