"""Parameters of the candidate that hold what the reference computes of its own each time.

A conversion adds the one of Gemma's norms to their weights, or multiplies a weight's norm with its
direction, in float32. The reference's numbers are on its tape, in float64.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxformer.parity.matching.layouts import Layout, nearest_layout
from jaxformer.parity.matching.parameters import (
    COMPUTED_ALLOWED,
    ONE_FACTOR,
    RELATED,
    ParameterMatches,
    describe_entries,
)
from jaxformer.parity.matching.values import largest
from jaxformer.parity.recording.operators.graph import Value, same_numbers
from jaxformer.parity.recording.operators.tape import Tape
from jaxformer.parity.tolerance import ROUNDOFF

# Of the numbers of such a parameter, at most so many may be wrong.
MOST_WRONG = 0.1
# A parameter that is scaled has at least so many numbers, and is not further from the other one,
# both with a root mean square of one.
FEWEST_SCALED, MOST_APART = 16, 0.9
# So many of the first of these numbers are different, where some are equal and others are not.
FEWEST_DIFFERENT, MOST_LOOKED_AT = 8, 1 << 12


@dataclasses.dataclass(frozen=True)
class Computed:
    """A parameter of the candidate beside what the reference computes of parameters alone.

    Attributes:
        name: of the candidate.
        value: of the reference.
        layout: from the reference's to the candidate's.
        wrong: a sentence on the numbers that differ; "" if none do.
    """

    name: str
    value: Value
    layout: Layout
    wrong: str

    def sources(self, tape: Tape) -> set[str]:
        """Returns the names of the reference's parameters that the value is made of."""
        made_of = tape.ancestors([self.value])
        return {name for name, value in tape.parameters.items() if value.index in made_of}

    def read(self) -> np.ndarray:
        """Returns the reference's numbers, float64, in the candidate's layout."""
        return self.layout.apply(self.value.data)


def find_computed(
    matches: ParameterMatches, targets: Mapping[str, np.ndarray], tape: Tape
) -> tuple[ParameterMatches, list[Computed]]:
    """Finds the parameters that the reference computes, among those that are none of its own.

    Args:
        matches: what became of the parameters.
        targets: parameters of the candidate, by path.
        tape: of the reference, after its forward pass.

    Returns:
        the matches, in which such a parameter is no longer a wrong one, and these parameters.
    """
    wrong = {one.candidate: one for one in matches.wrong}
    made = [
        value
        for value in tape.values
        if value.is_weight and value.producer is not None and value.dtype.kind == "f"
        if value.size > 1 and same_numbers(value) is None
    ]
    found = []
    for name in (*matches.unmatched, *wrong):
        one = _nearest(name, targets[name].astype(np.float64), made)
        if one is not None:
            found.append(one)
    taken = [wrong[one.name] for one in found if one.name in wrong]
    return (
        dataclasses.replace(
            matches,
            wrong=tuple(one for one in matches.wrong if one not in taken),
            unmatched=(*matches.unmatched, *(one.candidate for one in taken)),
            missing=(*matches.missing, *(one.reference for one in taken)),
        ),
        found,
    )


def _nearest(name: str, array: np.ndarray, made: Sequence[Value]) -> Computed | None:
    """Returns the first value that a parameter holds, up to rounding and a few wrong numbers."""
    for value in made:
        found = nearest_layout(value.data, array) if value.size == array.size else None
        if found is None or found[1] > RELATED:
            continue
        right = found[0].apply(value.data)
        is_wrong = np.abs(right - array) > COMPUTED_ALLOWED * (largest(right) or 1.0)
        if is_wrong.mean() > MOST_WRONG or (is_wrong.any() and not _are_telling(right[~is_wrong])):
            continue
        maker = value.producer
        wrong = ""
        if is_wrong.any() and maker is not None:
            source = f"the {maker.name} of {maker.module or 'the model'}"
            wrong = f"{name} is not {source}: {describe_entries(is_wrong)}"
        return Computed(name, value, found[0], wrong)
    return None


def describe_scaled(
    names: Iterable[str],
    targets: Mapping[str, np.ndarray],
    missing: Iterable[str],
    sources: Mapping[str, np.ndarray],
) -> Iterator[str]:
    """Yields a sentence on each parameter that is another one times a scale but for a few numbers.

    The scale is one number, or one of each line along an axis, which the reference applies
    elsewhere. How large it is, float32 does not say exactly, but wrong numbers stand out.

    Args:
        names: of parameters of the candidate that hold the numbers of none of the reference.
        targets: parameters of the candidate, by path.
        missing: paths of parameters of the reference that the candidate does not have.
        sources: parameters of the reference, by path.
    """
    names = [name for name in names if targets[name].size >= FEWEST_SCALED]
    sizes = {targets[name].size for name in names}
    units = {n: unit for n in missing if sources[n].size in sizes and (unit := _unit(sources[n]))}
    for name in names:
        array = targets[name].astype(np.float64)
        own = _unit(array)
        for other, unit in units.items():
            source = sources[other]
            if source.size != array.size or not own:
                continue
            found = nearest_layout(source, array, factor=unit / own)
            if found is None or found[1] > MOST_APART:
                continue
            wrong = _off_scale(array, found[0].apply(source.astype(np.float64)))
            if wrong is not None and wrong.any():
                entries = describe_entries(wrong).replace("equal but", "but")
                yield f"{name} is {other} times a scale, {entries}"
            if wrong is not None:
                break


def _unit(array: np.ndarray) -> float:
    """Returns the root mean square of an array."""
    return float(np.sqrt(np.mean(array.astype(np.float64) ** 2)))


def _off_scale(array: np.ndarray, near: np.ndarray) -> np.ndarray | None:
    """Returns which numbers are not those of another array times a scale; None if many are not."""
    best: np.ndarray | None = None
    axes = [None, *range(array.ndim)] if array.ndim > 1 else [None]
    for axis in axes:
        lines = None if axis is None else tuple(i for i in range(array.ndim) if i != axis)
        with np.errstate(all="ignore"):
            factors = np.nanmedian(np.where(near != 0, array / near, np.nan), lines, keepdims=True)
        right = np.nan_to_num(factors) * near
        wrong = np.abs(array - right) > ONE_FACTOR * np.abs(right) + ROUNDOFF["float32"] * largest(
            right
        )
        if best is None or wrong.sum() < best.sum():
            best = wrong
    if best is None or best.mean() > MOST_WRONG or not _are_telling(near[~best]):
        return None
    return best


def _are_telling(numbers: np.ndarray) -> bool:
    """Returns whether equal numbers say that two arrays are one; zeros are in many places."""
    return len(np.unique(numbers[:MOST_LOOKED_AT])) >= FEWEST_DIFFERENT
