"""Converts AdamW's state between PyTorch and JAX: moments, step count, which parameters decay.

torch keeps ``exp_avg``, ``exp_avg_sq`` and ``step`` by a parameter's place in its groups; optax
keeps ``mu``, ``nu`` and ``count`` by name. A moment is laid out as its parameter is, so the links
of the model's port carry the moments too. The learning rate is no state in jaxformer: it is a
function of the count (``optimizers.learning_rate``), so carrying the count carries the schedule's
position.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.errors import CheckpointError, UsageError
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.matching import unwrap
from jaxformer.porting.mapping.plans import Plan
from jaxformer.porting.mapping.transfer import export_tensors, import_tensors

MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
# Variants of Adam that compute something else.
UNSUPPORTED = ("amsgrad", "maximize")
Tensors = Mapping[str, StoredTensor]


@dataclasses.dataclass(frozen=True)
class OptimizerState:
    """AdamW's state after some steps, with jaxformer's names.

    Attributes:
        mu: decayed means of the gradients, by parameter.
        nu: decayed means of their squares, by parameter.
        count: the number of steps.
        settings: ``learning_rate`` (of the last step), ``beta1``, ``beta2``, ``eps`` and
            ``weight_decay``, as far as they are known.
    """

    mu: Mapping[str, StoredTensor]
    nu: Mapping[str, StoredTensor]
    count: int
    settings: Mapping[str, float] = dataclasses.field(default_factory=dict)


def read_optimizer(state: Mapping[str, Any], plan: Plan) -> OptimizerState:
    """Imports a ``torch.optim.AdamW`` state dict.

    Args:
        state: as ``optimizer.state_dict()`` gives it, or keyed by names as
            ``torch.distributed.checkpoint.state_dict`` does; arrays are stored tensors or torch's.
        plan: the import of the model, from a state dict in the order of its modules.

    Raises:
        CheckpointError: moments are missing, unexpected or of another shape, or the step counts
            differ; all are listed.
        UsageError: it is another optimizer, or other parameters decay than in jaxformer.
    """
    groups = state.get("param_groups")
    if not isinstance(groups, list | tuple) or not isinstance(state.get("state"), Mapping):
        raise UsageError("not a torch optimizer's state dict: it has no state or no param_groups")
    for group in groups:
        odd = [f"{name}={group[name]}" for name in UNSUPPORTED if group.get(name)]
        if group.get("decoupled_weight_decay") is False or "betas" not in group:
            odd.append("not AdamW" if "betas" not in group else "Adam with L2 regularisation")
        if odd:
            raise UsageError(
                f"unsupported: the optimizer must be plain AdamW: got {', '.join(odd)}"
            )
    shapes = _shapes(plan)
    named = [name for name in dict.fromkeys(_canonical(plan, plan.order)) if name in shapes]
    names = _names_of(groups, named, shapes)
    entries = {names.get(key, str(key)): entry for key, entry in state["state"].items()}
    problems = [f"unexpected state of {name}" for name in entries if name not in shapes]
    if not entries:
        return _before_the_first_step(plan, _settings(groups, names, shapes))
    problems += [f"no state of {name}" for name in shapes if name not in entries]
    counts = {_number(entry.get("step")) for entry in entries.values()}
    if len(counts) > 1:
        problems.append(f"its parameters made different numbers of steps: {sorted(counts)}")
    moments: dict[str, dict[str, StoredTensor]] = {}
    for target, source in MOMENTS.items():
        found = {n: _stored(e[source]) for n, e in entries.items() if n in shapes and source in e}
        problems += [f"no {source} of {n}" for n in entries if n in shapes and n not in found]
        problems += [
            f"{source} of {name} has shape {tensor.shape}, not {shapes[name]}"
            for name, tensor in found.items()
            if tensor.shape != shapes[name]
        ]
        moments[target] = found
    if problems:
        raise CheckpointError(f"the optimizer does not fit its model: {'; '.join(problems)}")
    return OptimizerState(
        import_tensors(plan.links, moments["mu"]),
        import_tensors(plan.links, moments["nu"]),
        int(counts.pop()),
        _settings(groups, names, shapes),
    )


def write_optimizer(
    optimizer: OptimizerState, plan: Plan, order: Sequence[str] | None = None
) -> dict[str, Any]:
    """Exports the state as ``torch.optim.AdamW.load_state_dict`` takes it.

    Two groups, as ``torch_ref.optimizers.make_optimizer`` and nanoGPT make them: parameters of two
    or more dimensions, which decay, then the others; each in the order of the model's parameters.
    ``param_names`` lists the parameters of each.

    Args:
        optimizer: the state.
        plan: the export of the model.
        order: the source arrays in the order of ``named_parameters()``; default that of the plan.
    """
    shapes = _shapes(plan)
    names = [name for name in (order or plan.tensors) if name in shapes]
    moments = {
        source: export_tensors(plan.links, getattr(optimizer, target))
        for target, source in MOMENTS.items()
    }
    state: dict[int, dict[str, Any]] = {}
    groups = []
    for decays in (True, False):
        members = [name for name in names if (len(shapes[name]) >= 2) is decays]
        if not members:
            continue
        start = len(state)
        for place, name in enumerate(members, start):
            state[place] = {
                "step": StoredTensor.of(np.array(optimizer.count, np.float32)),
                **{source: tensors[name] for source, tensors in moments.items()},
            }
        groups.append(
            {
                **_group_settings(optimizer.settings, decays=decays),
                "params": list(range(start, len(state))),
                "param_names": members,
            }
        )
    return {"state": state, "param_groups": groups}


def _before_the_first_step(plan: Plan, settings: Mapping[str, float]) -> OptimizerState:
    def zeros(shape: tuple[int, ...], dtype: np.dtype) -> StoredTensor:
        return StoredTensor(shape, dtype, lambda: np.zeros(shape, dtype))

    empty = {name: zeros(tensor.shape, tensor.dtype) for name, tensor in plan.tensors.items()}
    return OptimizerState(empty, dict(empty), 0, settings)


def _shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {
        name: shape
        for link in plan.links
        for name, shape in zip(link.source, link.source_shapes, strict=True)
    }


def _canonical(plan: Plan, order: Sequence[str]) -> list[str]:
    """Returns the names with every tied array under its first name."""
    aliases = plan.module_mapping.aliases
    linked = {name for link in plan.links for name in link.source}
    return [name if name in linked else aliases.get(name, name) for name in order]


def _names_of(
    groups: Sequence[Mapping[str, Any]], named: Sequence[str], shapes: Mapping[str, Any]
) -> dict[Any, str]:
    """Returns the parameter that each entry of the groups is.

    Raises:
        CheckpointError: the groups have another number of parameters than the model.
    """
    members = [list(group["params"]) for group in groups]
    flat = [key for group in members for key in group]
    if flat and all(isinstance(key, str) for key in flat):
        return dict(zip(flat, unwrap(dict.fromkeys(flat)), strict=True))
    given = list(unwrap({n: n for group in groups for n in group.get("param_names", ())}))
    if len(given) == len(flat) and set(given) == set(named):
        return dict(zip(flat, given, strict=True))
    if len(flat) != len(named):
        raise CheckpointError(
            f"the optimizer holds {len(flat)} parameters and the model {len(named)}"
        )
    if len(members) > 1:
        # Parameters that decay come first, as in nanoGPT and torch_ref.
        named = sorted(named, key=lambda name: len(shapes[name]) < 2)
    return dict(zip(flat, named, strict=True))


def _settings(
    groups: Sequence[Mapping[str, Any]], names: Mapping[Any, str], shapes: Mapping[str, Any]
) -> dict[str, float]:
    """Returns the settings of all groups.

    Raises:
        UsageError: they differ, or other parameters decay than in jaxformer.
    """
    values: dict[str, set[float]] = {}
    for group in groups:
        beta1, beta2 = group["betas"]
        found = {"learning_rate": group["lr"], "beta1": beta1, "beta2": beta2, "eps": group["eps"]}
        for name, value in found.items():
            values.setdefault(name, set()).add(_number(value))
    several = [f"{name} {sorted(v)}" for name, v in values.items() if len(v) > 1]
    if several:
        raise UsageError(
            f"unsupported: its groups differ in {', '.join(several)}, not in decay only"
        )
    decay = {
        names[key]: _number(group.get("weight_decay", 0.0))
        for group in groups
        for key in group["params"]
        if key in names
    }
    rates = {rate for name, rate in decay.items() if len(shapes.get(name, ())) >= 2}
    odd = [n for n, rate in decay.items() if len(shapes.get(n, ())) < 2 and rate]
    if len(rates) > 1:
        odd += [n for n, rate in decay.items() if len(shapes.get(n, ())) >= 2 and not rate]
    if len(rates - {0.0}) > 1 or odd:
        raise UsageError(
            "unsupported: parameters of two or more dimensions must decay at one rate, and no "
            f"others: got {', '.join(odd) or sorted(rates)}"
        )
    return {name: v.pop() for name, v in values.items()} | {"weight_decay": max(rates, default=0.0)}


def _group_settings(settings: Mapping[str, float], *, decays: bool) -> dict[str, Any]:
    """Returns all settings of a group of ``torch.optim.AdamW``, torch's defaults included."""
    return {
        "lr": settings.get("learning_rate", 1e-3),
        "betas": (settings.get("beta1", 0.9), settings.get("beta2", 0.999)),
        "eps": settings.get("eps", 1e-8),
        "weight_decay": settings.get("weight_decay", 0.01) if decays else 0.0,
        "amsgrad": False,
        "foreach": None,
        "maximize": False,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    }


def _stored(value: Any) -> StoredTensor:
    from jaxformer.porting.formats.arrays import to_stored_tensors

    return to_stored_tensors({"": value})[""]


def _number(value: Any) -> float:
    """Returns a plain number from a number or an array of one.

    Raises:
        CheckpointError: it is neither.
    """
    if isinstance(value, StoredTensor) and math.prod(value.shape) == 1:
        value = value.read().reshape(())
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"an optimizer setting is no number: {value!r}") from error
