"""Converts optimizers' state between PyTorch and JAX: moments, step count, which parameters decay.

torch keeps moments and ``step`` by a parameter's place in its groups; optax keeps them and
``count`` by name. ``config_optimizers.OPTIMIZERS`` has the names of both. A moment is laid out as
its parameter is, so the links of the model's port carry the moments too. The learning rate is no
state in jaxformer: it is a function of the count (``optimizers.learning_rate``), so carrying the
count carries the schedule's position.

AdamW and SGD are ``torch.optim``'s; Lion and Muon have the form of ``torch_ref.optimizers``. What
Adafactor keeps is not laid out as parameters are, and stays in jaxformer.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.adapters import is_adapter
from jaxformer.config_optimizers import OPTIMIZERS
from jaxformer.errors import CheckpointError, UsageError
from jaxformer.optimizers import hidden_matrices
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.optimizer_groups import (
    as_number,
    find_kind,
    groups_by_shape,
    groups_of_trainer,
    read_groups,
    unknown_settings,
    write_group,
)
from jaxformer.porting.mapping.optimizer_names import canonical, name_parameters
from jaxformer.porting.mapping.plans import Plan
from jaxformer.porting.mapping.transfer import export_tensors, import_tensors

# Those whose state PyTorch has no place for.
WITHOUT_TORCH_FORM = ("adafactor",)
# Counts are int32 in JAX.
MOST_STEPS = 2**31
Tensors = Mapping[str, StoredTensor]


class UnknownStepsError(CheckpointError):
    """An optimizer's state does not say how many steps it has made."""


@dataclasses.dataclass(frozen=True)
class OptimizerState:
    """An optimizer's state after some steps, with jaxformer's names.

    Attributes:
        moments: what it keeps of parameters: by optax's name, then by parameter.
        count: the number of steps.
        settings: ``learning_rate`` (of the last step), ``beta1``, ``beta2``, ``eps``, ``momentum``
            and ``weight_decay``, as far as they are known.
        kind: its name in ``OPTIMIZERS``.
        next_rate: the learning rate of the next step, where it is known.
        unread: the names of settings of its groups that nobody knows.
    """

    moments: Mapping[str, Mapping[str, StoredTensor]]
    count: int
    settings: Mapping[str, float] = dataclasses.field(default_factory=dict)
    kind: str = "adamw"
    next_rate: float | None = None
    unread: tuple[str, ...] = ()

    @property
    def note(self) -> str:
        """Returns what is to be said of settings that nobody knows, "" if there are none."""
        if not self.unread:
            return ""
        return f"its groups set {', '.join(self.unread)}, which is not read and may change steps"


