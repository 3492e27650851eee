"""A module as a definition and a flat dict of its parameters, by path.

``blocks.0.attention.q_proj.kernel`` is the name of a parameter everywhere: in the training state,
in checkpoints, in the naming rule of porting.
"""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from jaxformer.errors import mismatches
from jaxformer.layers import inject_keep_masks, seed_dropout

Parameters = dict[str, Array]


def split(module: nnx.Module) -> tuple[nnx.GraphDef[Any], Parameters]:
    """The module without its arrays, and its parameters by path."""
    split_state: Any = nnx.split(module, nnx.Param, ...)
    definition, state, rest = split_state
    if jax.tree.leaves(rest):
        # Keys and masks of dropout belong to one call, not to the module.
        module = nnx.clone(module)
        seed_dropout(module, None)
        inject_keep_masks(module, {})
        definition, state = nnx.split(module, nnx.Param)
    return definition, {
        ".".join(map(str, path)): variable[...] for path, variable in nnx.to_flat_state(state)
    }


def merge(definition: nnx.GraphDef[Any], parameters: Parameters) -> Any:
    """The module that ``split`` took apart, around the given parameters.

    Cheap inside ``jax.jit``, where it runs once, while tracing.
    """
    flat: Any = {
        tuple(int(part) if part.isdigit() else part for part in name.split(".")): value
        for name, value in parameters.items()
    }
    return nnx.merge(definition, nnx.from_flat_state(flat))


def get_parameters(module: nnx.Module) -> Parameters:
    """The module's parameters by path."""
    return split(module)[1]


def set_parameters(module: nnx.Module, parameters: Parameters) -> None:
    """Puts new arrays in place of the module's parameters; their dtype becomes the module's.

    Raises:
        ValueError: a name is missing or unknown, or a shape differs; all of them are listed and
            nothing is changed.
    """
    variables = {
        ".".join(map(str, path)): variable
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
        variable.set_value(jax.numpy.asarray(parameters[name]))


def abstract(build: Any) -> tuple[nnx.GraphDef[Any], dict[str, jax.ShapeDtypeStruct]]:
    """Definition and parameter shapes of the module that ``build()`` makes, without making it."""
    definition, state = nnx.split(nnx.eval_shape(build), nnx.Param)
    return definition, {
        ".".join(map(str, path)): jax.ShapeDtypeStruct(variable.shape, variable.dtype)
        for path, variable in nnx.to_flat_state(state)
    }
