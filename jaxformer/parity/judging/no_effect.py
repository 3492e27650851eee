"""Parameters and inputs of the candidate that have no effect on its results."""

from collections.abc import Collection

import numpy as np

from jaxformer.parity.matching.parameters import ParameterMatches
from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.tape import Tape
from jaxformer.parity.recording.result_parts import has_name
from jaxformer.parity.segments.walk import Walk
from jaxformer.parity.words import listed


def find_without_effect(walk: Walk, parameters: ParameterMatches) -> tuple[list[str], str]:
    """Finds what has an effect in the reference, and none in the candidate.

    Args:
        walk: after both passes.
        parameters: which of them are equal.

    Returns:
        a sentence for each; and one on state that a model needs for its training alone, which is
        given with the parameters and has no effect, or "".
    """
    needed, wanted = _needed(walk.candidate), _needed(walk.reference)
    unused = _unused(walk, parameters, needed, wanted)
    surplus = [
        name
        for name in unused
        if _is_state(name, walk.candidate) and _is_surplus(name, walk, parameters, needed, wanted)
    ]
    found = [
        f"the parameter {name} of the candidate has no effect on its results"
        for name in unused
        if name not in surplus
    ]
    for value in walk.candidate.inputs:
        twins = _twins(value, walk.reference.inputs)
        if twins and value.index not in needed and all(one.index in wanted for one in twins):
            found.append(f"the input {value.name} has no effect on the results of the candidate")
    if not surplus:
        return found, ""
    what = "has no effect, and is" if len(surplus) == 1 else "have no effect, and are"
    return found, f"{listed(surplus)} of the candidate {what} no parameter of the reference"


def _unused(
    walk: Walk, parameters: ParameterMatches, needed: set[int], wanted: set[int]
) -> list[str]:
    """Returns the parameters without an effect, except those that have none in the reference."""
    found = []
    for name, value in walk.candidate.parameters.items():
        if value.index in needed or value.dtype.kind != "f":
            continue
        named = [walk.reference.parameters.get(twin) for twin in parameters.whole.get(name, ())]
        twins = [match.value for match in walk.matches.get(value.index, ())]
        twins += [twin for twin in named if twin is not None]
        # What has no effect on either side is no part of the comparison.
        if not any(twin.kind == "parameter" and twin.index not in wanted for twin in twins):
            found.append(name)
    return found


def _is_state(name: str, tape: Tape) -> bool:
    """Returns whether a counter is beside it, as beside the moving means of Haiku."""
    parent = name.rpartition(".")[0]
    return any(
        other.rpartition(".")[0] == parent and value.dtype.kind in "iu"
        for other, value in tape.parameters.items()
    )


def _is_surplus(
    name: str, walk: Walk, parameters: ParameterMatches, needed: set[int], wanted: set[int]
) -> bool:
    """Returns whether the candidate uses all that the reference does without a parameter."""
    known = walk.reference.parameters | walk.reference.buffers
    twins = parameters.whole.get(name)
    if twins is None:
        missing = [one for one in parameters.missing if known[one].index in wanted]
        return name in parameters.unmatched and not missing
    same = [own for own, others in parameters.whole.items() if others == twins]
    used = sum(walk.candidate.parameters[own].index in needed for own in same)
    return used >= sum(known[twin].index in wanted for twin in twins)


def _needed(tape: Tape) -> set[int]:
    """Returns the indices of all that results depend on, integers too."""
    return tape.ancestors([*tape.outputs, *tape.choices.values()])


def _twins(value: Value, inputs: Collection[Value]) -> list[Value]:
    """Returns the inputs of the reference that an input of the candidate is."""
    equal = [one for one in inputs if np.array_equal(one.data, value.data)]
    same = [
        one for one in inputs if one.name == value.name and (has_name(one.name) or one in equal)
    ]
    return same or equal
