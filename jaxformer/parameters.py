"""A module as a definition and a flat dict of its parameters, by path.

``blocks.0.attention.q_proj.kernel`` is the name of a parameter everywhere: in the training state,
in checkpoints, in the naming rule of porting.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxformer.errors import mismatches

Parameters = dict[str, Array]


def join_path(path: Iterable[Any]) -> str:
    """Returns the name of a leaf or a sub-module, from the parts of its path.

    >>> join_path(("blocks", 0, "attention"))
    'blocks.0.attention'
    """
    return ".".join(map(str, path))


def split_path(name: str) -> tuple[str | int, ...]:
    """Returns the parts of a path, from the name that ``join_path`` made of it.

    >>> split_path("blocks.0.attention")
    ('blocks', 0, 'attention')
    """
    return tuple(int(part) if part.isdigit() else part for part in name.split("."))


def split(module: nnx.Module) -> tuple[nnx.GraphDef[Any], Parameters]:
    """Returns the module's definition, which holds no arrays, and its parameters by path.

    Keys and masks of dropout are in neither: they belong to one call, not to the module.
    """
    split_state: Any = nnx.split(module, nnx.Param, ...)
    definition, state, rest = split_state
    if jax.tree.leaves(rest):
        module = nnx.clone(module)
        for (*owner, attribute), _ in nnx.to_flat_state(rest):
            setattr(_find(module, owner), str(attribute), None)
        definition, state = nnx.split(module, nnx.Param)
    return definition, {
        join_path(path): variable[...] for path, variable in nnx.to_flat_state(state)
    }


def _find(module: Any, path: Iterable[Any]) -> Any:
    """The sub-module at a path."""
    return functools.reduce(
        lambda node, part: node[part] if isinstance(part, int) else getattr(node, part),
        path,
        module,
    )


def merge(definition: nnx.GraphDef[Any], parameters: Parameters, *rest: Any) -> Any:
    """Returns the module that ``split`` took apart, around the given parameters.

    Cheap inside ``jax.jit``, where it runs once, while tracing.

    Args:
        definition: of the module.
        parameters: by path.
        rest: other state of the module, as ``nnx.split`` gives it.
    """
    flat: Any = {split_path(name): value for name, value in parameters.items()}
    return nnx.merge(definition, nnx.from_flat_state(flat), *rest)


def map_parameters(module: Any, function: Callable[[Parameters], Parameters]) -> Any:
    """Returns a copy of the module with ``function`` of its parameters, by path, in their place.

    Its other arrays, such as keys of dropout, stay.
    """
    split_state: Any = nnx.split(module, nnx.Param, ...)
    definition, state, rest = split_state
    flat = nnx.to_flat_state(state)
    mapped = function({join_path(path): variable[...] for path, variable in flat})
    paths: Any = [(path, mapped[join_path(path)]) for path, _ in flat]
    return nnx.merge(definition, nnx.from_flat_state(paths), rest)


def get_parameters(module: nnx.Module) -> Parameters:
    """Returns the module's parameters by path."""
    return split(module)[1]


def set_parameters(module: nnx.Module, parameters: Parameters) -> None:
    """Puts new arrays in place of the module's parameters; their dtype becomes the module's.

    Raises:
        ValueError: a name is missing or unknown, or a shape differs; all of them are listed and
            nothing is changed.
    """
    variables = {
        join_path(path): variable
        for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param))
    }
    problems = mismatches(
        {name: variable[...].shape for name, variable in variables.items()},
        {name: array.shape for name, array in parameters.items()},
        "has shape",
    )
    if problems:
        raise ValueError("; ".join(problems))
    for name, variable in variables.items():
        variable.set_value(_as_array(parameters[name]))


def _as_array(array: Any) -> Array:
    """Returns a JAX array as it is and a numpy array as a copy.

    ``jnp.asarray`` and ``jnp.array`` would compile a program for each shape of a numpy array.
    """
    return array if isinstance(array, jax.Array) else jax.device_put(array, may_alias=False)


class _ShapesOnly:
    """In place of ``nnx.Rngs`` where only a module's shapes are wanted: nothing is drawn.

    Drawing takes most of the time of building a module, even when it is only traced.
    """

    def params(self) -> None:
        """Returns no key; the initializers then return zeros."""


def abstract_module(build: Callable[[Any], Any]) -> Any:
    """Returns the module of ``build(rngs)`` with a ``jax.ShapeDtypeStruct`` for every array."""
    return nnx.eval_shape(lambda: build(_ShapesOnly()))


def abstract(
    build: Callable[[Any], Any],
) -> tuple[nnx.GraphDef[Any], dict[str, jax.ShapeDtypeStruct]]:
    """Returns definition and parameter shapes of the module that ``build(rngs)`` would make."""
    definition, state = nnx.split(abstract_module(build), nnx.Param)
    return definition, {
        join_path(path): jax.ShapeDtypeStruct(variable.shape, variable.dtype)
        for path, variable in nnx.to_flat_state(state)
    }


def cast_parameters(parameters: Parameters, dtype: jnp.dtype | None) -> Parameters:
    """Returns the parameters in ``dtype``; None leaves them."""
    if dtype is None:
        return parameters
    return {name: value.astype(dtype) for name, value in parameters.items()}
