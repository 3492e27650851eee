"""Compares which keys each query may attend to."""

from collections.abc import Callable

import numpy as np

from jaxformer.parity.diagnosis.evidence import FITS, Diagnosis
from jaxformer.parity.matching.layouts import INFINITE
from jaxformer.parity.recording.operators.graph import Operator, Value
from jaxformer.parity.segments.divergences import Divergence, Trials
from jaxformer.parity.segments.walk import Walk

# Scores below it are hidden.
LOWEST = -1e4
# At most the lowest number of bfloat16 and of float32; a score that is added to it counts too.
LOWEST_OF_DTYPES = -3e38
# Up to this share of it a number of two digits is what a mask has written, and a score added to it.
ROUND = 1e-6
# What may stand between scores and the operator that hides some of them, and that operator.
HIDING = {"add", "sub", "mul", "div", "select_n", "tanh", "convert_element_type"}
# Comparisons that a mask may be made of, with their signs.
COMPARISONS: dict[str, tuple[str, Callable[..., np.ndarray]]] = {
    "lt": ("<", np.less), "le": ("<=", np.less_equal),
    "gt": (">", np.greater), "ge": (">=", np.greater_equal),
    "eq": ("==", np.equal), "ne": ("!=", np.not_equal),
}  # fmt: skip


