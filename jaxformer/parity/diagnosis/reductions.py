"""Compares over which numbers each side takes a mean, a sum or an extreme.

Groups of channels that are split the wrong way round, or an axis too many or too few, make a norm
of other numbers. The groups have other sizes, so that no value can take the place of another.
"""

import itertools
import math
from collections.abc import Callable, Iterator

import numpy as np

from jaxformer.parity.diagnosis.evidence import FITS, Diagnosis
from jaxformer.parity.matching.layouts import find_layout, layouts
from jaxformer.parity.matching.values import rounding_allowed
from jaxformer.parity.recording.operators.graph import Operator, Value
from jaxformer.parity.recording.operators.kinds import LAYOUT_ONLY
from jaxformer.parity.segments.divergences import Divergence, Trials
from jaxformer.parity.segments.walk import Walk
from jaxformer.parity.words import shorten

# The kind of a reduction in both frameworks' words. A sum is a mean times a count.
KINDS: dict[str, Callable[..., np.ndarray]] = {
    "reduce_sum": np.mean, "sum": np.mean, "mean": np.mean, "var_mean": np.mean,
    "reduce_max": np.max, "amax": np.max, "reduce_min": np.min, "amin": np.min,
}  # fmt: skip

# How many layouts of what the reference takes are tried.
MOST_LAYOUTS = 8


def other_reduction(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Finds the first reduction of a right value to which the reference has none that is equal."""
    for operator in divergence.operators:
        kind = KINDS.get(operator.name)
        read = operator.inputs[0] if operator.inputs else None
        if kind is None or read is None or not walk.matches.get(read.index):
            continue
        twins = list(_reductions_of_twins(read, walk))
        others = [other for other in twins if KINDS[other.name] is kind]
        if twins and not others:
            # The largest score of a softmax is a shift alone.
            if not _is_right_with(operator, twins[0], Trials(divergence)):
                continue
            text = f"{operator.name} is taken; the reference takes {twins[0].name}"
            return Diagnosis(text, operator)
        wanted = {other: _reduced(other) for other in others}
        own = _reduced(operator)
        if not others or any(_is_equal(own, right) for right in wanted.values()):
            continue
        other, right = next(iter(wanted.items()))
        text = (
            f"{operator.name} is taken over groups of {read.size // own.size} numbers; "
            f"the reference's {other.name} over {other.inputs[0].size // right.size}"
        )
        array = walk.array(read)
        for axes in () if _stays_turned(read, divergence, walk) else _subsets(array.ndim):
            if _is_equal(kind(array, axis=axes), right):
                return Diagnosis(f"{text}, which are axes {axes} of {array.shape}", operator)
        made = read.producer
        if made is not None and made.name in LAYOUT_ONLY:
            shape = f"of shape {array.shape}, made at {shorten(made.source)},"
            return Diagnosis(f"{text}; the array {shape} splits them otherwise", made)
    return None


def _is_right_with(operator: Operator, twin: Operator, trials: Trials) -> bool:
    """Returns whether a segment is right with what the reference takes in an operator's place."""
    made, wanted = operator.outputs[-1], twin.outputs[-1]
    count = operator.inputs[0].size / made.size
    return made.size == wanted.size and any(
        trials.agree({made.index: layout.apply(wanted.data) * scale}, FITS)
        for layout in itertools.islice(layouts(wanted.shape, made.shape), MOST_LAYOUTS)
        for scale in (1.0, 1 / count, count)
    )


def _reductions_of_twins(read: Value, walk: Walk) -> Iterator[Operator]:
    """Yields the reductions of the reference that read a value, in any layout."""
    waiting = [match.value for match in walk.matches[read.index]]
    seen = set(waiting)
    for value in waiting:
        for reader in value.consumers:
            if reader.name in KINDS and reader.inputs[0] is value:
                yield reader
            elif reader.name in LAYOUT_ONLY:
                # The same numbers, in a layout that the candidate does not have.
                new = [v for v in reader.outputs if v.size == value.size]
                waiting += [v for v in new if v not in seen]
                seen.update(new)


def _stays_turned(read: Value, divergence: Divergence, walk: Walk) -> bool:
    """Returns whether parts of an axis are the wrong way round in a value, and are not put back."""
    if any(operator.name == "transpose" for operator in divergence.operators):
        return False
    return any(
        match.layout.turns(match.value.shape)
        for match in walk.matches[read.index]
        # Where it was computed: later the reference itself may split it.
        if match.value.producer is None or match.value.producer.name not in LAYOUT_ONLY
    )


def _reduced(operator: Operator) -> np.ndarray:
    """Returns the means or extremes that an operator takes."""
    read, made = operator.inputs[0].data, operator.outputs[-1].data
    if operator.name in ("reduce_sum", "sum"):
        return np.asarray(made / (read.size // math.prod(made.shape)))
    return made


def _is_equal(one: np.ndarray, other: np.ndarray) -> bool:
    return one.size == other.size and (
        find_layout(other, np.asarray(one), rounding_allowed(other)) is not None
    )


def _subsets(rank: int) -> Iterator[tuple[int, ...]]:
    for count in range(1, rank + 1):
        yield from itertools.combinations(range(rank), count)
