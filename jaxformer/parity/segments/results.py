"""Compares the results of the candidate with those of the reference."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxformer.parity.matching.layouts import Layout
from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.result_parts import has_name
from jaxformer.parity.segments.shapes import require_before
from jaxformer.parity.segments.walk import Walk


@dataclasses.dataclass(frozen=True)
class ComparedResult:
    """A result of the candidate beside the reference's.

    Attributes:
        candidate: the result.
        reference: what it is, or should be.
        layout: from the reference's to the candidate's, or to the part of it.
        part: which part of the candidate's is compared; None if all of it is.
    """

    candidate: Value
    reference: Value
    layout: Layout
    part: tuple[slice, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Results:
    """What became of the candidate's results.

    Attributes:
        compared: those that were compared, by their place.
        uncompared: a sentence for each of the others, and of the reference's.
        misshapen: of the places of those with another size than the reference's, the value of the
            candidate that has it first, and what it must be.
        right: of each place, the reference's result of the same name or place; None where neither
            says which that is.
        is_named: whether both sides give their results the same names.
    """

    compared: dict[int, ComparedResult] = dataclasses.field(default_factory=dict)
    uncompared: list[str] = dataclasses.field(default_factory=list)
    misshapen: dict[int, tuple[Value, Value]] = dataclasses.field(default_factory=dict)
    right: Sequence[Value | None] = ()
    is_named: bool = False


@dataclasses.dataclass(frozen=True)
class WrongResult:
    """A result that is wrong though its numbers are found.

    Attributes:
        candidate: the result.
        reference: what it should be.
        message: what differs.
    """

    candidate: Value
    reference: Value
    message: str


def called(name: str) -> str:
    """Returns what messages call a result, given its path."""
    return f"result {name}" if name else "the result"


def compare_results(walk: Walk) -> Results:
    """Compares all results: each must be an anchor, and the walk finds out why one is none.

    Args:
        walk: after the forward pass.
    """
    wanted, own = walk.reference.outputs, walk.candidate.outputs
    results = _pair_results(walk)
    # Each is first what has its name or its place, and no other one takes that.
    right = results.right
    matches = [walk.matches.get(value.index, ()) for value in own]
    taken = {
        match.value.index
        for found, one in zip(matches, right, strict=True)
        for match in found
        if match.value is one
    }
    left = []
    for place, value in enumerate(own):
        others = [m for m in matches[place] if m.value in wanted]
        equal = [m for m in others if m.value is right[place]]
        # What equals it with its axes turned may be another result, as it is.
        if not any(match.layout.is_reshape for match in equal):
            equal = [m for m in others if m.layout.is_reshape and results.is_named] or equal
        equal = equal or [m for m in others if m.value.index not in taken]
        if equal:
            results.compared[place] = ComparedResult(value, equal[0].value, equal[0].layout)
            taken.add(equal[0].value.index)
        else:
            left.append(place)
    _require_others(walk, results, left)
    return dataclasses.replace(results, compared=dict(sorted(results.compared.items())))


def _require_others(walk: Walk, results: Results, left: Sequence[int]) -> None:
    """Compares the results that equal none of the reference's, given their places."""
    wanted, own, right = walk.reference.outputs, walk.candidate.outputs, results.right
    taken = {result.reference.index for result in results.compared.values()}
    wrong = {
        place: one
        for place in left
        if (one := right[place]) is not None and one.index not in taken and _may_be(own[place], one)
    }
    taken |= {one.index for one in wrong.values()}
    is_inside = {place: own[place].index in walk.matches for place in left}
    alone: list[int] = []
    # What is inside of the reference may be a result of the candidate alone.
    for place in sorted(left, key=lambda place: is_inside[place]):
        free = [one for one in wanted if one.index not in taken]
        other = wrong.get(place) or _counterpart(own[place], free)
        if other is None:
            alone.append(place)
            continue
        taken.add(other.index)
        found = _require(walk, own[place], other)
        if found is not None:
            results.compared[place] = found
    for place in alone:
        one = right[place]
        # Of several results without names, one with other axes is of another kind: a cache.
        is_meant = results.is_named or len(own) == 1
        is_meant = is_meant or (one is not None and one.ndim == own[place].ndim)
        if one is not None and one.index not in taken and is_meant:
            results.misshapen[place] = require_before(walk, own[place], one)
        elif not is_inside[place]:
            results.uncompared.append(_left(place, own[place], wanted))


def _pair_results(walk: Walk) -> Results:
    """Returns which results of the two sides have the same name, or else the same place."""
    wanted, own = walk.reference.outputs, walk.candidate.outputs
    names, own_names = walk.reference.output_names, walk.candidate.output_names
    by_name = dict(zip(names, wanted, strict=True))
    is_unique = len(by_name) == len(names) and len(set(own_names)) == len(own_names)
    if is_unique and any(has_name(name) and name in by_name for name in own_names):
        return Results(right=[by_name.get(name) for name in own_names], is_named=True)
    same_count = len(wanted) == len(own)
    return Results(right=wanted if same_count else [None] * len(own))


def _counterpart(value: Value, free: Sequence[Value]) -> Value | None:
    """Returns the reference's result that one should be, of those that no other one is."""
    possible = [one for one in free if _may_be(value, one)]
    return next((one for one in possible if one.size == value.size), next(iter(possible), None))


def _may_be(value: Value, one: Value) -> bool:
    """Returns whether a result of the candidate may be one of the reference, by its shape."""
    return one.size == value.size or _is_last_entry(one.shape, value.shape)


def _left(place: int, value: Value, wanted: Sequence[Value]) -> str:
    """Returns a sentence on a result of the candidate that is none of the reference."""
    shapes = ", ".join(str(one.shape) for one in wanted) or "no floats"
    if any(_may_be(value, one) for one in wanted):
        shapes += ", and nothing more"
    return f"result {place} of shape {value.shape}: the reference gives {shapes}"


def _require(walk: Walk, value: Value, other: Value) -> ComparedResult | None:
    """Compares a result that is no anchor; None if nothing is known of their layouts."""
    whole, part = value, None
    if other.size != value.size:
        value, part = _last_entry(walk, value, other.shape)
    walk.require(value, other)
    found = walk.matches.get(value.index, ())
    layout = next((match.layout for match in found if match.value is other), None)
    return None if layout is None else ComparedResult(whole, other, layout, part)


def _last_entry(
    walk: Walk, value: Value, shape: tuple[int, ...]
) -> tuple[Value, tuple[slice, ...]]:
    """Returns the last entry of a result along the axis where the reference has one entry."""
    part = tuple(
        slice(None) if m == n else slice(-1, None) for m, n in zip(shape, value.shape, strict=True)
    )

    def take(array: np.ndarray) -> list[np.ndarray]:
        return [array[part]]

    walk.remarks.append(f"the reference gives only the last entry: {shape} of {value.shape}")
    made = walk.candidate.record("slice", [value], take(walk.array(value)), take)
    return made[0], part


def _is_last_entry(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Returns whether a shape has one entry along an axis where another has several."""
    pairs = list(zip(shape, whole, strict=False))
    return len(shape) == len(whole) and [m for m, n in pairs if m != n] == [1]
