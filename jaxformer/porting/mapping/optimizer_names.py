"""Which parameter of a model each entry of a PyTorch optimizer is.

An optimizer counts its parameters from group to group. Its groups may name them, in
``param_names``, or it is keyed by names, as ``torch.distributed.checkpoint.state_dict`` writes it.
Such names are always used. Without them the parameters are taken in the order of the model.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxformer.errors import CheckpointError
from jaxformer.porting.mapping.matching import names_of_class
from jaxformer.porting.mapping.optimizer_groups import groups_by_shape, groups_of_trainer, in_groups
from jaxformer.porting.mapping.plans import Plan
from jaxformer.porting.mapping.wrapped_names import common_attribute, unwrap

# Names that a message lists.
MOST_LISTED = 5
# PEFT has the name of the adapter in that of its arrays, and leaves it out in its files.
OF_ADAPTER = re.compile(r"(\.lora_[AB])\.[^.]+(\.weight)$")
Groups = Sequence[Mapping[str, Any]]


def name_parameters(
    groups: Groups,
    plan: Plan,
    shapes: Mapping[str, tuple[int, ...]],
    order: Sequence[str],
    hidden: Collection[str] = (),
) -> dict[Any, str]:
    """Returns the parameter that each entry of the groups is.

    Args:
        groups: of the optimizer's state dict.
        plan: the import of the model.
        shapes: of the parameters that the optimizer must hold.
        order: the source arrays in the order of the modules, empty if it is not known.
        hidden: the parameters that Muon updates, where it is Muon.

    Raises:
        CheckpointError: the groups name parameters that the model does not have, or not all of
            their own, or have another number of parameters than the model.
    """
    members = [list(group["params"]) for group in groups]
    keys = [key for group in members for key in group]
    given = keys if keys and all(isinstance(key, str) for key in keys) else _given_names(groups)
    if given:
        found = _as_in_model(given, plan, shapes)
        if lacking := [name for name in shapes if name not in found]:
            raise CheckpointError(_other_number(keys, shapes) + _describe_lacking(lacking))
        return dict(zip(keys, found, strict=True))
    if len(keys) != len(shapes):
        raise CheckpointError(_other_number(keys, shapes))
    named = [name for name in dict.fromkeys(canonical(plan, order)) if name in shapes]
    if len(named) != len(shapes):
        raise CheckpointError(
            "the optimizer does not name its parameters, and their order in the model is not "
            "known: let its groups name them in param_names"
        )
    if len(members) > 1:
        rules = groups_by_shape(shapes, hidden), groups_of_trainer(shapes)
        named = in_groups(named, [len(group) for group in members], rules)
    return dict(zip(keys, named, strict=True))


def canonical(plan: Plan, order: Sequence[str]) -> list[str]:
    """Returns the names with every tied array under its first name."""
    aliases = plan.module_mapping.aliases
    linked = {name for link in plan.links for name in link.source}
    return [name if name in linked else aliases.get(name, name) for name in order]


def _given_names(groups: Groups) -> list[str]:
    """Returns the names that the groups give their parameters; none if no group does.

    Raises:
        CheckpointError: they name some of them alone.
    """
    if not any(group.get("param_names") for group in groups):
        return []
    for number, group in enumerate(groups):
        names = group.get("param_names") or ()
        if len(names) != len(group["params"]):
            raise CheckpointError(
                f"group {number} of the optimizer has {len(group['params'])} parameters and "
                f"{len(names)} param_names: let every group name all of its own, or none"
            )
    return [str(name) for group in groups for name in group.get("param_names") or ()]


def _as_in_model(given: Sequence[str], plan: Plan, shapes: Mapping[str, Any]) -> list[str]:
    """Returns the model's names for those that an optimizer gives.

    What wrappers have added is taken away, as it is from the weights; and what all begin with, up
    to a dot, as long as the model has not all of them.

    Raises:
        CheckpointError: the model lacks some of them, or some are one parameter; all are listed.
    """
    names = list(unwrap({name: name for name in given}))
    if len(names) != len(given):
        raise CheckpointError(f"the optimizer names {_several(given)} more than once")
    names = [OF_ADAPTER.sub(r"\1\2", name) for name in names]
    found = _names_here(names, plan)
    while not set(found) <= shapes.keys() and (attribute := common_attribute(names)):
        names = [name.removeprefix(attribute) for name in names]
        inside = _names_here(names, plan)
        if len(shapes.keys() & inside) >= len(shapes.keys() & found):
            found = inside
    unknown = [name for name, own in zip(given, found, strict=True) if own not in shapes]
    if unknown:
        raise CheckpointError(
            f"the optimizer names parameters that the model does not have: {_listed(unknown)}"
            + _without([name for name in shapes if name not in found])
            + ": correct its param_names, or take the weights alone"
        )
    if len(set(found)) != len(found):
        raise CheckpointError(f"the optimizer names {_several(found)} more than once")
    return found


def _names_here(names: Sequence[str], plan: Plan) -> list[str]:
    """Returns what the class of the model calls arrays, of whose files they may be."""
    renamed = names_of_class({n: n for n in names}, plan.origin.dialect, plan.module_mapping)
    own = {name: new for new, name in renamed.items()}
    linked = {name for link in plan.links for name in link.source}
    return canonical(plan, [name if name in linked else own.get(name, name) for name in names])


def _several(names: Sequence[str]) -> str:
    return _listed([name for name, times in Counter(names).items() if times > 1])


def _other_number(keys: Sequence[Any], shapes: Mapping[str, Any]) -> str:
    return f"the optimizer holds {len(keys)} parameters and the model {len(shapes)}"


def _describe_lacking(lacking: Sequence[str]) -> str:
    """Returns which parameters an optimizer lacks, and what to do."""
    return (
        f"{_without(lacking)}: jaxformer trains all of them, so give the optimizer those too, or "
        "take the weights alone"
    )


def _without(lacking: Sequence[str]) -> str:
    return f", without {_listed(lacking)}" if lacking else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return f"{', '.join(names[:MOST_LISTED])}{more}"
