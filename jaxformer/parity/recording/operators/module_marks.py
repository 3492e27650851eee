"""Marks in a candidate's jaxpr: what enters a module, what it returns, and which one is running.

A mark is an operator of its own that changes nothing. It stays in the jaxpr wherever the framework
puts the call: under ``jit``, ``checkpoint`` or a gradient, where it marks the cotangent too. What
enters a module is marked only where that is asked for: code may ask whether two arguments are the
same object.
"""

import contextlib
import dataclasses
import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxformer import attention_core
from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import Block
from jaxformer.masks import expand_mask
from jaxformer.parameters import join_path
from jaxformer.parity.recording.jax_values import is_float
from jaxformer.parity.recording.module_calls import intercept_calls, intercept_calls_of_tree

# How the names of scopes that are written here begin.
BEGINNING = "jaxformer "


@dataclasses.dataclass(frozen=True)
class Mark:
    """That an array enters a module, or is what it returns.

    Attributes:
        class_name: of the module.
        path: of the module.
        around: path of the module that calls it, if that is known.
        number: which of the calls of the module it is, where that is known.
        side: whether the array enters the module, is returned by it, as floats or as integers that
            it has chosen, or holds its attention's weights.
        place: which of such arrays it is.
        name: of the argument that it is, or is in, where that was given by name.
        is_cotangent: whether the array is the cotangent of such an array.
        differentiated: gets each mark on an array that the gradient depends on, when it is traced.
    """

    class_name: str
    path: str
    around: str = ""
    number: int = 0
    side: Literal["entered", "returned", "chosen", "weights"] = "returned"
    place: int = 0
    name: str = ""
    is_cotangent: bool = False
    differentiated: "set[Mark] | None" = dataclasses.field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, equation: Any) -> "Mark | None":
        """Returns the mark that an equation of a jaxpr is; None for any other."""
        return equation.params["mark"] if equation.primitive is _marked_value else None

    @property
    def maker(self) -> str:
        """Path of the module whose code has made the array."""
        if self.side == "weights":
            return self.path
        return self.around if (self.side == "entered") != self.is_cotangent else self.path

    def put(self, array: Any) -> Any:
        """Returns an array with this mark."""
        return _marked_value.bind(array, mark=self)


_marked_value = Primitive("marked_value")
_marked_value.def_impl(lambda array, *, mark: array)
_marked_value.def_abstract_eval(lambda array, *, mark: array)
mlir.register_lowering(_marked_value, lambda context, array, *, mark: [array])
batching.defvectorized(_marked_value)


def _jvp(primals: Any, tangents: Any, *, mark: Mark) -> tuple[Any, Any]:
    (tangent,) = tangents
    made = mark.put(primals[0])
    if type(tangent) is ad.Zero:
        return made, tangent
    if mark.differentiated is not None:
        mark.differentiated.add(mark)
    return made, mark.put(tangent)


def _transpose(cotangent: Any, array: Any, *, mark: Mark) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [cotangent]
    return [dataclasses.replace(mark, is_cotangent=not mark.is_cotangent).put(cotangent)]


ad.primitive_jvps[_marked_value] = _jvp
ad.primitive_transposes[_marked_value] = _transpose


def module_of_scope(name: str) -> str | None:
    """Returns the path of the module that a name around an operator stands for, if it was marked.

    Args:
        name: that stands around an operator of a jaxpr.
    """
    return name.removeprefix(BEGINNING) if name.startswith(BEGINNING) else None


@contextlib.contextmanager
def marked_nnx(
    module: Any,
    *,
    with_inputs: bool = False,
    answers: Mapping[str, Callable[..., Any]] | None = None,
) -> Iterator[None]:
    """Marks the calls of the modules of an NNX module inside the ``with`` block.

    Args:
        module: the model.
        with_inputs: whether what enters a module is marked too.
        answers: what is called in place of modules, by path.
    """
    marker = _Marker(with_inputs, answers or {})
    weights = marker.marking_weights() if with_inputs else contextlib.nullcontext()
    with intercept_calls(module, marker.call), weights:
        yield


@contextlib.contextmanager
def marked_tree(module: Any) -> Iterator[None]:
    """Marks the calls of the modules of an Equinox module inside the ``with`` block."""
    with intercept_calls_of_tree(module, _Marker().call):
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
        mark = Mark(type(context.module).__name__, path_of(context.module))
        return _marked_result(mark, following(*args, **kwargs), (args, kwargs))

    return call


