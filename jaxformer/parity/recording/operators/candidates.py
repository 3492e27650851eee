"""The ways to call a candidate: as one function of its parameters and inputs."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxformer.errors import UsageError
from jaxformer.parameters import join_path
from jaxformer.parity.recording.jax_values import is_complex, is_numeric, leaf_names
from jaxformer.parity.recording.operators.module_marks import (
    marked_haiku,
    marked_linen,
    marked_nnx,
    marked_tree,
)
from jaxformer.parity.recording.torch_values import as_numpy, map_nested

Inputs = Sequence[Any] | Mapping[str, Any]
# Calls a model, given it and its inputs: a list, or a dict where they are named.
Caller = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A model as a pure function.

    Attributes:
        kind: what it is, for the report.
        parameters: a pytree of arrays.
        bind: returns the model that has such a pytree: an NNX or Equinox module, or a function.
        caller: calls such a model, given it and its inputs; None to call it with them.
        caches: paths of those arrays that are caches, which count as inputs.
        marked: marks the calls of such a model's modules inside a ``with`` block; see
            ``module_marks``.
        collections: the trees that hold a module's arrays, at its path in each of them.
    """

    kind: str
    parameters: Any
    bind: Callable[[Any], Callable[..., Any]]
    caller: Caller | None = None
    caches: frozenset[str] = frozenset()
    marked: Callable[[Any], AbstractContextManager[None]] = lambda model: nullcontext()
    collections: tuple[str, ...] = ("",)

    def call(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes the outputs from a pytree of arrays, positional and named arguments."""
        model = self.bind(parameters)
        with self.marked(model):
            if self.caller is None:
                return model(*args, **kwargs)
            return self.caller(model, kwargs or list(args))

    def with_inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Callable[..., Any], tuple[Any, list[Any], dict[str, Any]]]:
        """Returns a function of nothing but arrays that calls it, and what it is given.

        Args:
            args: positional arguments.
            kwargs: named ones: arrays, nested ones too, are inputs; all else is passed on.
        """
        arrays = {name: value for name, value in kwargs.items() if _is_of_arrays(value)}
        others = {name: value for name, value in kwargs.items() if name not in arrays}

        def call(parameters: Any, args: Sequence[Any], arrays: Mapping[str, Any]) -> Any:
            return self.call(parameters, *args, **arrays, **others)

        return call, (self.parameters, list(args), arrays)


def as_candidate(model: Any, caller: Caller | None = None) -> Candidate:
    """Returns a model of any framework as a function.

    Args:
        model: an NNX module; an Equinox module or any other pytree that can be called; or a pair: a
            Linen module and its variables, what Haiku's ``transform`` gives and its parameters, or
            a function and its parameters.
        caller: how to call it, given it and its inputs.

    Raises:
        UsageError: it is none of these, or a parameter is no array.
    """
    made = _as_candidate(model)
    parameters = jax.tree.map(_without_tensor, made.parameters)
    for name, leaf in zip(leaf_names(parameters), jax.tree.leaves(parameters), strict=True):
        if not is_numeric(leaf):
            which = f"the parameter {name} of the candidate" if name else "what a function is given"
            raise UsageError(
                f"{which} is no array but a {type(leaf).__name__}: take it out of the parameters; "
                "the function may close over it"
            )
    return dataclasses.replace(_in_pairs(made, parameters), caller=caller)


def _in_pairs(candidate: Candidate, parameters: Any) -> Candidate:
    """Returns a candidate whose complex parameters are pairs of real numbers, in a last axis.

    So are those of the reference: pairs are compared as floats are, and so are their gradients,
    which the two libraries define as conjugates of each other.
    """
    leaves, structure = jax.tree.flatten(parameters)
    places = {place for place, leaf in enumerate(leaves) if is_complex(leaf)}
    if not places:
        return dataclasses.replace(candidate, parameters=parameters)
    pairs = [
        np.stack([np.real(leaf), np.imag(leaf)], -1) if place in places else leaf
        for place, leaf in enumerate(leaves)
    ]

    def bind(given: Any) -> Callable[..., Any]:
        joined = [
            jax.lax.complex(leaf[..., 0], leaf[..., 1]) if place in places else leaf
            for place, leaf in enumerate(jax.tree.leaves(given))
        ]
        return candidate.bind(jax.tree.unflatten(structure, joined))

    return dataclasses.replace(
        candidate, parameters=jax.tree.unflatten(structure, pairs), bind=bind
    )


def _without_tensor(leaf: Any) -> Any:
    return leaf if isinstance(leaf, jax.Array) else as_numpy(leaf)


def _as_candidate(model: Any) -> Candidate:
    from flax import nnx

    if isinstance(model, nnx.Module):
        return _nnx(model)
    if isinstance(model, tuple) and len(model) == 2 and not hasattr(model, "_fields"):
        module, parameters = model
        if _is_linen(module):
            return _linen(module, parameters)
        apply = getattr(module, "apply", None)
        if callable(apply) and callable(getattr(module, "init", None)):
            run = _haiku(apply)
            return Candidate(
                "Haiku function", parameters, lambda given: partial(run, given),
                marked=lambda model: marked_haiku(),
            )  # fmt: skip
        if callable(module):
            return Candidate("function", parameters, lambda given: partial(module, given))
    if _is_linen(model):
        raise UsageError("give a Linen module together with its variables: (module, variables)")
    if callable(model) and any(_is_array(leaf) for leaf in jax.tree.leaves(model)):
        return _pytree(model)
    raise UsageError(
        "the candidate must be an NNX or Equinox module, (Linen module, variables), or "
        f"(function, parameters): got {type(model).__name__}"
    )


def unwrapped(model: Any) -> Any:
    """Returns the module that ``nnx.jit`` or ``jax.jit`` was given, or else the model itself."""
    inner = getattr(model, "__wrapped__", None)
    return inner if callable(inner) and not inspect.isroutine(inner) else model


def arguments(inputs: Any) -> tuple[list[Any], dict[str, Any]]:
    """Returns positional and named arguments, with every array as a numpy array.

    Args:
        inputs: an array, a list or tuple of arguments, or a dict of named ones. An argument may be
            a nested list, tuple or dict of arrays, as a cache is.

    Raises:
        UsageError: it is a list of numbers, or of nothing but such lists; it is text or nothing; or
            an array holds no numbers.
    """
    if inputs is None or isinstance(inputs, str | bytes):
        raise UsageError(
            f"inputs must be an array, a list of arrays, or a dict of arrays: got {inputs!r:.40}"
        )
    if isinstance(inputs, Mapping):
        return [], {str(name): map_nested(_as_numbers, value) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        if inputs and all(map(_is_numbers, inputs)):
            raise UsageError("inputs must be an array, a list of arrays, or a dict of arrays")
        return [map_nested(_as_numbers, value) for value in inputs], {}
    return [_as_numbers(inputs)], {}


def _as_numbers(value: Any) -> Any:
    array = as_numpy(value)
    if isinstance(array, np.ndarray) and not is_numeric(array):
        raise UsageError(f"inputs must hold numbers: got an array of {array.dtype}")
    return array


def _is_of_arrays(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return bool(leaves) and all(isinstance(leaf, np.ndarray) for leaf in leaves)


def _is_numbers(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(map(_is_numbers, value))
    return isinstance(value, int | float)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _is_linen(module: Any) -> bool:
    from flax import linen

    return isinstance(module, linen.Module)


def _nnx(model: Any) -> Candidate:
    from flax import nnx

    definition, state = nnx.split(model)
    pure = nnx.to_pure_dict(state)

    def bind(parameters: Any) -> Any:
        # Merged anew, so that caches and random streams start as they were.
        filled = jax.tree.map(lambda leaf: leaf, state)
        nnx.replace_by_pure_dict(filled, parameters)
        return nnx.merge(definition, filled)

    caches = nnx.state(model, nnx.Cache)
    paths = (join_path(path) for path, _ in nnx.to_flat_state(caches))
    return Candidate("NNX module", pure, bind, caches=frozenset(paths), marked=marked_nnx)


def _linen(module: Any, variables: Any) -> Candidate:
    if not isinstance(variables, Mapping) or not any(
        isinstance(part, Mapping) for part in variables.values()
    ):
        raise UsageError("a Linen module's variables are a dict of collections: {'params': …}")
    # Parameters alone, as a checkpoint has them.
    collections = variables if "params" in variables else {"params": variables}
    mutable = [name for name in collections if name != "params"]

    def call(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not mutable:
            return module.apply(parameters, *args, **kwargs)
        # What it writes to its caches is forgotten, so that each call starts as the first.
        return module.apply(parameters, *args, mutable=mutable, **kwargs)[0]

    def bind(parameters: Any) -> Any:
        made: Any = partial(call, parameters)
        made.__signature__ = inspect.signature(module.__call__)
        return made

    return Candidate(
        "Linen module", collections, bind, marked=lambda model: marked_linen(),
        collections=tuple(collections),
    )  # fmt: skip


def _haiku(apply: Callable[..., Any]) -> Callable[..., Any]:
    takes_key = "rng" in inspect.signature(apply).parameters

    def call(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        return (
            apply(parameters, None, *args, **kwargs)
            if takes_key
            else apply(parameters, *args, **kwargs)
        )

    return call


def _pytree(model: Any) -> Candidate:
    leaves, definition = jax.tree.flatten(model)
    paths = [
        jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(model)[0]
    ]
    arrays = {p: leaf for p, leaf in zip(paths, leaves, strict=True) if _is_array(leaf)}

    def bind(parameters: Any) -> Any:
        filled = [parameters.get(p, leaf) for p, leaf in zip(paths, leaves, strict=True)]
        return jax.tree.unflatten(definition, filled)

    return Candidate(f"{type(model).__name__} module", arrays, bind, marked=marked_tree)
