"""Compares the integers and truth values that the two sides return."""

from collections.abc import Callable, Iterator

import numpy as np

from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.tape import Tape
from jaxformer.parity.recording.result_parts import has_name
from jaxformer.parity.segments.results import Results, WrongResult, called
from jaxformer.parity.segments.walk import Walk

Pair = tuple[str, str]


def other_choices(walk: Walk, results: Results) -> Iterator[WrongResult]:
    """Yields integers and truth values that differ.

    Args:
        walk: after the forward pass, which gets remarks.
        results: gets a sentence for each that was not compared.
    """
    own, right = walk.candidate.choices, walk.reference.choices
    pairs = _pairs(walk)
    for name, other in pairs:
        value, wanted = own[name], right[other]
        found, expected = np.asarray(walk.array(value)), np.asarray(wanted.data)
        if found.size != expected.size:
            message = f"{called(name)} has the shape {found.shape}, not {expected.shape}"
            yield WrongResult(value, wanted, message)
            continue
        wrong = found.reshape(expected.shape).astype(np.int64) != expected.astype(np.int64)
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            message = (
                f"{int(wrong.sum())} of the {wrong.size} integers of {called(name)} differ: "
                f"{found.reshape(expected.shape)[first]} in place of {expected[first]}"
            )
            yield WrongResult(value, wanted, message)
    for name in sorted(own.keys() - {name for name, _ in pairs}):
        if _is_computed(own[name]) and not _is_inside(
            walk.array(own[name]), walk.reference, lambda value: value.data
        ):
            results.uncompared.append(_left("candidate", name, own[name], "reference"))
    for name in sorted(right.keys() - {other for _, other in pairs}):
        if _is_computed(right[name]) and not _is_inside(
            right[name].data, walk.candidate, walk.array
        ):
            results.uncompared.append(_left("reference", name, right[name], "candidate"))


def _pairs(walk: Walk) -> list[Pair]:
    """Returns the names of the candidate's and the reference's that belong together."""
    own, right = dict(walk.candidate.choices), dict(walk.reference.choices)
    is_same_count = len(own) == len(right)
    places = dict(zip(own, right, strict=True)) if is_same_count else {n: n for n in own}

    def is_size(name: str, other: str) -> bool:
        return own[name].size == right[other].size

    def is_equal(name: str, other: str) -> bool:
        return _is_same(walk.array(own[name]), right[other].data)

    def is_place(name: str, other: str) -> bool:
        return places[name] == other

    def is_kind(name: str, other: str) -> bool:
        kinds = {own[name].dtype.kind == "b", right[other].dtype.kind == "b"}
        return is_place(name, other) and (is_same_count or len(kinds) == 1)

    # A name that both sides give comes first. What has none may be in another place.
    found: list[Pair] = []
    for belong in (
        lambda name, other: name == other and has_name(name),
        lambda name, other: is_place(name, other) and is_equal(name, other),
        is_equal,
        lambda name, other: is_place(name, other) and is_size(name, other),
        is_size,
        is_kind,
    ):
        for name in list(own):
            partner = next((other for other in right if belong(name, other)), None)
            if partner is None:
                continue
            if belong is is_equal and is_same_count:
                walk.remarks.append(
                    f"the results are in another order: {called(name)} of the candidate is "
                    f"{called(partner)} of the reference"
                )
            found.append((name, partner))
            del own[name], right[partner]
    return found


def _is_computed(value: Value) -> bool:
    """Returns whether a value depends on an input, and is none."""
    return value.producer is not None and not (value.is_constant or value.is_weight)


def _is_inside(array: np.ndarray, tape: Tape, read: Callable[[Value], np.ndarray]) -> bool:
    """Returns whether a run has a value with some integers, given what reads its values."""
    same = (v for v in tape.values if v.dtype.kind in "iub" and v.size == array.size)
    return any(_is_same(read(value), array) for value in same)


def _is_same(one: np.ndarray, other: np.ndarray) -> bool:
    left, right = (np.asarray(array).astype(np.int64).reshape(-1) for array in (one, other))
    return np.array_equal(left, right)


def _left(side: str, name: str, value: Value, other_side: str) -> str:
    kind = "truth values" if value.dtype.kind == "b" else "integers"
    what = f"{called(name)} of the {side}, {kind} of shape {value.shape}"
    return f"{what}: the {other_side} has no such"
