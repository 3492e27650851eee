"""Takes from the names of arrays what wrappers of a PyTorch module have added to them."""

from collections.abc import Collection, Mapping
from typing import Any

# A module inside a wrapper is its only child, of one of these names. The first is that of data
# parallelism and of averages of weights; others may have it too, so it is taken from the beginning
# of all names alone. torch.compile, FSDP and activation checkpointing have names of their own.
OUTERMOST = "module"
ANYWHERE = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
WRAPPERS = frozenset({OUTERMOST, *ANYWHERE})
# How many models ``torch.optim.swa_utils.AveragedModel`` has averaged.
COUNT_OF_AVERAGES = "n_averaged"
# The attribute that holds the model in a class around it, by custom: a module of Lightning.
MODEL_ATTRIBUTE = "model."


def unwrap(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays by the names that they have without wrappers.

    >>> unwrap({"module.blocks.0._orig_mod.weight": 5, "n_averaged": 3})
    {'blocks.0.weight': 5}
    """
    named = {_without_wrappers(name): value for name, value in tensors.items()}
    if len(named) < len(tensors):
        return dict(tensors)
    averaged = {name: value for name, value in named.items() if name != COUNT_OF_AVERAGES}
    if _all_begin_with(f"{OUTERMOST}.", averaged):
        named = averaged
    while _all_begin_with(f"{OUTERMOST}.", named):
        named = {name.removeprefix(f"{OUTERMOST}."): value for name, value in named.items()}
    return named


def common_attribute(names: Collection[str]) -> str:
    """Returns what all names begin with, up to the first dot; "" if nothing.

    It may be the attribute of a class around the model, and classes of Hugging Face have it too.
    """
    starts = {name.partition(".")[0] for name in names}
    whole = f"{min(starts, default='')}."
    return whole if len(starts) == 1 and all(name.startswith(whole) for name in names) else ""


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in ANYWHERE)


def _all_begin_with(start: str, names: Mapping[str, Any]) -> bool:
    return bool(names) and all(name.startswith(start) for name in names)
