"""What results must be beside equal numbers: complete, in their places, finite alike, and chosen.

Values are found by their numbers, in any layout and order, and infinities are left out. For what a
model returns that is not enough.
"""

from collections.abc import Iterator

import numpy as np

from jaxformer.parity.matching.layouts import is_finite
from jaxformer.parity.segments.choices import other_choices
from jaxformer.parity.segments.effects import seen_positions
from jaxformer.parity.segments.results import Results, WrongResult, called
from jaxformer.parity.segments.walk import Walk


def check_results(walk: Walk, results: Results) -> list[WrongResult]:
    """Returns the results that are wrong; what could not be compared goes into ``results``.

    Args:
        walk: after the forward pass, which gets remarks.
        results: those that were compared.
    """
    _check_missing(walk, results)
    return [
        *_of_another_shape(walk, results),
        *_exchanged(walk, results),
        *_not_finite_alike(walk, results),
        *other_choices(walk, results),
    ]


def _check_missing(walk: Walk, results: Results) -> None:
    """Names results of the reference that no value of the candidate equals."""
    known = {result.reference.index for result in results.compared.values()} | walk.reached
    known |= {value.index for value in results.right if value is not None}
    named = zip(walk.reference.output_names, walk.reference.outputs, strict=True)
    results.uncompared.extend(
        f"{called(name)} of the reference, of shape {value.shape}: the candidate has no such"
        for name, value in named
        if value.is_activation and value.index not in known
    )


def _of_another_shape(walk: Walk, results: Results) -> Iterator[WrongResult]:
    """Yields results that have not as many numbers as the reference's."""
    tape = walk.candidate
    for place, (value, wanted) in results.misshapen.items():
        right = results.right[place]
        if right is not None:
            name, shape = called(tape.output_names[place]), tape.outputs[place].shape
            yield WrongResult(value, wanted, f"{name} has the shape {shape}, not {right.shape}")


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
                    f"{called(names[place])} has its axes in another order than the reference's: "
                    f"{result.candidate.shape} for {right.shape}"
                )
            elif result.candidate.shape != right.shape:
                walk.remarks.append(
                    f"{called(names[place])} has the reference's numbers in another shape: "
                    f"{result.candidate.shape} for {right.shape}"
                )
            continue
        other = called(walk.reference.output_names[found])
        if results.is_named:
            message = f"{called(names[place])} is the reference's {other}"
            yield WrongResult(tape.outputs[place], right, message)
        else:
            walk.remarks.append(
                f"the results are in another order: {called(names[place])} of the candidate is "
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
        name = called(walk.candidate.output_names[place])
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