def read_optimizer(
    state: Mapping[str, Any],
    plan: Plan,
    *,
    order: Sequence[str] | None = None,
    steps: int | None = None,
) -> OptimizerState:
    """Imports the state dict of a PyTorch optimizer.

    Args:
        state: as ``optimizer.state_dict()`` gives it, or keyed by names as
            ``torch.distributed.checkpoint.state_dict`` does; arrays are stored tensors or torch's.
        plan: the import of the model.
        order: the source arrays in the order of the modules, empty if it is not known; default
            that in which they came.
        steps: how many it has made, where its state does not say so: SGD's does not.

    Raises:
        CheckpointError: moments are missing, unexpected or of another shape, or the step counts
            differ; all are listed.
        UnknownStepsError: the steps are not counted, and not given.
        UsageError: it is another optimizer, or other parameters decay than in jaxformer.
    """
    groups = state.get("param_groups")
    if not isinstance(groups, list | tuple) or not isinstance(state.get("state"), Mapping):
        raise UsageError("not a torch optimizer's state dict: it has no state or no param_groups")
    kind = find_kind(groups)
    shapes = _shapes(plan)
    hidden = _hidden(plan)
    of_muon = hidden if kind == "muon" else ()
    order = plan.order if order is None else order
    names = name_parameters(groups, plan, shapes, order, of_muon)
    settings = read_groups(groups, names, shapes)
    entries = {names.get(key, str(key)): entry for key, entry in state["state"].items()}
    problems = [f"unexpected state of {name}" for name in entries if name not in shapes]
    if not entries:
        momentum = settings.get("momentum")
        count = (steps or 0) if kind == "sgd" and not momentum else 0
        return _before_the_first_step(plan, settings, kind, count)
    problems += [f"no state of {name}" for name in shapes if name not in entries]
    counts = _count_steps(groups, names, entries, steps)
    if not counts:
        title = OPTIMIZERS[kind].title
        raise UnknownStepsError(f"{title}'s state does not say how many steps it has made")
    if len(counts) > 1:
        problems.append(f"its parameters made different numbers of steps: {sorted(counts)}")
    moments: dict[str, dict[str, StoredTensor]] = {}
    for target, source in OPTIMIZERS[kind].moments.items():
        members = {n: e for n, e in entries.items() if _keeps(kind, target, n in hidden)}
        found = {n: _stored(e[source]) for n, e in members.items() if n in shapes and source in e}
        problems += [f"no {source} of {n}" for n in members if n in shapes and n not in found]
        problems += [
            f"{source} of {name} has shape {tensor.shape}, not {shapes[name]}"
            for name, tensor in found.items()
            if tensor.shape != shapes[name]
        ]
        moments[target] = found
    if problems:
        raise CheckpointError(f"the optimizer does not fit its model: {'; '.join(problems)}")
    empty = _zeros(plan, {n for link in plan.links if link.rule.is_buffer for n in link.target})
    imported = {
        target: import_tensors(_links_of(plan, found), found) | empty
        for target, found in moments.items()
    }
    unread = tuple(unknown_settings(groups))
    return OptimizerState(imported, counts.pop(), settings, kind, unread=unread)


def _count_steps(
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[Any, str],
    entries: Mapping[str, Mapping[str, Any]],
    steps: int | None,
) -> set[int]:
    """Returns the numbers of steps that the parameters have made: one, or none where it is unknown.

    PyTorch counts them by parameter; apex and DeepSpeed count them by group.

    Raises:
        CheckpointError: one is no number of steps.
    """
    of_group = {names[key]: group.get("step") for group in groups for key in group["params"]}
    counts = set()
    for name, entry in entries.items():
        found = (entry.get("step"), of_group.get(name), steps)
        step = next((each for each in found if each is not None), None)
        if step is None:
            continue
        number = as_number(step)
        if not (number.is_integer() and 0 <= number < MOST_STEPS):
            raise CheckpointError(
                f"the optimizer's state is damaged: {name} has made {number:g} steps"
            )
        counts.add(int(number))
    return counts


def _keeps(kind: str, moment: str, is_hidden: bool) -> bool:
    """Whether a parameter has this moment: Muon keeps no second one of hidden matrices."""
    return not (kind == "muon" and moment == "nu" and is_hidden)


def _hidden(plan: Plan) -> set[str]:
    """The source arrays that Muon updates."""
    hidden = set()
    for link in plan.links:
        shapes = zip(link.target, link.target_shapes, strict=True)
        targets = {name: np.empty(shape, np.bool_) for name, shape in shapes}
        if all(hidden_matrices(targets).values()):  # type: ignore[arg-type]
            hidden |= set(link.source)
    return hidden


def _links_of(plan: Plan, arrays: Mapping[str, Any], *, targets: bool = False) -> list[Any]:
    """The links that carry these arrays, by the names of the source or of the target."""
    return [
        link for link in plan.links if set(link.target if targets else link.source) <= set(arrays)
    ]


def export_moments(
    moments: Mapping[str, Mapping[str, StoredTensor]], plan: Plan, kind: str
) -> dict[str, dict[str, StoredTensor]]:
    """Returns what an optimizer keeps under the source's names: by torch's name, by parameter."""
    names = OPTIMIZERS[kind].moments
    return {
        names[moment]: export_tensors(_links_of(plan, kept, targets=True), kept)
        for moment, kept in moments.items()
    }


