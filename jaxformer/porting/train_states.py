"""Training that starts from a checkpoint, or changes between PyTorch and JAX in mid-run."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import EncoderDecoderConfig, OptimizerConfig, TransformerLMConfig
from jaxformer.config_optimizers import OPTIMIZERS
from jaxformer.errors import CheckpointError, Setting, UsageError
from jaxformer.optimizers import learning_rate
from jaxformer.parameters import Parameters, get_parameters
from jaxformer.porting.api import build, export_plan, import_plan
from jaxformer.porting.arguments import wrong_kind
from jaxformer.porting.checkpoint import open_checkpoint
from jaxformer.porting.formats.arrays import to_torch_like
from jaxformer.porting.formats.detection import detect
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.generation_settings import describe_unfollowed
from jaxformer.porting.mapping.casts import check_computes
from jaxformer.porting.mapping.optimizer_state import (
    OptimizerState,
    UnknownStepsError,
    export_moments,
    find_kind,
    read_optimizer,
)
from jaxformer.porting.mapping.plans import Plan
from jaxformer.porting.mapping.wrapped_names import unwrap
from jaxformer.porting.source_checks import check_patterns
from jaxformer.train_step import TrainState
from jaxformer.training.experiment import WarmStart
from jaxformer.training.parallel.devices import reserve_cpu_devices
from jaxformer.training.resume_checks import other_settings
from jaxformer.training.state_arrays import fill_state, moments_of


def read_warm_start(
    path: Path,
    *,
    fresh: bool,
    ignore: Sequence[str] = (),
    meta: Path | None = None,
    with_arrays: bool = True,
) -> WarmStart:
    """Reads the whole model of a checkpoint, for a training run that starts from it.

    Args:
        path: a checkpoint of any format.
        fresh: whether to leave out the state of its optimizer.
        ignore: see ``open_checkpoint``.
        meta: see ``open_checkpoint``.
        with_arrays: whether to read the weights; without them it is a start for a plan alone.

    Warns:
        UserWarning: damaged steps were skipped, an optimizer's state is not read, or a setting of
            generation is not followed.

    Raises:
        UsageError: it is neither a language model nor an encoder and decoder of tokens, or its
            tokenizer is unknown.
        CheckpointError: it is missing, damaged or incomplete.
    """
    if detect(path) in ("run", "checkpoints", "checkpoint"):
        # To read one starts JAX, and it has the settings that say how many devices training wants.
        reserve_cpu_devices()
    checkpoint = open_checkpoint(path, ignore=ignore, meta=meta)
    check_patterns(checkpoint)
    # A plan writes no text.
    unfollowed = describe_unfollowed(checkpoint) if with_arrays else []
    for warning in (*checkpoint.raw.warnings, *unfollowed):
        warnings.warn(warning, stacklevel=2)
    if checkpoint.raw.unread_optimizer and not fresh:
        unread = checkpoint.raw.unread_optimizer
        warnings.warn(f"{path}: the optimizer's state is left out: {unread}", stacklevel=2)
    plan = checkpoint.plan()
    model: Any = getattr(plan.module, "config", None)
    reads_source = isinstance(model, EncoderDecoderConfig)
    reason = None
    if reads_source and model.reads_features:
        reason = "reads features and no tokens"
    elif not isinstance(model, TransformerLMConfig | EncoderDecoderConfig):
        reason = "is no language model"
    elif not model.causal or model.head.head != "linear":
        reason = "does not predict the next token"
    if reason is not None:
        raise UsageError(
            f"{path} holds a {plan.origin.kind}, which {reason}: train it in Python, with "
            "jaxformer.load and a training step of your own"
        )
    size = model.target_vocab_size if reads_source else model.vocab_size
    tokenizer = checkpoint.tokenizer(size)
    if tokenizer is None:
        raise UsageError(
            f"{path} does not say what its tokens are: name its meta.pkl or tokenizer.json with ",
            Setting("meta"),
        )
    check_computes(plan.tensors)
    tensors = plan.tensors.items() if with_arrays else ()
    arrays: dict[str, Any] = {"parameters": {name: tensor.read() for name, tensor in tensors}}
    try:
        optimizer = None if fresh else checkpoint.optimizer_state(plan)
    except CheckpointError as error:
        # What leaves the optimizer out of a port has another name for a run.
        own = {Setting("weights_only"): Setting("fresh_optimizer")}
        raise CheckpointError(*(own.get(part, part) for part in error.args)) from error
    for line in () if optimizer is None else _note(optimizer):
        warnings.warn(f"{path}: {line}", stacklevel=2)
    if optimizer is not None and with_arrays:
        for group, kept in optimizer.moments.items():
            arrays[group] = {name: tensor.read() for name, tensor in kept.items()}
    if optimizer is not None:
        arrays["step"] = optimizer.count
    files = checkpoint.files_beside()
    if checkpoint.vocabulary is not None:
        # It is written with every checkpoint of the run.
        files.pop("tokenizer.json", None)
    about = {"origin": checkpoint.origin_of(plan), "token_ids": checkpoint.token_ids}
    kind = None if optimizer is None else optimizer.kind
    return WarmStart(
        str(path),
        model,
        arrays,
        tokenizer,
        files,
        about,
        kind,
        checkpoint.first_ids(),
        checkpoint.last_ids(),
        checkpoint.target_ids()[0] if reads_source else (),
        {} if optimizer is None else optimizer.settings,
    )


def train_state_from_torch(
    model: Any,
    optimizer: Any,
    config: OptimizerConfig,
    *,
    dialect: str | None = None,
    steps: int | None = None,
) -> tuple[Any, TrainState]:
    """Returns what ``train_step`` needs to continue a PyTorch run.

    Args:
        model: the ``torch.nn.Module``.
        optimizer: the optimizer, such as ``torch.optim.AdamW``, or its state dict, which counts
            parameters in the order of ``model.named_parameters()`` unless it names them.
        config: settings of the optimizer. The schedule continues at the step that the optimizer has
            counted, so give the settings of the whole run, not those of the rest.
        dialect: see ``from_torch``.
        steps: how many the optimizer has made, if it does not count them: SGD does not.

    Returns:
        The NNX module, and the state with its parameters and moments.

    Warns:
        UserWarning: the optimizer has other settings than ``config``; all such are named. Its
            learning rate is compared with that of the schedule, once it has made a step.

    Raises:
        UsageError: the optimizer is not that of ``config``, holds a parameter that is none of the
            model's, its weight decay is on other parameters than jaxformer's, or an argument is of
            another kind.
        CheckpointError: weights or moments do not fit, all problems are listed; or the state dict
            is not as PyTorch has it.
    """
    _check_torch_run(model, optimizer, allow_state=True)
    if not isinstance(config, OptimizerConfig):
        raise wrong_kind("config", "an OptimizerConfig", config)
    plan = import_plan(model, dialect)
    state = optimizer if isinstance(optimizer, Mapping) else _named_state(model, optimizer)
    try:
        target = read_optimizer(state, plan, steps=steps)
    except UnknownStepsError as error:
        raise UnknownStepsError(f"{error}: give them with ", Setting("steps")) from None
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the optimizer's state is not as PyTorch has it ({error}): give the optimizer itself"
        ) from error
    module = build(plan, training=model.training)
    return module, make_train_state(get_parameters(module), target, config)


def _check_torch_run(model: Any, optimizer: Any, *, allow_state: bool = False) -> None:
    """Checks that a model and an optimizer are those of PyTorch.

    Raises:
        UsageError: one is not.
    """
    if not hasattr(model, "named_parameters") or isinstance(model, type):
        raise wrong_kind("model", "a torch.nn.Module", model)
    is_state = allow_state and isinstance(optimizer, Mapping)
    if not is_state and not hasattr(optimizer, "param_groups"):
        wanted = "an optimizer of PyTorch" + (" or its state dict" if allow_state else "")
        raise wrong_kind("optimizer", wanted, optimizer)


def _named_state(model: Any, optimizer: Any) -> dict[str, Any]:
    """Returns the state dict of an optimizer, whose groups name their parameters.

    Raises:
        UsageError: a parameter is none of the model's.
    """
    names = {id(p): name for name, p in reversed([*model.named_parameters()])}
    state = optimizer.state_dict()
    groups = []
    for own, group in zip(optimizer.param_groups, state["param_groups"], strict=True):
        missing = [tuple(p.shape) for p in own["params"] if id(p) not in names]
        if missing:
            shapes = ", ".join(map(str, missing))
            raise UsageError(
                f"the optimizer holds parameters that are none of the model's: {shapes}"
            )
        groups.append({**group, "param_names": [names[id(p)] for p in own["params"]]})
    return {**state, "param_groups": groups}


def make_train_state(
    parameters: Parameters, optimizer: OptimizerState, config: OptimizerConfig
) -> TrainState:
    """Returns a ``TrainState`` of parameters and an optimizer's state; reads its moments.

    Raises:
        UsageError: the settings name another optimizer.
    """
    if optimizer.kind != config.optimizer:
        raise UsageError(
            f"the state is that of {OPTIMIZERS[optimizer.kind].title}, the settings are those of "
            f"{config.kind.title}"
        )
    others = (*other_settings(optimizer.settings, config), *_other_rate(optimizer, config))
    for line in (*others, *_note(optimizer)):
        warnings.warn(line, stacklevel=3)
    moments = {
        group: {
            name: jax.device_put(tensor.read(), may_alias=False) for name, tensor in kept.items()
        }
        for group, kept in optimizer.moments.items()
    }
    step = jnp.int32(optimizer.count)
    return fill_state({"parameters": parameters, **moments, "step": step}, config)


def _note(optimizer: OptimizerState) -> Iterator[str]:
    """Yields a line if the optimizer has settings that nobody knows."""
    if optimizer.note:
        yield f"the optimizer's state is read, but {optimizer.note}"


def _other_rate(optimizer: OptimizerState, config: OptimizerConfig) -> Iterator[str]:
    """Yields a line if the rate of the last step, or of the next one, is not the schedule's."""
    had = optimizer.settings.get("learning_rate")
    if had is None or optimizer.count == 0:
        return
    # Some loops set the rate before a step; PyTorch's schedulers set the next one after it.
    last, following = (
        float(learning_rate(config, step)) for step in (optimizer.count - 1, optimizer.count)
    )
    least = 1e-6 * config.learning_rate
    if not any(math.isclose(had, rate, rel_tol=1e-5, abs_tol=least) for rate in (last, following)):
        yield (
            f"the optimizer had learning_rate {had:g} after {optimizer.count} steps, this run has "
            f"{following:g}"
        )


