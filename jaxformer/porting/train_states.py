"""A training run in the middle of it, between PyTorch and JAX, in memory."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from jaxformer.config import OptimizerConfig
from jaxformer.optimizers import make_optimizer
from jaxformer.parameters import Parameters, get_parameters
from jaxformer.porting.api import build, export_plan, import_plan
from jaxformer.porting.formats.arrays import to_torch_like
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.optimizer_state import MOMENTS, OptimizerState, read_optimizer
from jaxformer.porting.mapping.transfer import export_tensors
from jaxformer.train_step import TrainState


def train_state_from_torch(
    model: Any,
    optimizer: Any,
    config: OptimizerConfig,
    *,
    dialect: str | None = None,
) -> tuple[Any, TrainState]:
    """What ``train_step`` needs to go on where a PyTorch run stands.

    Args:
        model: the ``torch.nn.Module``.
        optimizer: its ``torch.optim.AdamW``, or that one's state dict.
        config: of the optimizer from here on. The schedule goes on at the step that the optimizer
            counts, so give the settings of the whole run, not those of the rest.
        dialect: see ``from_torch``.

    Returns:
        The module, and the state.

    Raises:
        UsageError: the optimizer is not AdamW, or other parameters decay than do here.
        CheckpointError: weights or moments do not fit; all that does not is listed.
    """
    plan = import_plan(model, dialect)
    state = optimizer if isinstance(optimizer, Mapping) else optimizer.state_dict()
    target = read_optimizer(state, plan)
    module = build(plan, training=model.training)
    return module, make_train_state(get_parameters(module), target, config)


def make_train_state(
    parameters: Parameters, optimizer: OptimizerState, config: OptimizerConfig
) -> TrainState:
    """A ``TrainState`` around parameters and an optimizer's state, its moments read now."""
    empty = make_optimizer(config).init(parameters)
    step = jnp.int32(optimizer.count)
    moments = {
        name: {key: jnp.asarray(tensor.read()) for key, tensor in getattr(optimizer, name).items()}
        for name in MOMENTS
    }
    return TrainState(parameters, optax.tree_utils.tree_set(empty, count=step, **moments), step)


def train_state_to_torch(
    module: Any, state: TrainState, model: Any, optimizer: Any, *, dialect: str | None = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """What a PyTorch run needs to go on where ours stands.

    The groups keep the settings they have in ``optimizer``: rates are their owner's to schedule.

    Args:
        module: ours, as ``train_state_from_torch`` gave it or built by hand.
        state: where we stand.
        model: the ``torch.nn.Module`` that goes on.
        optimizer: its ``torch.optim.AdamW``; neither is changed.
        dialect: see ``to_torch``.

    Returns:
        Weights by their names (numpy arrays; ``torch.as_tensor`` each), and a state dict for
        ``optimizer.load_state_dict``.

    Raises:
        UsageError: the dialect cannot hold the module.
        KeyError: the optimizer holds a parameter that is none of the model's.
    """
    plan = export_plan(module, dialect, state.parameters)
    moments = {
        source: export_tensors(
            plan.links,
            {
                name: StoredTensor.of(np.asarray(array))
                for name, array in optax.tree_utils.tree_get(state.optimizer_state, target).items()
            },
        )
        for target, source in MOMENTS.items()
    }
    linked = {name for link in plan.links for name in link.source}
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        carrier = name if name in linked else plan.module_mapping.aliases.get(name, name)
        names.setdefault(id(parameter), carrier)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    entries = {
        place: {
            "step": to_torch_like(parameter, np.array(int(state.step), np.float32)),
            **{
                source: to_torch_like(parameter, tensors[names[id(parameter)]].read())
                for source, tensors in moments.items()
            },
        }
        for place, parameter in enumerate(parameters)
    }
    groups = optimizer.state_dict()["param_groups"]
    return (
        {name: tensor.read() for name, tensor in plan.tensors.items()},
        {"state": entries, "param_groups": groups},
    )
