"""What would make a wrong segment right.

A diagnosis is tried, never guessed: it is given only if the substitution makes the candidate's
segment agree with the reference's value, or if the formula gives what that side computes.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.graphs.layouts import find_layout
from jaxformer.parity.graphs.matching import largest, rounding_allowed
from jaxformer.parity.graphs.segments import Divergence, Walk
from jaxformer.parity.graphs.tape import Operator, Value, run_again

# Formulas hold to this share of scale; a wrong formula is off by far more than rounding.
FITS = 1e-9


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """A cause that was tried.

    Attributes:
        text: what is wrong, in a sentence.
        operator: of the candidate, where the text is about one.
    """

    text: str
    operator: Operator | None = None


def diagnose(divergence: Divergence, walk: Walk) -> Diagnosis:
    """Returns the first cause that explains a divergence; an empty text if none does."""
    for attempt in (_other_function, _other_norm, _other_number, _other_mask, _simple_relation,
                    _other_rows, _other_value):  # fmt: skip
        with np.errstate(all="ignore"):
            found = attempt(divergence, walk)
        if found is not None:
            return found
    return Diagnosis("")


def _fits(one: Any, other: np.ndarray) -> bool:
    return bool(np.abs(one - other).max() <= FITS * (largest(other) or 1.0))


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _tanh_gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "the erf GELU": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "the tanh form of GELU": _tanh_gelu,
    "the quick GELU": lambda x: x * _sigmoid(1.702 * x),
    "SiLU": lambda x: x * _sigmoid(x),
    "ReLU": lambda x: np.maximum(x, 0),
    "the square of ReLU": lambda x: np.maximum(x, 0) ** 2,
    "ReLU6": lambda x: np.clip(x, 0, 6),
    "leaky ReLU of slope 0.01": lambda x: np.where(x > 0, x, 0.01 * x),
    "ELU": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
    "SELU": lambda x: (
        1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(np.minimum(x, 0)))
    ),
    "softplus": lambda x: np.logaddexp(x, 0),
    "mish": lambda x: x * np.tanh(np.logaddexp(x, 0)),
    "hard swish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "the hard sigmoid": lambda x: np.clip(x + 3, 0, 6) / 6,
    "the sigmoid": _sigmoid,
    "tanh": np.tanh,
    "softsign": lambda x: x / (1 + np.abs(x)),
    "the square": lambda x: x * x,
    "the identity": lambda x: x,
}


def _inputs(divergence: Divergence, walk: Walk) -> Iterator[np.ndarray]:
    """Yields activations that enter the segment, in the candidate's layout."""
    for value in divergence.boundary:
        if value.is_activation:
            yield walk.array(value)