def train_state_to_torch(
    module: Any, state: TrainState, model: Any, optimizer: Any, *, dialect: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what a PyTorch run needs to continue a run in JAX.

    The parameter groups keep the settings that they have in ``optimizer``, its learning rate too.

    Args:
        module: an NNX module, from ``train_state_from_torch`` or built by hand.
        state: its parameters, moments and step.
        model: the ``torch.nn.Module`` that continues; it is not changed.
        optimizer: its optimizer; it is not changed.
        dialect: see ``to_torch``.

    Returns:
        Tensors for ``model.load_state_dict``, by the names of ``model``, wrappers included, and a
        state dict for ``optimizer.load_state_dict``.

    Raises:
        UsageError: the dialect cannot hold the module, or an argument is of another kind.
        KeyError: the optimizer holds a parameter that is none of the model's.
    """
    _check_torch_run(model, optimizer)
    if not isinstance(state, TrainState):
        raise wrong_kind("state", "a TrainState", state)
    plan = export_plan(module, dialect, state.parameters)
    kind, own_moments = find_kind(optimizer.param_groups), moments_of(state.optimizer_state)
    if own_moments.keys() != OPTIMIZERS[kind].moments.keys():
        raise UsageError(
            f"the optimizer is {OPTIMIZERS[kind].title}, and the state is that of another: it has "
            f"{', '.join(own_moments) or 'no moments'}"
        )
    kept = {
        moment: {name: StoredTensor.of(np.asarray(array)) for name, array in arrays.items()}
        for moment, arrays in own_moments.items()
    }
    moments = export_moments(kept, plan, kind)
    linked = {name for link in plan.links for name in link.source}
    names: dict[int, str] = {}
    for name, parameter in unwrap(dict(model.named_parameters(remove_duplicate=False))).items():
        carrier = name if name in linked else plan.module_mapping.aliases.get(name, name)
        names.setdefault(id(parameter), carrier)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    entries = {
        place: {
            **({} if kind == "sgd" else {"step": _count(parameter, state)}),
            **{
                source: to_torch_like(parameter, tensors[names[id(parameter)]].read())
                for source, tensors in moments.items()
                if names[id(parameter)] in tensors
            },
        }
        for place, parameter in enumerate(parameters)
    }
    groups = optimizer.state_dict()["param_groups"]
    return _weights_of(model, plan), {"state": entries, "param_groups": groups}


def _weights_of(model: Any, plan: Plan) -> dict[str, Any]:
    """Returns the tensors of an export by the names of a module, which may be wrapped."""
    state = unwrap({name: (name, tensor) for name, tensor in model.state_dict().items()})
    first = next(iter(state.values()))[1]
    weights = {}
    for plain, tensor in plan.tensors.items():
        name, like = state.get(plain, (plain, first))
        weights[name] = to_torch_like(like, tensor.read())
    return weights


def _count(parameter: Any, state: TrainState) -> Any:
    """The steps that a state has made, as torch keeps them: each parameter changes its own."""
    return to_torch_like(parameter, np.array(int(state.step), np.float32))
