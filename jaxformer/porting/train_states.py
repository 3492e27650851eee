"""Training that starts from a checkpoint, or changes between PyTorch and JAX in mid-run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from jaxformer.config import OptimizerConfig
from jaxformer.errors import UsageError
from jaxformer.optimizers import make_optimizer
from jaxformer.parameters import Parameters, get_parameters
from jaxformer.porting.api import build, export_plan, import_plan
from jaxformer.porting.checkpoint import open_checkpoint, plan_language_model
from jaxformer.porting.formats.arrays import to_torch_like
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.optimizer_state import MOMENTS, OptimizerState, read_optimizer
from jaxformer.porting.mapping.transfer import export_tensors
from jaxformer.train_step import TrainState
from jaxformer.training.experiment import WarmStart


def read_warm_start(
    path: Path, *, fresh: bool, ignore: Sequence[str] = (), meta: Path | None = None
) -> WarmStart:
    """Reads the language model of a checkpoint, for a training run that starts from it.

    Args:
        path: a checkpoint of any format.
        fresh: whether to leave out the state of its optimizer.
        ignore: see ``open_checkpoint``.
        meta: see ``open_checkpoint``.

    Raises:
        UsageError: it is no language model, or its tokenizer is unknown.
        CheckpointError: it is missing, damaged or incomplete.
    """
    checkpoint = open_checkpoint(path, ignore=ignore, meta=meta)
    plan = plan_language_model(checkpoint)
    model = plan.module.config
    if not model.causal or model.head.head != "linear":
        raise UsageError(f"{path} holds a model that does not predict the next token")
    tokenizer = checkpoint.tokenizer(model.vocab_size)
    if tokenizer is None:
        raise UsageError(
            f"{path} does not say what its tokens are: name its meta.pkl or tokenizer.json with "
            "--meta"
        )
    arrays: dict[str, Any] = {"parameters": {n: t.read() for n, t in plan.tensors.items()}}
    optimizer = None if fresh else checkpoint.optimizer_state(plan)
    if optimizer is not None:
        arrays["mu"] = {name: tensor.read() for name, tensor in optimizer.mu.items()}
        arrays["nu"] = {name: tensor.read() for name, tensor in optimizer.nu.items()}
        arrays["step"] = optimizer.count
    files = checkpoint.files_beside()
    if checkpoint.vocabulary is not None:
        # It is written with every checkpoint of the run.
        files.pop("tokenizer.json", None)
    about = {"origin": checkpoint.origin_of(plan), "token_ids": checkpoint.token_ids}
    return WarmStart(str(path), model, arrays, tokenizer, files, about)


def train_state_from_torch(
    model: Any,
    optimizer: Any,
    config: OptimizerConfig,
    *,
    dialect: str | None = None,
) -> tuple[Any, TrainState]:
    """Returns what ``train_step`` needs to continue a PyTorch run.

    Args:
        model: the ``torch.nn.Module``.
        optimizer: its ``torch.optim.AdamW``, or the optimizer's state dict.
        config: settings of the optimizer. The schedule continues at the step that the optimizer has
            counted, so give the settings of the whole run, not those of the rest.
        dialect: see ``from_torch``.

    Returns:
        The NNX module, and the state with its parameters and moments.

    Raises:
        UsageError: the optimizer is not AdamW, or its weight decay is on other parameters than
            jaxformer's.
        CheckpointError: weights or moments do not fit; all problems are listed.
    """
    plan = import_plan(model, dialect)
    state = optimizer if isinstance(optimizer, Mapping) else optimizer.state_dict()
    target = read_optimizer(state, plan)
    module = build(plan, training=model.training)
    return module, make_train_state(get_parameters(module), target, config)


def make_train_state(
    parameters: Parameters, optimizer: OptimizerState, config: OptimizerConfig
) -> TrainState:
    """Returns a ``TrainState`` of parameters and an optimizer's state; reads its moments."""
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
    """Returns what a PyTorch run needs to continue a run in JAX.

    The parameter groups keep the settings that they have in ``optimizer``, its learning rate too.

    Args:
        module: an NNX module, from ``train_state_from_torch`` or built by hand.
        state: its parameters, moments and step.
        model: the ``torch.nn.Module`` that continues; it is not changed.
        optimizer: its ``torch.optim.AdamW``; it is not changed.
        dialect: see ``to_torch``.

    Returns:
        Weights by the names of ``model`` (numpy arrays, for ``torch.as_tensor``), and a state dict
        for ``optimizer.load_state_dict``.

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
