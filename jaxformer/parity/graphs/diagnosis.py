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

from jaxformer.parity.graphs.layouts import find_layout, layouts
from jaxformer.parity.graphs.matching import largest, rounding_allowed
from jaxformer.parity.graphs.segments import Divergence, Walk
from jaxformer.parity.graphs.tape import Operator, Value

# Formulas hold to this share of scale; a wrong formula is off by far more than rounding.
FITS = 1e-9
# The same where a number is put in the place of another.
NUMBER_FITS = 1e-6
# How many layouts of another input are tried.
MOST_LAYOUTS = 8
# Numbers that a reference may hold in a table and not in an operator: bases of rotary positions.
COMMON_NUMBERS = (1.0, 2.0, 1e4, 5e5, 1e6)


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
    for attempt in ATTEMPTS:
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


def _inputs(divergence: Divergence, walk: Walk) -> list[np.ndarray]:
    """Returns activations that enter the segment, then those of which they are parts."""
    entering = [value for value in divergence.boundary if value.is_activation]
    whole = [
        read
        for value in entering
        if value.producer is not None
        for read in value.producer.inputs
        if read.is_activation and read.data.size > value.data.size
    ]
    return [walk.array(value) for value in dict.fromkeys([*entering, *whole])]


def _sides(divergence: Divergence) -> tuple[np.ndarray, np.ndarray]:
    """Returns what the candidate computes, and what it must be."""
    return divergence.array, divergence.layout.apply(divergence.reference_value.data)


def _both(
    divergence: Divergence, identify: Callable[[np.ndarray], str], verb: str = "computes"
) -> Diagnosis | None:
    """Returns a diagnosis if both sides have a name, and not the same."""
    own, right = (identify(wanted) for wanted in _sides(divergence))
    if own and right and own != right:
        return Diagnosis(f"the candidate {verb} {own}; the reference {verb} {right}")
    return None


