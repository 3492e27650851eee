"""A training state as a checkpoint holds it, and back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxformer.checkpoints import DTYPES, GROUPS, Arrays, Manifest, describe_array, nested
from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.errors import CheckpointError, mismatches
from jaxformer.optimizers import make_optimizer
from jaxformer.parameters import abstract
from jaxformer.train_step import Definition, TrainState
from jaxformer.transformer_lm import TransformerLM


def to_arrays(state: Any) -> Arrays:
    """A state, or what has the shape of one, by the groups of a checkpoint."""
    return {
        "parameters": state.parameters,
        "mu": optax.tree_utils.tree_get(state.optimizer_state, "mu"),
        "nu": optax.tree_utils.tree_get(state.optimizer_state, "nu"),
        "step": state.step,
    }


def from_arrays(
    arrays: Arrays, model: TransformerLMConfig, optimizer: OptimizerConfig
) -> tuple[Definition, TrainState]:
    """A model's definition and the state that a checkpoint of it holds.

    Raises:
        CheckpointError: the checkpoint's names, shapes or dtypes are not those of the model; all
            of them are listed.
    """
    definition = check_arrays(arrays, model, GROUPS)
    step: Any = arrays["step"]
    step = step if isinstance(step, jax.Array) else np.asarray(step, np.int32)
    # Every number of the optimizer's state is in the checkpoint: its shape is all that is missing.
    empty = jax.eval_shape(make_optimizer(optimizer).init, arrays["parameters"])
    optimizer_state = optax.tree_utils.tree_set(empty, mu=arrays["mu"], nu=arrays["nu"], count=step)
    return definition, TrainState(arrays["parameters"], optimizer_state, step)


def check_arrays(
    arrays: Arrays,
    model: TransformerLMConfig,
    groups: tuple[str, ...] = ("parameters",),
    *,
    cast: bool = False,
) -> Definition:
    """The definition of the model that the arrays are of.

    Args:
        arrays: by group and name; shapes and dtypes (``jax.ShapeDtypeStruct``) do.
        model: the settings.
        groups: those that there must be.
        cast: let floats have another dtype.

    Raises:
        CheckpointError: their names, shapes or dtypes are not the model's; all are listed.
    """
    definition, shapes = abstract(lambda: TransformerLM(model, rngs=nnx.Rngs(0)))
    expected = {f"{group}/{name}": x for group in groups for name, x in shapes.items()}
    found = {f"{group}/{name}": x for group in groups for name, x in arrays.get(group, {}).items()}
    floats = {
        name: x
        for name, x in found.items()
        if name in expected and _is_float(x) and _is_float(expected[name])
    }

    def problems(found: dict[str, Any]) -> list[str]:
        return mismatches(
            {name: _kind(x) for name, x in expected.items()},
            {name: _kind(x) for name, x in found.items()},
            "is",
        )

    cast_found = found | {
        name: jax.ShapeDtypeStruct(x.shape, expected[name].dtype) for name, x in floats.items()
    }
    wrong = problems(cast_found if cast else found)
    if wrong:
        hint = "" if problems(cast_found) else "; --cast changes dtypes on purpose"
        raise CheckpointError(f"the checkpoint does not fit its model: {'; '.join(wrong)}{hint}")
    return definition


def check_manifest(manifest: Manifest, model: TransformerLMConfig, *, cast: bool) -> None:
    """Checks what a checkpoint holds before any of it is read.

    Raises:
        CheckpointError: see ``check_arrays``; or it is not of the step that it says.
    """
    step = manifest["step"]
    if manifest["arrays"]["step"] != describe_array(np.asarray(step, np.int32)):
        raise CheckpointError(f"the checkpoint of step {step} holds the state of another")
    described = {
        name: jax.ShapeDtypeStruct(tuple(what["shape"]), DTYPES[what["dtype"]])
        for name, what in manifest["arrays"].items()
    }
    check_arrays(nested(described), model, GROUPS, cast=cast)


def model_dtypes(model: TransformerLMConfig) -> dict[str, np.dtype]:
    """The dtypes that training keeps a model's arrays in, by ``group/path``."""
    _, shapes = abstract(lambda: TransformerLM(model, rngs=nnx.Rngs(0)))
    return {f"{group}/{name}": np.dtype(x.dtype) for group in GROUPS for name, x in shapes.items()}


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _kind(x: Any) -> str:
    return f"{np.dtype(x.dtype).name} {tuple(x.shape)}"
