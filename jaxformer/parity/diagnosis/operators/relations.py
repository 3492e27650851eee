"""Simple relations between a wrong value and the right one: factors, terms, axes, order."""

from collections.abc import Iterator

import numpy as np

from jaxformer.parity.diagnosis.operators.evidence import (
    FITS,
    Diagnosis,
    fits,
    numbers_of,
    sides_of,
    tell_apart,
    where,
)
from jaxformer.parity.matching.operators.layouts import find_layout
from jaxformer.parity.matching.operators.values import largest, rounding_allowed
from jaxformer.parity.segments.operators.divergences import REMAINS, Divergence
from jaxformer.parity.segments.operators.walk import Walk
from jaxformer.parity.words import apart


def simple_relation(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Tries factors, signs, caps, and terms that are missing or too many."""
    right = divergence.layout.apply(divergence.reference_value.data)
    own = divergence.array
    both = np.isfinite(own) & np.isfinite(right)
    if own.shape != right.shape or not both.all():
        return None
    factor = float((own * right).sum() / ((own * own).sum() or 1.0))
    # Near to 1, a factor explains only what it makes smaller.
    if factor and fits(own * factor, right, min(FITS, REMAINS * divergence.error)):
        return Diagnosis(f"the reference's value is {_as_number(factor, right)} times this")
    missing = right - own
    for name, value in walk.reference.parameters.items():
        for sign, verb in ((1, "is missing"), (-1, "is added, the reference does not add it")):
            if _is_broadcast(sign * missing, value.data):
                return Diagnosis(f"the parameter {name} {verb}")
    candidates = [
        (value, layout)
        for value in reversed(walk.reference.values)
        if value.is_activation and value.size == right.size and value.index in walk.reached
        for layout in [find_layout(value.data, missing, 1e-9 * (largest(missing) or 1.0))]
        if layout is not None
    ]
    if candidates:
        value = candidates[0][0]
        return Diagnosis(f"a term is missing: {where(value)}")
    numbers = (*numbers_of(divergence.reference_operators), *numbers_of(divergence.operators))
    for scale in {abs(n) for n in numbers if n}:
        if scale > 1 and fits(scale * np.tanh(own / scale), right):
            return Diagnosis(f"the reference caps it softly at {scale:g}")
        if scale > 1 and fits(scale * np.tanh(right / scale), own):
            return Diagnosis(f"the candidate caps it softly at {scale:g}, the reference does not")
    return None


def _as_number(factor: float, array: np.ndarray) -> str:
    for size in sorted({n for n in array.shape if n > 1}):
        for power, name in ((0.5, "sqrt({})"), (-0.5, "1/sqrt({})"), (1.0, "{}"), (-1.0, "1/{}")):
            if abs(factor - size**power) <= 1e-9 * abs(factor):
                return f"{factor:.6g} = {name.format(size)}"
    return apart(factor, 1.0)


def _is_broadcast(array: np.ndarray, row: np.ndarray) -> bool:
    """Returns whether an array repeats a parameter over its other axes."""
    if row.ndim != 1 or array.ndim == 0 or not row.any():
        return False
    for axis in range(array.ndim):
        if array.shape[axis] == row.size and fits(np.moveaxis(array, axis, -1), row):
            return True
    flat = array.reshape(-1, row.size) if array.size % row.size == 0 else array.reshape(1, -1)
    return flat.shape[-1] == row.size and fits(flat, row[None])


def other_axes(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Finds the right numbers in another order of the axes."""
    own, right = sides_of(divergence)
    found = find_layout(right, own, rounding_allowed(right))
    if found is None or found[0].is_reshape:
        return None
    return Diagnosis("its numbers are right, but axes are transposed or split in another order")


def other_rows(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Names another order of entries along one axis."""
    right = divergence.layout.apply(divergence.reference_value.data)
    own = divergence.array
    if own.shape != right.shape or not np.isfinite(own).all():
        return None
    for axis in range(own.ndim):
        size = own.shape[axis]
        if size < 2:
            continue
        for shift in {1, -1, size // 2}:
            rolled = np.roll(right, shift, axis)
            inner = np.arange(size)[max(shift, 0) : size + min(shift, 0)]
            if len(inner) and fits(np.take(own, inner, axis), np.take(rolled, inner, axis)):
                return Diagnosis(f"its entries along axis {axis} are shifted by {shift}")
        if size % 2 == 0:
            for order, name in _interleaved(size):
                if fits(np.take(own, order, axis), right):
                    return Diagnosis(f"along axis {axis} {name}")
    return None


def _interleaved(size: int) -> Iterator[tuple[np.ndarray, str]]:
    halves = np.arange(size).reshape(2, -1).T.reshape(-1)
    yield halves, "the candidate has halves where the reference has neighbours"
    yield np.argsort(halves), "the candidate has neighbours where the reference has halves"
    yield np.roll(np.arange(size), size // 2), "the two halves are swapped"


def other_value(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Names the value of the reference that the candidate's end is, if it is another one."""
    matches = walk.index.find(divergence.array)
    if not matches:
        return None
    own, right = tell_apart(matches[0].value, divergence.reference_value, walk)
    return Diagnosis(f"it equals {own}; it must be {right}")
