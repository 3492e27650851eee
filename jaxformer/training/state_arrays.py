"""A training state as the arrays of a checkpoint, and back."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxformer.checkpoints import DTYPES, GROUPS, Arrays, Manifest, describe_array, unflatten
from jaxformer.config import OptimizerConfig
from jaxformer.errors import CheckpointError, mismatches
from jaxformer.optimizers import make_optimizer
from jaxformer.train_step import TrainState

# Shape and dtype of every parameter of a model, by path.
Shapes = Mapping[str, jax.ShapeDtypeStruct]


def to_arrays(state: Any) -> Arrays:
    """Returns the groups of a checkpoint of a ``TrainState``, or of a tree structured like one."""
    return {
        "parameters": state.parameters,
        "mu": optax.tree_utils.tree_get(state.optimizer_state, "mu"),
        "nu": optax.tree_utils.tree_get(state.optimizer_state, "nu"),
        "step": state.step,
    }


def from_arrays(arrays: Arrays, shapes: Shapes, optimizer: OptimizerConfig) -> TrainState:
    """Returns the state that a checkpoint of a model holds.

    Args:
        arrays: by group and name.
        shapes: of the model's parameters.
        optimizer: its settings, whose state this becomes.

    Raises:
        CheckpointError: names, shapes or dtypes are not those of the model; all are listed.
    """
    check_arrays(arrays, shapes)
    step: Any = arrays["step"]
    step = step if isinstance(step, jax.Array) else np.asarray(step, np.int32)
    # Every number of the optimizer's state is in the checkpoint: its shape is all that is missing.
    empty = jax.eval_shape(make_optimizer(optimizer).init, arrays["parameters"])
    optimizer_state = optax.tree_utils.tree_set(empty, mu=arrays["mu"], nu=arrays["nu"], count=step)
    return TrainState(arrays["parameters"], optimizer_state, step)


def check_arrays(
    arrays: Arrays, shapes: Shapes, groups: tuple[str, ...] = GROUPS, *, cast: bool = False
) -> None:
    """Checks that arrays have the names, shapes and dtypes of a model's.

    Args:
        arrays: by group and name; shapes and dtypes (``jax.ShapeDtypeStruct``) do.
        shapes: of the model's parameters.
        groups: those that there must be.
        cast: let floats have another dtype.

    Raises:
        CheckpointError: they do not; all differences are listed.
    """
    expected = {f"{group}/{name}": x for group in groups for name, x in shapes.items()}
    found = {f"{group}/{name}": x for group in groups for name, x in arrays.get(group, {}).items()}
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
        hint = "" if problems(cast_found) else "; --cast changes dtypes on purpose"
        raise CheckpointError(f"the checkpoint does not fit its model: {'; '.join(wrong)}{hint}")


def check_manifest(manifest: Manifest, shapes: Shapes, *, cast: bool) -> None:
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


def state_dtypes(shapes: Shapes) -> dict[str, np.dtype]:
    """Returns the dtypes that training keeps a model's arrays in, by ``group/path``."""
    return {f"{group}/{name}": np.dtype(x.dtype) for group in GROUPS for name, x in shapes.items()}


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _describe(x: Any) -> str:
    return f"{np.dtype(x.dtype).name} {tuple(x.shape)}"
