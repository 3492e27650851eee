"""A training state as the arrays of a checkpoint, and back."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.checkpoints import DTYPES, Arrays, Manifest, describe_array, flatten, unflatten
from jaxformer.config import OptimizerConfig
from jaxformer.errors import CheckpointError, Setting, mismatches
from jaxformer.parameters import Parameters
from jaxformer.train_step import TrainState

# Shape and dtype of every parameter of a model, by path.
Shapes = Mapping[str, jax.ShapeDtypeStruct]


def moments_of(optimizer_state: Any) -> dict[str, dict[str, Any]]:
    """Returns what an optimizer's state keeps of parameters, by optax's name and by path."""
    found: dict[str, dict[str, Any]] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(optimizer_state)[0]:
        place = _place(path)
        if place is not None:
            found.setdefault(place[0], {})[place[1]] = leaf
    return found


def _place(path: Sequence[Any]) -> tuple[str, str] | None:
    """The name that a leaf has in its optimizer, and its parameter; None for a count of steps."""
    if not isinstance(path[-1], jax.tree_util.DictKey):
        return None
    return path[-2].name, path[-1].key


def to_arrays(state: Any) -> Arrays:
    """Returns the groups of a checkpoint of a ``TrainState``, or of a tree structured like one."""
    return {
        "parameters": state.parameters,
        **moments_of(state.optimizer_state),
        "step": state.step,
    }


def averaged_parameters(state: TrainState) -> Parameters:
    """Returns the moving average of the parameters where a state keeps one, else themselves."""
    average = moments_of(state.optimizer_state).get("ema", {})
    return {**state.parameters, **average}


def state_shapes(shapes: Shapes, optimizer: OptimizerConfig) -> Arrays:
    """Returns the arrays of a checkpoint as ``jax.ShapeDtypeStruct``."""
    create = functools.partial(TrainState.create, optimizer=optimizer)
    return to_arrays(jax.eval_shape(create, dict(shapes)))


def from_arrays(arrays: Arrays, shapes: Shapes, optimizer: OptimizerConfig) -> TrainState:
    """Returns the state that a checkpoint of a model holds.

    Args:
        arrays: by group and name.
        shapes: of the model's parameters.
        optimizer: its settings, whose state this becomes.

    Raises:
        CheckpointError: names, shapes or dtypes are not those of the model and its optimizer; all
            are listed.
    """
    check_arrays(arrays, state_shapes(shapes, optimizer))
    return fill_state(arrays, optimizer)


def fill_state(arrays: Arrays, optimizer: OptimizerConfig) -> TrainState:
    """Returns the state of arrays that fit, see ``from_arrays``; their dtypes may be any."""
    step: Any = arrays["step"]
    step = step if isinstance(step, jax.Array) else np.asarray(step, np.int32)
    create = functools.partial(TrainState.create, optimizer=optimizer)
    empty = jax.eval_shape(create, arrays["parameters"]).optimizer_state

    def fill(path: Sequence[Any], _: Any) -> Any:
        place = _place(path)
        return step if place is None else arrays[place[0]][place[1]]

    optimizer_state = jax.tree_util.tree_map_with_path(fill, empty)
    return TrainState(arrays["parameters"], optimizer_state, step)


def check_arrays(arrays: Arrays, shapes: Arrays, *, cast: bool = False) -> None:
    """Checks that arrays have the names, shapes and dtypes of those that there must be.

    Args:
        arrays: by group and name; shapes and dtypes (``jax.ShapeDtypeStruct``) do.
        shapes: by the same groups; a group that they lack may not be there.
        cast: let floats have another dtype.

    Raises:
        CheckpointError: they do not; all differences are listed.
    """
    expected, found = (
        {name: x for name, x in flatten({**tree, "step": None}).items() if name != "step"}
        for tree in (shapes, arrays)
    )
    floats = {
        name: x
        for name, x in found.items()
        if name in expected and _is_float(x) and _is_float(expected[name])
    }

    def problems(found: dict[str, Any]) -> list[str]:
        return mismatches(
            {name: _describe(x) for name, x in expected.items()},
            {name: _describe(x) for name, x in found.items()},
            "is",
        )

    cast_found = found | {
        name: jax.ShapeDtypeStruct(x.shape, expected[name].dtype) for name, x in floats.items()
    }
    wrong = problems(cast_found if cast else found)
    if wrong:
        hint = ("; ", Setting("cast"), " changes dtypes on purpose")
        raise CheckpointError(
            f"the checkpoint does not fit its model: {'; '.join(wrong)}",
            *(() if problems(cast_found) else hint),
        )


def check_manifest(manifest: Manifest, shapes: Arrays, *, cast: bool) -> None:
    """Checks what a checkpoint holds before any of its arrays is read.

    Raises:
        CheckpointError: see ``check_arrays``; or the state is of another step than the manifest.
    """
    step = manifest["step"]
    if manifest["arrays"]["step"] != describe_array(np.asarray(step, np.int32)):
        raise CheckpointError(f"the checkpoint of step {step} holds the state of another")
    described = {
        name: jax.ShapeDtypeStruct(tuple(entry["shape"]), DTYPES[entry["dtype"]])
        for name, entry in manifest["arrays"].items()
    }
    check_arrays(unflatten(described), shapes, cast=cast)


def state_dtypes(shapes: Arrays) -> dict[str, np.dtype]:
    """Returns the dtypes of the arrays of a checkpoint by ``group/path``, from their shapes."""
    return {name: np.dtype(x.dtype) for name, x in flatten(shapes).items() if name != "step"}


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _describe(x: Any) -> str:
    return f"{np.dtype(x.dtype).name} {tuple(x.shape)}"