def _other_function(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    right = divergence.layout.apply(divergence.reference_value.data)
    for x in _inputs(divergence, walk):
        # Of a gated product the other factor is divided away.
        others = [y for y in _inputs(divergence, walk) if y is not x and y.shape == right.shape]
        if x.shape != right.shape:
            continue
        for gate in [None, *others]:
            names = []
            for wanted in (divergence.array, right):
                made = (
                    name
                    for name, function in FUNCTIONS.items()
                    if _fits(function(x) if gate is None else function(x) * gate, wanted)
                )
                names.append(next(made, ""))
            if all(names) and names[0] != names[1]:
                return Diagnosis(
                    f"the candidate computes {names[0]}; the reference computes {names[1]}"
                )
    return None


@dataclasses.dataclass(frozen=True)
class _Norm:
    """A way to normalise the last axis."""

    is_centred: bool
    is_biased: bool
    is_eps_inside: bool
    eps: float

    def apply(self, x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
        centred = x - x.mean(axes, keepdims=True)
        numbers = math.prod(x.shape[axis] for axis in axes)
        square = (centred if self.is_centred else x) ** 2
        total = square.sum(axes, keepdims=True)
        variance = total / (numbers if self.is_biased else max(numbers - 1, 1))
        root = np.sqrt(variance + self.eps) if self.is_eps_inside else np.sqrt(variance) + self.eps
        return (centred if self.is_centred else x) / root

    def __str__(self) -> str:
        kind = "layer norm" if self.is_centred else "RMS norm"
        place = "inside" if self.is_eps_inside else "outside"
        bias = "" if self.is_biased else ", variance divided by n - 1"
        return f"{kind} with eps {self.eps:g} {place} the root{bias}"


def _other_norm(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Identifies which norm each side computes, up to its scale and shift."""
    numbers = {n for n in (*_numbers(divergence.operators), *_numbers(
        divergence.reference_operators)) if 0 < n < 0.1}  # fmt: skip
    numbers |= {1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 0.0}
    right = divergence.layout.apply(divergence.reference_value.data)
    for x in _inputs(divergence, walk):
        if x.ndim == 0 or x.size < right.size or x.shape[-1] < 2:
            continue
        names = []
        for wanted in (divergence.array, right):
            made = (
                str(norm)
                for flags in itertools.product((True, False), repeat=3)
                for norm in (_Norm(*flags, eps) for eps in sorted(numbers))
                if _is_norm(norm, x, wanted)
            )
            names.append(next(made, ""))
        if all(names) and names[0] != names[1]:
            return Diagnosis(f"the candidate computes {names[0]}; the reference {names[1]}")
    return None


def _is_norm(norm: _Norm, x: np.ndarray, wanted: np.ndarray) -> bool:
    """Returns whether an array is a norm of x, its root, or its root's inverse."""
    made = norm.apply(x, (x.ndim - 1,))
    if wanted.shape == x.shape:
        return _fits(made, wanted)
    first = x - x.mean(-1, keepdims=True) if norm.is_centred else x
    column = np.take_along_axis(first, np.abs(first).argmax(-1)[..., None], -1)
    normed = np.take_along_axis(made, np.abs(first).argmax(-1)[..., None], -1)
    inverse = normed / column
    if wanted.size != inverse.size:
        return False
    flat = wanted.reshape(inverse.shape)
    return any(_fits(form, flat) for form in (inverse, 1 / inverse, inverse**-2))


def _numbers(operators: Sequence[Operator]) -> list[float]:
    """Returns the numbers that are written into operators."""
    found = [
        float(value.data)
        for operator in operators
        for value in operator.inputs
        if value.is_constant and value.data.size == 1 and value.data.dtype.kind in "fi"
    ]
    return found + [n for operator in operators for n in operator.numbers.values()]


def _other_number(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Puts each number of the reference in the place of each of the candidate's."""
    layout, wanted = divergence.layout, divergence.reference_value.data
    right, limit = layout.apply(wanted), rounding_allowed(wanted)
    theirs = _reference_numbers(divergence)
    known = {i: a for i, a in divergence.arrays.items()}
    made = {v.index for op in divergence.operators for v in op.outputs}
    known = {i: a for i, a in known.items() if i not in made}
    for operator in divergence.operators:
        for value in operator.inputs:
            data = value.data
            if not (value.is_constant and value.producer is None and data.size == 1):
                continue
            if data.dtype.kind not in "fi":
                continue
            number = float(data)
            for other, name in theirs.items():
                if other == number or (data.dtype.kind == "i" and other != int(other)):
                    continue
                given = {**known, value.index: np.full(data.shape, other, data.dtype)}
                try:
                    again = run_again(divergence.operators, given)[divergence.value.index]
                except (TypeError, ValueError, IndexError):
                    continue
                if again.shape == right.shape and np.abs(again - right).max() <= limit:
                    return Diagnosis(
                        f"the number {number:g} in {operator.name} must be {name}", operator
                    )
    return None


def _reference_numbers(divergence: Divergence) -> dict[float, str]:
    """Returns the numbers of the reference's segment, and simple functions of them, with names."""
    numbers = dict.fromkeys(
        [*_numbers(divergence.reference_operators), *_numbers(divergence.operators), 1.0, 2.0]
    )
    sizes = {n for v in divergence.boundary for n in v.data.shape if n > 1}
    found = {number: f"{number:g}" for number in numbers if math.isfinite(number)}
    for number in [*found]:
        for other in (-number, number + 1, number - 1):
            found.setdefault(other, f"{other:g}")
        if number > 0:
            for other in (1 / number, math.sqrt(number), 1 / math.sqrt(number), number**2):
                found.setdefault(other, f"{other:g}")
    for size in sizes:
        for power, name in ((0.5, "sqrt({})"), (-0.5, "1/sqrt({})"), (1.0, "{}"), (-1.0, "1/{}")):
            number = float(size) ** power
            found[number] = f"{number:.6g} = {name.format(size)}" if power != 1 else f"{number:g}"
    return found


def _other_mask(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Compares which entries of scores or of attention weights are hidden."""
    right = divergence.layout.apply(divergence.reference_value.data)
    own = divergence.array
    if right.ndim < 2 or right.shape[-1] < 2:
        return None
    hidden, wanted = (_hidden(array) for array in (own, right))
    if not (hidden.any() or wanted.any()) or (hidden == wanted).all():
        return None
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
        _mask_operator(divergence),
    )


def _hidden(array: np.ndarray) -> np.ndarray:
    """Returns the entries that are zero, or as low as a masked score."""
    if (array < -1e4).any() or not np.isfinite(array).all():
        return ~(array > -1e4)
    return array == 0


def _pattern(extra: np.ndarray, lost: np.ndarray) -> str:
    """Returns a name for the entries in which two masks differ."""
    size = extra.shape[-2:]
    query, key = np.indices(size)
    flat = (extra | lost).reshape(-1, *size)
    one = flat.any(0)
    if not lost.any() and one.any():
        if (one == (key == query + 1)).all():
            return ", by one: a token sees the one after it"
        if (one == (key > query)).all():
            return ": it is not causal"
    if not extra.any() and (one == (key == query)).all():
        return ", by one: a token does not see itself"
    distances = np.unique((query - key)[one])
    if len(distances) == 1 and distances[0] > 0:
        return f", by one: at the edge of a window of {distances[0] + bool(lost.any())} tokens"
    columns = one.all(0)
    if (one == (columns[None] & one.any(1)[:, None])).all() and columns.any():
        return ", in whole keys: padding"
    return ""


def _mask_operator(divergence: Divergence) -> Operator | None:
    """Returns the last operator of the user's that makes a boolean or a constant mask."""
    for operator in reversed(divergence.operators):
        made = operator.outputs[0]
        if made.data.dtype.kind == "b" and made.data.ndim >= 2 and operator.source:
            return _before_layout(operator)
    return None


def _before_layout(operator: Operator) -> Operator:
    """Returns the operator whose result is only brought into another layout."""
    while operator.name in ("broadcast_in_dim", "reshape", "squeeze", "transpose", "not"):
        producer = operator.inputs[0].producer
        if producer is None:
            break
        operator = producer
    return operator


def _simple_relation(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Tries factors, signs, caps, and terms that are missing or too many."""
    right = divergence.layout.apply(divergence.reference_value.data)
    own = divergence.array
    both = np.isfinite(own) & np.isfinite(right)
    if own.shape != right.shape or not both.all():
        return None
    factor = float((own * right).sum() / ((own * own).sum() or 1.0))
    if factor and _fits(own * factor, right):
        return Diagnosis(f"the reference's value is {_as_number(factor, right)} times this")
    missing = right - own
    for name, value in walk.reference.parameters.items():
        for sign, verb in ((1, "is missing"), (-1, "is added, the reference does not add it")):
            if _is_broadcast(sign * missing, value.data):
                return Diagnosis(f"the parameter {name} {verb}")
    candidates = [
        (value, layout)
        for value in reversed(walk.reference.values)
        if value.is_activation and value.data.size == right.size and value.index in walk.reached
        for layout in [find_layout(value.data, missing, 1e-9 * (largest(missing) or 1.0))]
        if layout is not None
    ]
    if candidates:
        value = candidates[0][0]
        return Diagnosis(f"a term is missing: what {_where(value)} gives")
    for scale in {abs(n) for n in _numbers(divergence.reference_operators) if n}:
        if scale > 1 and _fits(scale * np.tanh(own / scale), right):
            return Diagnosis(f"the reference caps it softly at {scale:g}")
        if scale > 1 and _fits(scale * np.tanh(right / scale), own):
            return Diagnosis(f"the candidate caps it softly at {scale:g}, the reference does not")
    return None


def _as_number(factor: float, array: np.ndarray) -> str:
    for size in sorted({n for n in array.shape if n > 1}):
        for power, name in ((0.5, "sqrt({})"), (-0.5, "1/sqrt({})"), (1.0, "{}"), (-1.0, "1/{}")):
            if abs(factor - size**power) <= 1e-9 * abs(factor):
                return f"{factor:.6g} = {name.format(size)}"
    return f"{factor:.6g}"


def _is_broadcast(array: np.ndarray, row: np.ndarray) -> bool:
    """Returns whether an array repeats a parameter over its other axes."""
    if row.ndim != 1 or array.ndim == 0 or not row.any():
        return False
    for axis in range(array.ndim):
        if array.shape[axis] == row.size:
            if _fits(np.moveaxis(array, axis, -1), np.broadcast_to(row, (1, row.size))):
                return True
    flat = array.reshape(-1, row.size) if array.size % row.size == 0 else array.reshape(1, -1)
    return flat.shape[-1] == row.size and _fits(flat, row[None])


def _other_rows(divergence: Divergence, walk: Walk) -> Diagnosis | None:
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
            if len(inner) and _fits(np.take(own, inner, axis), np.take(rolled, inner, axis)):
                return Diagnosis(f"its entries along axis {axis} are shifted by {shift}")
        if size % 2 == 0:
            for order, name in _interleaved(size):
                if _fits(np.take(own, order, axis), right):
                    return Diagnosis(f"along axis {axis} {name}")
    return None


def _interleaved(size: int) -> Iterator[tuple[np.ndarray, str]]:
    halves = np.arange(size).reshape(2, -1).T.reshape(-1)
    yield halves, "the candidate has halves where the reference has neighbours"
    yield np.argsort(halves), "the candidate has neighbours where the reference has halves"
    yield np.roll(np.arange(size), size // 2), "the two halves are swapped"


def _other_value(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Names the value of the reference that the candidate's end is, if it is another one."""
    matches = walk.index.find(divergence.array)
    if not matches:
        return None
    return Diagnosis(
        f"it is what {_where(matches[0].value)} gives; the reference has what "
        f"{_where(divergence.reference_value)} gives"
    )


def _where(value: Value) -> str:
    """Returns a name for a value of the reference."""
    if value.producer is None:
        return value.name or value.kind
    return f"{value.producer.module or 'the model'} ({value.producer.name})"