def write_optimizer(
    optimizer: OptimizerState,
    plan: Plan,
    order: Sequence[str] | None = None,
    *,
    for_trainer: bool = False,
) -> dict[str, Any]:
    """Exports the state as the optimizer's ``load_state_dict`` takes it.

    Two groups, as ``torch_ref.optimizers.make_optimizer`` and nanoGPT make them: parameters of two
    or more dimensions, which decay, then the others; each in the order of the model's parameters.
    Muon has a group before these, of the hidden matrices. ``param_names`` lists the parameters of
    each.

    Args:
        optimizer: the state.
        plan: the export of the model.
        order: the source arrays in the order of ``named_parameters()``; default any.
        for_trainer: whether to make the two groups of transformers' Trainer.
    """
    shapes, kind = _shapes(plan), optimizer.kind
    # PyTorch lists a tied array under the first of its names.
    given = dict[str, str]()
    for name in order or shapes:
        given.setdefault(canonical(plan, [name])[0], name)
    names = [name for name in given if name in shapes]
    moments = export_moments(optimizer.moments, plan, kind)
    hidden = _hidden(plan) if kind == "muon" else set()
    group_of = groups_of_trainer(shapes) if for_trainer else groups_by_shape(shapes, hidden)
    settings = dict(optimizer.settings)
    if for_trainer and optimizer.next_rate is not None:
        # Its schedule has set the rate already when it saves.
        settings["learning_rate"] = optimizer.next_rate
    state: dict[int, dict[str, Any]] = {}
    groups = []
    for group in ((False, False), (True, False), (True, True)):
        members = [name for name in names if group_of(name) == group]
        # The Trainer has its two groups even where one of them is empty.
        if not members and not (for_trainer and group[0]):
            continue
        is_hidden, decays = not group[0], not group[1]
        start = len(state)
        for place, name in enumerate(members, start):
            state[place] = {
                **_step(kind, optimizer.count),
                **{source: kept[name] for source, kept in moments.items() if name in kept},
            }
        groups.append(
            {
                **write_group(kind, settings, decays=decays),
                **({"hidden": is_hidden} if kind == "muon" else {}),
                "params": list(range(start, len(state))),
                "param_names": [given[name] for name in members],
            }
        )
    return {"state": state, "param_groups": groups}


def _step(kind: str, count: int) -> dict[str, Any]:
    """Returns the count of steps as torch keeps it; SGD counts none."""
    return {} if kind == "sgd" else {"step": StoredTensor.of(np.array(count, np.float32))}


def _before_the_first_step(
    plan: Plan, settings: Mapping[str, float], kind: str, count: int
) -> OptimizerState:
    empty = _zeros(plan, plan.tensors)
    of_source = _hidden(plan)
    hidden = {n for link in plan.links if set(link.source) <= of_source for n in link.target}
    moments = {
        moment: {n: t for n, t in empty.items() if _keeps(kind, moment, n in hidden)}
        for moment in OPTIMIZERS[kind].moments
    }
    return OptimizerState(moments, count, settings, kind)


def _zeros(plan: Plan, names: Collection[str]) -> dict[str, StoredTensor]:
    """Returns moments of parameters that no step has moved yet."""

    def zeros(shape: tuple[int, ...], dtype: np.dtype) -> StoredTensor:
        return StoredTensor(shape, dtype, lambda: np.zeros(shape, dtype))

    return {name: zeros(plan.tensors[name].shape, plan.tensors[name].dtype) for name in names}


def _shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """The shapes of what an optimizer updates: of adapters where there are any."""
    adapters = [link for link in plan.links if is_adapter(link.target[0])]
    return {
        name: shape
        for link in adapters or plan.links
        if not link.rule.is_buffer
        for name, shape in zip(link.source, link.source_shapes, strict=True)
    }


def _stored(value: Any) -> StoredTensor:
    from jaxformer.porting.formats.arrays import to_stored_tensors

    return to_stored_tensors({"": value})[""]
