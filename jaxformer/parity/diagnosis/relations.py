"""Simple relations between a wrong value and the right one: factors, terms, axes, order."""

from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from jaxformer.parity.diagnosis.evidence import (
    FITS,
    Diagnosis,
    fits,
    has_many_numbers,
    numbers_of,
    sides_of,
    tell_apart,
    where,
)
from jaxformer.parity.matching.layouts import find_layout
from jaxformer.parity.matching.values import largest, rounding_allowed
from jaxformer.parity.recording.operators.graph import first_shape
from jaxformer.parity.segments.divergences import REMAINS, Divergence
from jaxformer.parity.segments.walk import Walk
from jaxformer.parity.words import apart

# The largest numbers in a fraction that a factor may be, and where it is whole.
MOST_IN_FRACTION, MOST_WHOLE = 1000, 1e6


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
        name = _name_number(factor, right, walk)
        # One number is always a multiple of another one: then the factor must be a plain one.
        if name or has_many_numbers(own[own != 0], 2):
            return Diagnosis(f"the reference's value is {name or apart(factor, 1.0)} times this")
    missing = right - own
    for name, value in walk.reference.parameters.items():
        for sign, verb in ((1, "is missing"), (-1, "is added, the reference does not add it")):
            if _is_broadcast(sign * missing, value.data):
                return Diagnosis(f"the parameter {name} {verb}")
    numbers = (*numbers_of(divergence.reference_operators), *numbers_of(divergence.operators))
    for scale in {abs(n) for n in numbers if n}:
        if scale > 1 and fits(scale * np.tanh(own / scale), right):
            return Diagnosis(f"the reference caps it softly at {scale:g}")
        if scale > 1 and fits(scale * np.tanh(right / scale), own):
            return Diagnosis(f"the candidate caps it softly at {scale:g}, the reference does not")
    return None


def missing_term(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Names a value of the reference that is the difference between what is and what must be."""
    own, right = sides_of(divergence)
    if own.shape != right.shape or not (np.isfinite(own) & np.isfinite(right)).all():
        return None
    missing = right - own
    allowed = FITS * (largest(missing) or 1.0)
    for value in reversed(walk.reference.values):
        is_known = value.is_activation and value.size == own.size and value.index in walk.reached
        if is_known and find_layout(value.data, missing, allowed) is not None:
            return Diagnosis(f"a term is missing: {where(value)}")
    return None


def _name_number(factor: float, array: np.ndarray, walk: Walk) -> str:
    """Returns a number and what it is: of a size, a parameter, or a fraction; "" if none of them.

    Args:
        factor: the number.
        array: whose sizes may make it.
        walk: whose reference may have it as a parameter.
    """
    for size in sorted({n for n in array.shape if n > 1}):
        for power, name in ((0.5, "sqrt({})"), (-0.5, "1/sqrt({})"), (1.0, "{}"), (-1.0, "1/{}")):
            if abs(factor - size**power) <= FITS * abs(factor):
                return f"{factor:.6g} = {name.format(size)}"
    for name, value in walk.reference.parameters.items():
        if value.size == 1 and abs(factor - value.data.item()) <= FITS * abs(factor):
            return f"{apart(factor, 1.0)} = {name}"
    return _name_fraction(factor)


def _name_fraction(factor: float) -> str:
    """Returns a number that is a fraction of small numbers or the root of one, "" if it is not."""
    if not 1 / MOST_WHOLE <= abs(factor) <= MOST_WHOLE:
        return ""
    for number, name in ((abs(factor), "{}"), (factor**2, "sqrt({})")):
        small = min(number, 1 / number)
        for near in (
            Fraction(small).limit_denominator(MOST_IN_FRACTION),
            Fraction(1, round(1 / small)),
        ):
            if abs(float(near) - small) > FITS * small:
                continue
            fraction = near if number < 1 else 1 / near
            shown = apart(factor, 1.0)
            is_exact = abs(float(shown) - factor) <= FITS * abs(factor)
            sign = "-" if factor < 0 else ""
            return shown if is_exact else f"{shown} = {sign}{name.format(fraction)}"
    return ""


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
    both = matches[0].value, divergence.reference_value
    firsts = first_shape(both[0]), first_shape(both[1])
    # A name says what was computed, and not that it was cast or brought into another shape.
    own, right = tell_apart(*(both if firsts[0] is firsts[1] else firsts), walk)
    return Diagnosis(f"it equals {own}; it must be {right}")