def other_mask(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Compares which entries of scores or of attention weights are hidden."""
    right = divergence.layout.apply(divergence.reference_value.data)
    own = divergence.array
    if right.ndim < 2 or right.shape[-1] < 2:
        return None
    if not all((array < INFINITE).all() for array in (own, right)):
        # A mask makes no number NaN, and none infinitely large.
        return _not_finite(own, right)
    if any(map(_has_hidden_scores, (own, right))):
        ends = divergence.value, divergence.reference_value
        if not (_is_added_mask(right) or any(map(_reaches_softmax, ends))):
            return _not_finite(own, right)
        hidden, wanted = (~(array > LOWEST) for array in (_with_later_mask(divergence), right))
    # Splines have zeros and the sum 1 too, and no mask.
    elif _is_of_softmax(divergence.value) and all(map(_are_weights, (own, right))):
        hidden, wanted = own == 0, right == 0
    else:
        return None
    if not (hidden.any() or wanted.any()) or (hidden == wanted).all():
        return None
    mask = _last_mask(divergence)
    if mask is not None and _is_pattern(mask.outputs[0].data, wanted):
        return _other_filling(divergence)
    extra, lost = wanted & ~hidden, hidden & ~wanted
    parts = []
    for which, verb in ((extra, "sees"), (lost, "does not see")):
        if which.any():
            place = np.argwhere(which)[0]
            query, key = (int(n) for n in place[-2:])
            parts.append(
                f"query {query} {verb} key {key} ({int(which.sum())} of {which.size} entries)"
            )
    return Diagnosis(
        f"the mask differs{_pattern(extra, lost)}: in the candidate " + "; ".join(parts),
        None if mask is None else _before_layout(mask),
    )


def other_comparison(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Puts another comparison in the place of each that a segment makes of two arrays."""
    trials = Trials(divergence)
    for operator in divergence.operators:
        if operator.name not in COMPARISONS or operator.outputs[0].ndim < 2:
            continue
        read = [walk.array(value) for value in operator.inputs]
        sign = COMPARISONS[operator.name][0]
        for other, compare in COMPARISONS.values():
            if other != sign and trials.agree({operator.outputs[0].index: compare(*read)}, FITS):
                text = f"the comparison {sign} must be {other}"
                return Diagnosis(text, operator, right_with=trials.right_with)
    return None


def _not_finite(own: np.ndarray, right: np.ndarray) -> Diagnosis | None:
    """Names the first number that is not finite, or not in the same way as the other side's."""
    alike = (own == right) | (np.isnan(own) & np.isnan(right))
    wrong = ~alike & ~(_is_finite(own) & _is_finite(right))
    if not wrong.any():
        return None
    first = tuple(int(n) for n in np.argwhere(wrong)[0])
    return Diagnosis(
        f"{int(wrong.sum())} of {wrong.size} numbers are not finite alike: at {first} the "
        f"candidate has {own[first]:.3g}, the reference {right[first]:.3g}"
    )


def _is_finite(array: np.ndarray) -> np.ndarray:
    """Returns which numbers are neither infinite, nor NaN, nor what a mask writes.

    A mask writes a round number or the lowest of a dtype; what a recurrence of growing numbers
    makes is finite, however large it is.
    """
    digits = 10.0 ** (np.floor(np.log10(np.abs(array))) - 1)
    is_round = np.abs(array - np.round(array / digits) * digits) <= ROUND * np.abs(array)
    is_written = (array <= -INFINITE) & (is_round | (array <= LOWEST_OF_DTYPES))
    return np.isfinite(array) & ~is_written


def _is_pattern(mask: np.ndarray, wanted: np.ndarray) -> bool:
    """Returns whether a mask hides or shows, of all entries, those that must be hidden."""
    if mask.ndim > wanted.ndim or any(
        m not in (1, n) for m, n in zip(mask.shape[::-1], wanted.shape[::-1], strict=False)
    ):
        return False
    return bool((mask == wanted).all() or (mask != wanted).all())


def _other_filling(divergence: Divergence) -> Diagnosis | None:
    """Names the number that stands for hidden scores, where the mask itself is right."""
    for operator in reversed(divergence.operators):
        if operator.name != "select_n" or not operator.source:
            continue
        for value in operator.inputs[1:]:
            number = value.data.flat[0] if value.is_constant and value.size else np.nan
            if number > LOWEST and (value.data == number).all():
                text = f"the mask is right, but {number:g} is too large a number for hidden scores"
                return Diagnosis(text, operator)
    return None


def _has_hidden_scores(array: np.ndarray) -> bool:
    """Returns whether some numbers are as low as a masked score."""
    return bool((array < LOWEST).any() or not np.isfinite(array).all())


def _with_later_mask(divergence: Divergence) -> np.ndarray:
    """Returns what the candidate computes; where it hides scores later, what it has after that.

    One side may add a mask together with a bias, and the other one after it.
    """
    waiting = [divergence.value]
    for value in waiting:
        # What comes later was put right, and has what the reference hides.
        array = divergence.array if value is divergence.value else value.data
        if _has_hidden_scores(array):
            return np.asarray(array)
        waiting += [
            made
            for reader in value.consumers
            if reader.name in HIDING
            for made in reader.outputs
            if made.shape == value.shape and made not in waiting
        ]
    return divergence.array


def _is_added_mask(array: np.ndarray) -> bool:
    """Returns whether an array holds nothing but zeros and what hides a score it is added to."""
    return bool(((array == 0) | (array < LOWEST)).all())


def _are_weights(array: np.ndarray) -> bool:
    """Returns whether each row may be the weights of a softmax; with some dropped it is not."""
    return bool((array >= 0).all() and np.allclose(array.sum(-1), 1))


def _reaches_softmax(start: Value) -> bool:
    """Returns whether e is raised to a value, or to what is made of all its numbers.

    A logarithm of a distance is infinite too, and no mask.
    """
    waiting = [start]
    seen = {start}
    for value in waiting:
        for reader in value.consumers:
            if reader.name == "exp" or "softmax" in reader.name or "attention" in reader.name:
                return True
            new = [
                made
                for made in reader.outputs
                if made.size >= start.size and made.dtype.kind == "f" and made not in seen
            ]
            waiting += new
            seen.update(new)
    return False


def _is_of_softmax(end: Value) -> bool:
    """Returns whether one of the values of the same size that a value is made of is raised to e."""
    waiting = [end]
    seen = set(waiting)
    for value in waiting:
        if value.producer is None:
            continue
        if value.producer.name == "exp":
            return True
        new = [v for v in value.producer.inputs if v.size == end.size and v not in seen]
        waiting += new
        seen.update(new)
    return False


def _pattern(extra: np.ndarray, lost: np.ndarray) -> str:
    """Returns a name for the entries in which two masks differ."""
    size = extra.shape[-2:]
    query, key = np.indices(size)[0], np.indices(size)[1]
    flat = (extra | lost).reshape(-1, *size)
    one = flat.any(0)
    if not lost.any() and one.any():
        if (one == (key == query + 1)).all():
            return ", by one: a token sees the one after it"
        if (one == (key > query)).all():
            return ": it is not causal"
    if not extra.any() and (one == (key == query)).all():
        return ", by one: a token does not see itself"
    distances = set((query - key)[one].tolist())
    if len(distances) == 1 and min(distances) > 0:
        return f", by one: at the edge of a window of {min(distances) + bool(lost.any())} tokens"
    columns: np.ndarray = one.all(0)
    if (one == (columns[None] & one.any(1)[:, None])).all() and columns.any():
        return ", in whole keys: padding"
    return ""


def _last_mask(divergence: Divergence) -> Operator | None:
    """Returns the last operator of the user's that makes a boolean mask."""
    for operator in reversed(divergence.operators):
        made = operator.outputs[0]
        if made.dtype.kind == "b" and made.ndim >= 2 and operator.source:
            return operator
    return None


def _before_layout(operator: Operator) -> Operator:
    """Returns the operator whose result is only brought into another layout."""
    while operator.name in ("broadcast_in_dim", "reshape", "squeeze", "transpose", "not"):
        producer = operator.inputs[0].producer
        if producer is None:
            break
        operator = producer
    return operator
