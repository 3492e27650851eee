"""Models that are split again and again, as for each text that they write."""

import functools
import weakref
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from jaxformer.parameters import Parameters, split


class _Known(NamedTuple):
    """What is known of a model that was split.

    Attributes:
        contents: all of ``_contents``, as it was then.
        definition: without arrays.
        variables: the parameters, by path, in the order of ``split``.
    """

    contents: list[Any]
    definition: nnx.GraphDef[Any]
    variables: dict[str, nnx.Variable[Any]]


_known: weakref.WeakKeyDictionary[nnx.Module, _Known] = weakref.WeakKeyDictionary()


def split_once(module: nnx.Module) -> tuple[nnx.GraphDef[Any], Parameters]:
    """Returns ``split`` of a module, which is gone through by Flax only if it has changed.

    A model has changed if an attribute of a module in it is another object than before. Parameters
    may have got other values.
    """
    contents = _contents(module)
    if contents is None:
        return split(module)
    known = _known.get(module)
    if known is None or not _are_same(known.contents, contents):
        definition, parameters = split(module)
        variables: dict[str, Any] = {
            name: functools.reduce(getattr, name.split("."), module) for name in parameters
        }
        known = _known[module] = _Known(contents, definition, variables)
    return known.definition, {name: variable[...] for name, variable in known.variables.items()}


def _are_same(before: list[Any], now: list[Any]) -> bool:
    return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))


def _contents(module: nnx.Module) -> list[Any] | None:
    """Returns names and values of all attributes; None if they may change and stay the same object.

    What Flax itself notes of a module follows from these.
    """
    found: list[Any] = []
    modules = [module]
    seen = {id(module)}
    for node in modules:
        for name, value in vars(node).items():
            if name.startswith("_pytree__"):
                continue
            found += name, value
            if isinstance(value, nnx.Module):
                if value is module:
                    return None  # kept here, it would be kept for ever
                if id(value) not in seen:
                    seen.add(id(value))
                    modules.append(value)
            elif isinstance(value, nnx.Variable):
                if type(value) is not nnx.Param:
                    return None
            elif isinstance(value, dict | jax.Array | list | np.ndarray | set):
                return None
    return found