class _Marker:
    """Calls modules with marks, and with their paths around the operators that run in them.

    Args:
        with_inputs: whether what enters a module is marked too.
        answers: what is called in place of modules, by path.
    """

    def __init__(
        self, with_inputs: bool = False, answers: Mapping[str, Callable[..., Any]] | None = None
    ):
        self._with_inputs, self._answers = with_inputs, answers or {}
        self._running: list[Mark] = []
        self._calls: Counter[str] = Counter()
        self._differentiated: set[Mark] = set()

    def call(self, path: str, module: Any, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        """Calls a module, given its path, its arguments and its own method."""
        around = self._running[-1].path if self._running else ""
        mark = Mark(
            type(module).__name__, path, around, self._calls[path],
            differentiated=self._differentiated,
        )  # fmt: skip
        self._calls[path] += 1
        if self._with_inputs:
            if isinstance(module, MultiHeadAttention | Block):
                args, kwargs = _with_mask(module, args, kwargs)
            args, kwargs = _marked_arguments(mark, args, kwargs)
        self._running.append(mark)
        call = self._answers.get(path, call)
        try:
            with jax.named_scope(f"{BEGINNING}{path}"):
                # What entered has a mark of its own: what is passed on may have one more.
                given = () if self._with_inputs else (args, kwargs)
                made = _marked_result(mark, call(*args, **kwargs), given)
                return _marked_choices(mark, made) if self._with_inputs else made
        finally:
            self._running.pop()

    @contextlib.contextmanager
    def marking_weights(self) -> Iterator[None]:
        """Marks the weights of the attentions of jaxformer inside the ``with`` block."""
        original = attention_core._weights

        @functools.wraps(original)
        def weights(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            if not self._running:
                return made
            return dataclasses.replace(self._running[-1], side="weights").put(made)

        attention_core._weights = weights
        try:
            yield
        finally:
            attention_core._weights = original


def _with_mask(module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments of an attention, or of a block, with a whole array for its mask.

    It is the same mask for all heads or has one for each, as before.
    """
    bound = inspect.signature(type(module).__call__).bind(module, *args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if "mask" in given and given.get("cache") is None and given.get("memory_cache") is None:
        queries = given["query"] if isinstance(module, MultiHeadAttention) else given["x"]
        keys, mask = given.get("key"), given["mask"]
        keys = queries if keys is None else keys
        mask = np.ones((1, 1, 1, 1), bool) if mask is None else expand_mask(mask)
        shape = (queries.shape[0], mask.shape[1], queries.shape[1], keys.shape[1])
        given["mask"] = jnp.broadcast_to(mask, shape)
    return bound.args[1:], bound.kwargs


def _marked_arguments(mark: Mark, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns arguments with marks. What is one object stays one object."""
    found, structure = jax.tree.flatten_with_path((args, kwargs))
    known: dict[int, Any] = {}
    leaves = []
    for path, leaf in found:
        if isinstance(leaf, jax.Array) and id(leaf) not in known:
            name = str(path[1].key) if path[0].idx else ""
            known[id(leaf)] = dataclasses.replace(
                mark, side="entered", place=len(known), name=name
            ).put(leaf)
        leaves.append(known.get(id(leaf), leaf))
    return jax.tree.unflatten(structure, leaves)


def _marked_choices(mark: Mark, value: Any) -> Any:
    """Returns a named tuple whose integers have marks; whatever else a module returned as it is."""
    if not (isinstance(value, tuple) and hasattr(value, "_make")):
        return value
    arrays = [(n, one) for n, one in enumerate(value) if isinstance(one, jax.Array)]
    places = [n for n, one in arrays if jnp.issubdtype(one.dtype, jnp.integer)]
    marked = {
        n: dataclasses.replace(mark, side="chosen", place=place).put(value[n])
        for place, n in enumerate(places)
    }
    return value._make(marked.get(n, one) for n, one in enumerate(value))


def _marked_result(mark: Mark, value: Any, given: Any) -> Any:
    """Returns the arrays of floats that a module returned with marks; all else as it is.

    A list or a dict may be one that somebody writes to later: it stays the same object. So does
    what the module was given.

    Args:
        mark: of the module.
        value: what the module returned.
        given: its arguments.
    """
    count = 0

    def put(value: Any) -> Any:
        nonlocal count
        if isinstance(value, jax.core.Tracer) and is_float(value):
            count += 1
            if any(value is one for one in jax.tree.leaves(given)):
                return value
            return dataclasses.replace(mark, place=count - 1).put(value)
        if type(value) is tuple:
            return tuple(map(put, value))
        if isinstance(value, tuple) and hasattr(value, "_make"):
            return type(value)._make(map(put, value))
        return value

    return put(value)
