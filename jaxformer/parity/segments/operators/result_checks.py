"""What results must be beside equal numbers: complete, in their places, finite alike, and chosen.

Values are found by their numbers, in any layout and order, and infinities are left out. For what a
model returns that is not enough.
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from jaxformer.parity.matching.operators.layouts import is_finite
from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.segments.operators.effects import seen_positions
from jaxformer.parity.segments.operators.results import Results
from jaxformer.parity.segments.operators.walk import Walk
from jaxformer.parity.words import listed


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


def check_results(walk: Walk, results: Results) -> list[WrongResult]:
    """Returns the results that are wrong; what could not be compared goes into ``results``.

    Args:
        walk: after the forward pass, which gets remarks.
        results: those that were compared.
    """
    _check_missing(walk, results)
    return [
        *_exchanged(walk, results),
        *_not_finite_alike(walk, results),
        *_other_choices(walk),
    ]


def _check_missing(walk: Walk, results: Results) -> None:
    """Names results of the reference that no value of the candidate equals."""
    known = {result.reference.index for result in results.compared.values()} | walk.reached
    known |= {value.index for value in results.right if value is not None}
    named = zip(walk.reference.output_names, walk.reference.outputs, strict=True)
    results.uncompared.extend(
        f"{_called(name)} of the reference, of shape {value.shape}: the candidate has no such"
        for name, value in named
        if value.is_activation and value.index not in known
    )


def _exchanged(walk: Walk, results: Results) -> Iterator[WrongResult]:
    """Yields results that equal the reference's result of another name."""
    tape, names = walk.candidate, walk.candidate.output_names
    places = {value.index: place for place, value in enumerate(walk.reference.outputs)}
    for place, result in results.compared.items():
        right = results.right[place]
        if right is None or result.part is not None:
            continue
        found = places[result.reference.index]
        if result.reference is right:
            if not result.layout.is_reshape:
                walk.remarks.append(
                    f"{_called(names[place])} has its axes in another order than the reference's: "
                    f"{result.candidate.shape} for {right.shape}"
                )
            continue
        other = _called(walk.reference.output_names[found])
        if results.is_named:
            message = f"{_called(names[place])} is the reference's {other}"
            yield WrongResult(tape.outputs[place], right, message)
        else:
            walk.remarks.append(
                f"the results are in another order: {_called(names[place])} of the candidate is "
                f"{other} of the reference"
            )


def _not_finite_alike(walk: Walk, results: Results) -> Iterator[WrongResult]:
    """Yields results that are NaN or infinite where the reference's are not."""
    seen = dict(
        zip(
            (value.index for value in walk.reference.outputs),
            seen_positions(walk.reference),
            strict=True,
        )
    )
    for place, value in enumerate(walk.candidate.outputs):
        result, wanted = results.compared.get(place), results.right[place]
        own = np.asarray(walk.array(value))
        if result is not None:
            wanted = result.reference
            own = own if result.part is None else own[result.part]
            own = result.layout.invert(own, wanted.shape)
        elif wanted is None or wanted.shape != own.shape:
            continue
        right = wanted.data
        where = seen.get(wanted.index)
        if where is not None:
            own, right = own[where], right[where]
        strange = ~(is_finite(own) & is_finite(right))
        if not strange.any():
            continue
        name = _called(walk.candidate.output_names[place])
        own, right = own[strange], right[strange]
        wrong = (np.isnan(own) != np.isnan(right)) | (np.sign(own) == -np.sign(right))
        if wrong.any():
            first = int(np.flatnonzero(wrong)[0])
            message = f"{name} has {own[first]:.3g} where the reference has {right[first]:.3g}"
            yield WrongResult(value, wanted, message)
        elif strange.all():
            results.uncompared.append(f"{name} has no finite number on either side")
        else:
            _note_infinities(walk, name, own, right)


def _note_infinities(walk: Walk, name: str, own: np.ndarray, right: np.ndarray) -> None:
    """Says which numbers that are not finite were taken as equal."""
    differ = ~np.isnan(own) & (own != right)
    if differ.any():
        first = int(np.flatnonzero(differ)[0])
        walk.remarks.append(
            f"{name} has {own[first]:.3g} where the reference has {right[first]:.3g}: both count "
            "as infinite"
        )
    count = int(np.isnan(right).sum())
    if count:
        walk.remarks.append(f"{count} of the numbers of {name} are NaN on both sides")


def _other_choices(walk: Walk) -> Iterator[WrongResult]:
    """Yields integers and truth values that differ; they are paired by name or by place."""
    own, right = walk.candidate.choices, walk.reference.choices
    if own.keys() == right.keys():
        pairs = [(name, own[name], right[name]) for name in own]
    elif len(own) == len(right):
        pairs = list(zip(own, own.values(), right.values(), strict=True))
    else:
        pairs = []
        if right:
            walk.remarks.append(
                f"integers that the reference returns were not compared: {listed(list(right))}"
            )
    for name, value, wanted in pairs:
        found, expected = np.asarray(walk.array(value)), np.asarray(wanted.data)
        if found.size != expected.size:
            message = f"{_called(name)} has the shape {found.shape}, not {expected.shape}"
            yield WrongResult(value, wanted, message)
            continue
        wrong = found.reshape(expected.shape).astype(np.int64) != expected.astype(np.int64)
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            message = (
                f"{int(wrong.sum())} of the {wrong.size} integers of {_called(name)} differ: "
                f"{found.reshape(expected.shape)[first]} in place of {expected[first]}"
            )
            yield WrongResult(value, wanted, message)


def _called(name: str) -> str:
    return f"result {name}" if name else "the result"