def _other_function(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    shape = divergence.array.shape
    inputs = [x for x in _inputs(divergence, walk) if x.shape == shape]
    for x in inputs:
        # A part of the function, such as its tanh, may end the segment.
        gates = [1.0, *(gate for gate in inputs if gate is not x), 1 / x, 2 / x]

        def identify(wanted: np.ndarray, x: Any = x, gates: Any = tuple(gates)) -> str:
            for name, function in FUNCTIONS.items():
                made = function(x)
                if any(_fits(made * gate, wanted) for gate in gates):
                    return name
                if _fits(2 * made / x - 1, wanted):
                    return name
            return ""

        found = _both(divergence, identify)
        if found is not None:
            return found
    return None


PAIRS: dict[str, Callable[[Any, Any], Any]] = {
    "the sum": lambda a, b: a + b,
    "the product": lambda a, b: a * b,
    "the difference": lambda a, b: a - b,
    "the first alone": lambda a, b: a,
}


def _other_combination(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Names how two activations are put together."""
    shape = divergence.array.shape
    values = [v for v in divergence.boundary if v.is_activation and v.data.shape == shape]
    for one, other in itertools.permutations(values, 2):
        a, b = walk.array(one), walk.array(other)

        def identify(wanted: np.ndarray, a: Any = a, b: Any = b) -> str:
            return next((n for n, f in PAIRS.items() if _fits(f(a, b), wanted)), "")

        found = _both(divergence, identify)
        if found is not None:
            return found
    return None


def _other_softmax(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Names the axis of a softmax."""
    for x in _inputs(divergence, walk):

        def identify(wanted: np.ndarray, x: Any = x) -> str:
            if wanted.shape != x.shape:
                return ""
            for axis in range(x.ndim):
                raised = np.exp(x - x.max(axis, keepdims=True))
                if _fits(raised / raised.sum(axis, keepdims=True), wanted):
                    return f"a softmax along axis {axis}"
            return ""

        found = _both(divergence, identify)
        if found is not None:
            return found
    return None


def _other_rotation(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Names the layout, base and first position of rotary positions."""
    numbers = {*_numbers(divergence.operators), *_numbers(divergence.reference_operators)}
    bases = sorted({n for n in numbers if n >= 100} | {1e4, 5e5, 1e6})
    for x in _inputs(divergence, walk):
        if x.shape != divergence.array.shape or x.ndim < 3 or x.shape[-1] % 2:
            continue

        def identify(wanted: np.ndarray, x: Any = x) -> str:
            if _fits(x, wanted):
                return "nothing"
            for axis in range(x.ndim - 1):
                for base, start, sign, is_interleaved in itertools.product(
                    bases, (0, 1, -1), (1, -1), (False, True)
                ):
                    # The base's own tables may be in float32.
                    turned = _rotate(x, axis, base, start, sign, is_interleaved)
                    if np.abs(turned - wanted).max() <= 1e-5 * largest(wanted):
                        pairs = "neighbours" if is_interleaved else "halves"
                        back = " backwards" if sign < 0 else ""
                        return f"{pairs}{back} with base {base:g}, the first position {start}"
            return ""

        found = _both(divergence, identify, "rotates")
        if found is not None:
            return found
    return None


def _rotate(
    x: np.ndarray, axis: int, base: float, start: int, sign: int, is_interleaved: bool
) -> np.ndarray:
    size = x.shape[-1]
    inverse = base ** -(np.arange(0, size, 2) / size)
    angles = sign * (start + np.arange(x.shape[axis]))[:, None] * inverse
    shape = [1] * x.ndim
    shape[axis], shape[-1] = angles.shape
    cos, sin = (f(angles).reshape(shape) for f in (np.cos, np.sin))
    if is_interleaved:
        one, two = x[..., ::2], x[..., 1::2]
        pair = np.stack([one * cos - two * sin, two * cos + one * sin], -1)
        return pair.reshape(x.shape)
    one, two = np.split(x, 2, -1)
    return np.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


def _other_input(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Lets each operator read another value of the reference of the same size."""
    made = {v.index for op in divergence.operators for v in op.outputs}
    others = list(dict.fromkeys([
        *divergence.reference_boundary,
        *(v for op in divergence.reference_operators for v in op.outputs),
        *walk.reference.parameters.values(),
    ]))  # fmt: skip
    for operator in reversed(divergence.operators):
        for value in operator.inputs:
            if value.index in made or value.is_constant or value.data.dtype.kind != "f":
                continue
            array = walk.array(value)
            for other in others:
                if other.is_weight != value.is_weight or other.data.size != array.size:
                    continue
                for layout in itertools.islice(
                    layouts(other.data.shape, array.shape), MOST_LAYOUTS
                ):
                    if divergence.agrees({value.index: layout.apply(other.data)}, FITS):
                        return Diagnosis(
                            f"{operator.name} reads {_own_name(value, walk)}; it must read "
                            f"{_where(other)}",
                            operator,
                        )
    return None


def _own_name(value: Value, walk: Walk) -> str:
    """Returns a name for a value of the candidate, by the reference's where they are equal."""
    if value.producer is None:
        return value.name
    matches = walk.matches.get(value.index)
    return _where(matches[0].value) if matches else f"the result of {value.producer.name}"


def _other_axes(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Finds the right numbers in another order of the axes."""
    own, right = _sides(divergence)
    found = find_layout(right, own, rounding_allowed(right))
    if found is None or found[0].is_reshape:
        return None
    return Diagnosis("its numbers are right, but axes are transposed or split in another order")


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
    """Identifies which norm each side computes, with its scale and shift or without."""
    numbers = {*_numbers(divergence.operators), *_numbers(divergence.reference_operators)}
    numbers = {n for n in numbers if 0 < n < 0.1} | {1e-5, 1e-6, 1e-12, 1e-8, 1e-3, 0.0}
    for x in _inputs(divergence, walk):
        if x.ndim == 0 or x.size < divergence.array.size or x.shape[-1] < 2:
            continue
        size = x.shape[-1]
        weights = [v for v in divergence.boundary if v.is_weight and v.data.size == size]
        rows = [walk.array(v).reshape(-1) for v in weights]
        rows += [
            v.data.reshape(-1)
            for v in divergence.reference_boundary
            if v.is_weight and v.data.size == size
        ]
        norms = [
            _Norm(centred, biased, inside, eps)
            for centred, biased, inside in itertools.product((True, False), repeat=3)
            for eps in sorted(numbers)
        ]

        def identify(wanted: np.ndarray, x: Any = x, rows: Any = rows, norms: Any = norms) -> str:
            if wanted.shape == x.shape and any(_fits(x * row, wanted) for row in [1.0, *rows]):
                return "no norm"
            for norm in norms:
                if _is_norm(norm, x, wanted, rows):
                    return str(norm)
            return ""

        found = _both(divergence, identify)
        if found is not None:
            return found
    return None


def _is_norm(norm: _Norm, x: np.ndarray, wanted: np.ndarray, rows: Sequence[Any]) -> bool:
    """Returns whether an array is a norm of x, scaled and shifted, its root, or its inverse."""
    made = norm.apply(x, (x.ndim - 1,))
    if wanted.shape == x.shape:
        return any(
            _fits(made * scale + shift, wanted) for scale in [1.0, *rows] for shift in [0.0, *rows]
        )
    first = x - x.mean(-1, keepdims=True) if norm.is_centred else x
    largest_at = np.abs(first).argmax(-1)[..., None]
    column = np.take_along_axis(first, largest_at, -1)
    inverse = np.take_along_axis(made, largest_at, -1) / column
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
    substitutes = _reference_numbers(divergence)
    for operator in divergence.operators:
        for value in operator.inputs:
            data = value.data
            if not (value.is_constant and value.producer is None and data.size == 1):
                continue
            if data.dtype.kind not in "fi":
                continue
            number = float(data)
            for other, name in substitutes.items():
                if other == number or (data.dtype.kind == "i" and other != int(other)):
                    continue
                given = {value.index: np.full(data.shape, other, data.dtype)}
                try:
                    # The reference may have a table in float32.
                    is_right = divergence.agrees(given, NUMBER_FITS)
                except (TypeError, ValueError, IndexError):
                    continue
                if is_right:
                    absent = {"mul": 1, "div": 1, "add": 0, "sub": 0, "pow": 1}.get(operator.name)
                    extra = ": the reference has no such step" if absent == other else ""
                    text = f"the number {number:g} in {operator.name} must be {name}{extra}"
                    return Diagnosis(text, operator)
    return None


def _reference_numbers(divergence: Divergence) -> dict[float, str]:
    """Returns the numbers of the reference's segment, and simple functions of them, with names."""
    numbers = dict.fromkeys(
        (
            *_numbers(divergence.reference_operators),
            *_numbers(divergence.operators),
            *COMMON_NUMBERS,
        )
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
        return Diagnosis(f"a term is missing: {_where(value)}")
    numbers = (*_numbers(divergence.reference_operators), *_numbers(divergence.operators))
    for scale in {abs(n) for n in numbers if n}:
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
        if array.shape[axis] == row.size and _fits(np.moveaxis(array, axis, -1), row):
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
        f"it equals {_where(matches[0].value)}; it must be {_where(divergence.reference_value)}"
    )


def _where(value: Value) -> str:
    """Returns a name for a value of the reference."""
    if value.producer is None:
        return f"the {value.kind} {value.name}".rstrip()
    return f"the {value.producer.name} of {value.producer.module or 'the model'}"


# The most specific first.
ATTEMPTS = (
    _other_function, _other_norm, _other_softmax, _other_combination, _other_mask,
    _other_number, _other_rotation, _simple_relation, _other_axes, _other_rows, _other_input,
    _other_value,
)  # fmt: skip
