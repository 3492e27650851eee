"""A training state as a checkpoint holds it, and back."""

from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.errors import CheckpointError
from jaxformer.optimizers import make_optimizer
from jaxformer.parameters import abstract
from jaxformer.train_step import Definition, TrainState
from jaxformer.training.checkpoints import GROUPS, Arrays
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
        CheckpointError: the checkpoint's names or shapes are not those of the model; all of them
            are listed.
    """
    definition = check_arrays(arrays, model, GROUPS)
    step: Any = arrays["step"]
    step = step if isinstance(step, jax.Array) else np.asarray(step, np.int32)
    # Every number of the optimizer's state is in the checkpoint: its shape is all that is missing.
    empty = jax.eval_shape(make_optimizer(optimizer).init, arrays["parameters"])
    optimizer_state = optax.tree_utils.tree_set(empty, mu=arrays["mu"], nu=arrays["nu"], count=step)
    return definition, TrainState(arrays["parameters"], optimizer_state, step)


def check_arrays(
    arrays: Arrays, model: TransformerLMConfig, groups: tuple[str, ...] = ("parameters",)
) -> Definition:
    """The definition of the model that the arrays are of.

    Raises:
        CheckpointError: their names or shapes are not the model's; all of them are listed.
    """
    definition, expected = abstract(lambda: TransformerLM(model, rngs=nnx.Rngs(0)))
    problems = []
    for group in groups:
        found = arrays.get(group, {})
        problems += [f"missing {group}/{name}" for name in sorted(expected.keys() - found.keys())]
        problems += [
            f"unexpected {group}/{name}" for name in sorted(found.keys() - expected.keys())
        ]
        problems += [
            f"{group}/{name} is {found[name].shape}, not {expected[name].shape}"
            for name in sorted(expected.keys() & found.keys())
            if found[name].shape != expected[name].shape
        ]
    if problems:
        raise CheckpointError(f"the checkpoint does not fit its model: {'; '.join(problems)}")
    return definition
