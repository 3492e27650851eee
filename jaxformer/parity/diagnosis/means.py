"""Tries whether a mean is subtracted on one side alone: a layer norm in place of an RMS norm."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxformer.parity.diagnosis.evidence import FITS, Diagnosis, fits
from jaxformer.parity.recording.operators.graph import Operator
from jaxformer.parity.segments.divergences import Divergence, Trials
from jaxformer.parity.segments.walk import Walk


def other_centre(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Leaves out each subtraction of a mean, or subtracts one from what enters the segment."""
    trials = Trials(divergence)
    for operator in divergence.operators:
        if _axis_of_mean(operator, [walk.array(value) for value in operator.inputs]) is None:
            continue
        if trials.agree({operator.outputs[0].index: walk.array(operator.inputs[0])}, FITS):
            return Diagnosis("the mean is subtracted; the reference does not subtract it", operator)
    for axis in dict.fromkeys(_axes_of_reference(divergence)):
        for value in divergence.boundary:
            array = walk.array(value)
            if not value.is_activation or not -array.ndim <= axis < array.ndim:
                continue
            if trials.agree({value.index: array - array.mean(axis, keepdims=True)}, FITS):
                reader = next(step for step in divergence.operators if value in step.inputs)
                text = "the mean is not subtracted; the reference subtracts it"
                return Diagnosis(text, reader)
    return None


def _axes_of_reference(divergence: Divergence) -> Iterator[int]:
    """Yields the axes, counted from the last one, along which the reference subtracts means."""
    for operator in divergence.reference_operators:
        if operator.name in ("native_layer_norm", "var_mean"):
            yield -1
        axis = _axis_of_mean(operator, [value.data for value in operator.inputs])
        if axis is not None:
            yield axis


def _axis_of_mean(operator: Operator, read: Sequence[np.ndarray]) -> int | None:
    """Returns the axis, counted from the last one, along which a subtracted value is the mean.

    None is returned if the operator does not subtract its second operand's mean from its first.
    """
    if operator.name != "sub" or len(read) != 2 or read[0].ndim != read[1].ndim:
        return None
    whole, mean = read
    for axis in range(-1, -whole.ndim - 1, -1):
        if whole.shape[axis] > 1 and mean.shape[axis] == 1:
            found = whole.mean(axis, keepdims=True)
            return axis if found.shape == mean.shape and fits(found, mean) else None
    return None
