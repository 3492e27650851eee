"""The groups of PyTorch's optimizers: which optimizer has them, and its settings, both ways."""

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxformer.config_optimizers import OPTIMIZERS
from jaxformer.errors import CheckpointError, UsageError
from jaxformer.porting.formats.tensors import StoredTensor

# Variants of Adam and SGD that compute something else: where it is set, or where it is not.
UNSUPPORTED = ("amsgrad", "maximize", "nesterov", "dampening")
REQUIRED = ("bias_correction", "correct_bias")
# What is read, what changes nothing, and what PyTorch's schedulers keep in groups.
KNOWN = {
    *UNSUPPORTED, *REQUIRED, "params", "param_names", "lr", "betas", "eps", "momentum", "hidden",
    "weight_decay", "step", "decoupled_weight_decay", "foreach", "fused", "capturable",
    "differentiable", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum",
    "name", "group_name",
}  # fmt: skip
# What transformers' Trainer does not decay, by its name in small letters; nor what is in a
# LayerNorm, whatever that is called (Trainer.get_decay_parameter_names).
WITHOUT_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
Shapes = Mapping[str, Sequence[int]]
# Returns the group of a parameter: whether Muon does not update it, and whether it does not decay.
# The groups of an optimizer are in the order of these pairs.
GroupOf = Callable[[str], tuple[bool, bool]]


def groups_by_shape(shapes: Shapes, hidden: Collection[str] = ()) -> GroupOf:
    """Returns the groups of nanoGPT and torch_ref: what has two or more dimensions decays.

    Args:
        shapes: of the parameters.
        hidden: those that Muon updates.
    """
    return lambda name: (name not in hidden, len(shapes[name]) < 2)


def groups_of_trainer(shapes: Shapes) -> GroupOf:
    """Returns the groups of transformers' Trainer, which go by names."""

    def group_of(name: str) -> tuple[bool, bool]:
        # Of one dimension the weights of norms alone are called so.
        is_norm = len(shapes[name]) < 2 and name.rpartition(".")[2] == "weight"
        return True, is_norm or WITHOUT_DECAY.search(name.lower()) is not None

    return group_of


def in_groups(names: Sequence[str], sizes: Sequence[int], rules: Sequence[GroupOf]) -> list[str]:
    """Returns parameters in the order of an optimizer's groups, which do not name them.

    Args:
        names: in the order of the modules.
        sizes: of the groups.
        rules: how they may have been made; the first that gives such sizes is taken.

    Raises:
        CheckpointError: none does.
    """
    wanted = [size for size in sizes if size]
    known = []
    for rule in rules:
        found = Counter(map(rule, names))
        known.append([found[group] for group in sorted(found)])
        if known[-1] == wanted:
            return sorted(names, key=rule)
    raise CheckpointError(
        f"the optimizer's groups have {' and '.join(map(str, wanted))} parameters, and not "
        + ", nor ".join(" and ".join(map(str, sizes)) for sizes in known)
        + ": let them name their parameters in param_names"
    )


def find_kind(groups: Sequence[Mapping[str, Any]]) -> str:
    """Returns which optimizer has such groups, by its name in ``OPTIMIZERS``.

    Raises:
        UsageError: none of jaxformer's.
    """
    kind = "adamw"
    for group in groups:
        odd = [f"{name}={group[name]}" for name in UNSUPPORTED if group.get(name)]
        odd += [f"{name}={group[name]}" for name in REQUIRED if group.get(name) in (False, 0)]
        if "hidden" in group:
            kind = "muon"
        elif "betas" in group:
            kind = "adamw" if "eps" in group else "lion"
        elif "momentum" in group and "dampening" in group:
            kind = "sgd"
        else:
            odd.append("not AdamW, SGD, nor Lion or Muon as torch_ref has them")
        if group.get("decoupled_weight_decay") is False and group.get("weight_decay"):
            odd.append("Adam with L2 regularisation")
        if "momentum_decay" in group:
            odd.append("NAdam")
        elif "decoupled_weight_decay" in group and "amsgrad" not in group:
            odd.append("RAdam")
        if odd:
            raise UsageError(
                "unsupported: the optimizer must be plain AdamW, or one of the others that "
                f"jaxformer has: got {', '.join(odd)}"
            )
    return kind


def unknown_settings(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of what is set in groups and nobody knows: it may change the steps."""

    def is_set(value: Any) -> bool:
        return bool(value) if value is None or isinstance(value, bool | int | float | str) else True

    found = {str(name) for group in groups for name, value in group.items() if is_set(value)}
    return sorted(found - KNOWN)


def read_groups(
    groups: Sequence[Mapping[str, Any]], names: Mapping[Any, str], shapes: Mapping[str, Any]
) -> dict[str, float]:
    """Returns the settings of all groups.

    Raises:
        UsageError: they differ, or other parameters decay than in jaxformer.
    """
    values: dict[str, set[float]] = {}
    for group in groups:
        found = {"learning_rate": group["lr"]}
        if "betas" in group:
            found["beta1"], found["beta2"] = group["betas"]
        found |= {name: group[name] for name in ("eps", "momentum") if name in group}
        for name, value in found.items():
            values.setdefault(name, set()).add(as_number(value))
    several = [f"{name} {sorted(v)}" for name, v in values.items() if len(v) > 1]
    if several:
        raise UsageError(
            f"unsupported: its groups differ in {', '.join(several)}, not in decay only"
        )
    decay = {
        names[key]: as_number(group.get("weight_decay", 0.0))
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


def write_group(kind: str, settings: Mapping[str, float], *, decays: bool) -> dict[str, Any]:
    """Returns all settings of a group of the optimizer, torch's defaults included."""
    always = {
        "lr": settings.get("learning_rate", 1e-3),
        "weight_decay": settings.get("weight_decay", 0.01) if decays else 0.0,
    }
    betas = (settings.get("beta1", 0.9), settings.get("beta2", 0.999))
    if kind == "lion":
        return {**always, "betas": betas}
    momentum = settings.get("momentum", OPTIMIZERS[kind].momentum)
    if kind == "sgd":
        return {
            **always,
            "momentum": momentum,
            "dampening": 0,
            "nesterov": False,
            "maximize": False,
            "foreach": None,
            "differentiable": False,
            "fused": None,
        }
    eps = settings.get("eps", 1e-8)
    if kind == "muon":
        return {**always, "betas": betas, "momentum": momentum, "eps": eps}
    return {
        **always,
        "betas": betas,
        "eps": eps,
        "amsgrad": False,
        "foreach": None,
        "maximize": False,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    }


def as_number(value: Any) -> float:
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
