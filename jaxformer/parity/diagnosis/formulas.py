"""Names the function, norm or softmax that each side of a segment computes."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.diagnosis.evidence import (
    FITS_IN_FLOAT32,
    Diagnosis,
    activations_of,
    added_numbers,
    fits,
    has_many_numbers,
    name_both,
    numbers_of,
    sides_of,
)
from jaxformer.parity.segments.divergences import Divergence
from jaxformer.parity.segments.walk import Walk

# Of fewer numbers, beside 0, 1 and -1, several functions make the same: halves of zeros and ones
# are their softsign too.
FEWEST_NUMBERS = 3
# The same of what they make: many functions make zeros alone.
FEWEST_RESULTS = 3


def _erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[np.float64])(x)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _tanh_gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


NO_FUNCTION = "the identity"

FUNCTIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    # The first: of positive numbers a ReLU is the identity.
    NO_FUNCTION: lambda x: x,
    "the erf GELU": lambda x: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "the tanh form of GELU": _tanh_gelu,
    "the quick GELU": lambda x: x * _sigmoid(1.702 * x),
    "SiLU": lambda x: x * _sigmoid(x),
    "ReLU": lambda x: np.maximum(x, 0),
    # Before that of a ReLU, which of positive numbers is the same.
    "the square": lambda x: x * x,
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
}


# Those that are x times a function, which may end a segment.
SELF_GATED = (
    "the erf GELU", "the tanh form of GELU", "the quick GELU", "SiLU", "mish", "hard swish",
    "the square of ReLU",
)  # fmt: skip


def other_function(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Names the activation function of each side, also where it is multiplied by a gate."""
    shape = divergence.array.shape
    entering = [value for value in divergence.boundary if value.is_activation]
    # What a part of a function, which enters, was made of.
    makers = [value.producer for value in entering if value.producer is not None]
    before = dict.fromkeys(
        read
        for maker in makers
        for read in maker.inputs
        if read.is_activation and read.shape == shape and read not in entering
    )
    arrays = [*activations_of(divergence, walk), *map(walk.array, before)]
    inputs = [x for x in arrays if x.shape == shape]
    first = None
    for x in inputs:
        if not has_many_numbers(x[(x != 0) & (np.abs(x) != 1)], FEWEST_NUMBERS):
            continue
        gates = [1.0, *(gate for gate in inputs if gate is not x)]

        def whole(name: str, made: np.ndarray, gates: Any = tuple(gates)) -> list[np.ndarray]:
            return [made * gate for gate in gates]

        def whole_or_part(
            name: str, made: np.ndarray, x: Any = x, whole: Any = whole
        ) -> list[np.ndarray]:
            parts = [made / x, 2 * made / x, 2 * made / x - 1] if name in SELF_GATED else []
            return [*whole(name, made), *parts]

        # A part of the function, such as its tanh, may end the segment. A sigmoid is a part of
        # SiLU, too: whole functions come first.
        for forms_of in (whole, whole_or_part):
            found = _other_function_of(divergence, x, forms_of)
            if found is None:
                continue
            if NO_FUNCTION not in found.text:
                return found
            # What enters may be made by the function that both compute, before another one.
            first = first or found
    return first


def _other_function_of(
    divergence: Divergence,
    x: np.ndarray,
    forms_of: Callable[[str, np.ndarray], list[np.ndarray]],
) -> Diagnosis | None:
    """Returns a diagnosis if both sides compute functions of x, and not the same.

    Both must be in the same form: a ReLU alone is no counterpart of the identity times a ReLU.

    Args:
        divergence: the segment.
        x: what the functions read.
        forms_of: returns the forms in which values of a function may be what is computed.
    """
    own, right = (_identify(x, forms_of, array) for array in sides_of(divergence))
    for form in sorted(own.keys() & right.keys()):
        if own[form] != right[form]:
            text = f"the candidate computes {own[form]}; the reference computes {right[form]}"
            return Diagnosis(text)
    return None


def _identify(
    x: np.ndarray, forms_of: Callable[[str, np.ndarray], list[np.ndarray]], wanted: np.ndarray
) -> dict[int, str]:
    """Returns the names of functions that make of x what is wanted, by the place of their form.

    Args:
        x: what they read.
        forms_of: returns the forms in which values of a function may be what is wanted.
        wanted: an array.
    """
    found: dict[int, str] = {}
    if has_many_numbers(wanted, FEWEST_RESULTS):
        for name, function in FUNCTIONS.items():
            for place, form in enumerate(forms_of(name, function(x))):
                if place not in found and fits(form, wanted, FITS_IN_FLOAT32):
                    found[place] = name
    return found


PAIRS: dict[str, Callable[[Any, Any], Any]] = {
    "the sum": lambda a, b: a + b,
    "the product": lambda a, b: a * b,
    "the difference": lambda a, b: a - b,
    "the first alone": lambda a, b: a,
}


def other_combination(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Names how two activations are put together."""
    shape = divergence.array.shape
    values = [v for v in divergence.boundary if v.is_activation and v.shape == shape]
    for one, other in itertools.permutations(values, 2):
        a, b = walk.array(one), walk.array(other)

        def identify(wanted: np.ndarray, a: Any = a, b: Any = b) -> str:
            return next((n for n, f in PAIRS.items() if fits(f(a, b), wanted)), "")

        found = name_both(divergence, identify)
        if found is not None:
            return found
    return None


def other_softmax(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Names how each side makes weights of scores, with the axis."""
    # The exponentials alone may end the segment, where the reference has weights later.
    whole = divergence.required.data, divergence.required_reference.data
    for x in activations_of(divergence, walk):
        for own, right in (sides_of(divergence), whole):
            names = _name_weights(x, own), _name_weights(x, right)
            if all(names) and names[0] != names[1]:
                text = f"the candidate computes {names[0]}; the reference computes {names[1]}"
                return Diagnosis(text)
    return None


def _name_weights(x: np.ndarray, wanted: np.ndarray) -> str:
    """Returns how weights are made of scores, "" if they are not."""
    if wanted.shape != x.shape:
        return ""
    for axis in range(x.ndim):
        raised = np.exp(x - x.max(axis, keepdims=True))
        if fits(raised / raised.sum(axis, keepdims=True), wanted):
            return f"a softmax along axis {axis}"
        if x.shape[axis] > 1 and fits(x / x.sum(axis, keepdims=True), wanted):
            return f"shares of the sum along axis {axis}"
    return ""


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

    @property
    def divisors(self) -> tuple[str, str, str]:
        """Names of the factor that it multiplies by, the inverse of that, and its square."""
        if self.eps:
            return (str(self),) * 3
        # What eps is added to later, if it is.
        square = "the variance" if self.is_centred else "the mean of squares"
        square += "" if self.is_biased else " with n - 1 in place of n"
        return f"the inverse root of {square}", f"the root of {square}", square

    def __str__(self) -> str:
        kind = "layer norm" if self.is_centred else "RMS norm"
        place = "inside" if self.is_eps_inside else "outside"
        bias = "" if self.is_biased else ", variance divided by n - 1"
        return f"{kind} with eps {self.eps:g} {place} the root{bias}"


def other_norm(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Identifies which norm each side computes, with its scale and shift or without."""
    numbers = {
        *numbers_of(divergence.operators),
        *numbers_of(divergence.reference_operators),
        *added_numbers(divergence),
    }
    written = sorted(n for n in numbers if 0 < n < 0.1)
    # An eps of 1e-12 is nearly none: the number that a side has is likelier than one it has not.
    epsilons = dict.fromkeys([*written, 0.0, 1e-12, 1e-8, 1e-6, 1e-5, 1e-3])
    for x in activations_of(divergence, walk):
        if x.ndim == 0 or x.size < divergence.array.size or x.shape[-1] < 2:
            continue
        size = x.shape[-1]
        weights = [v for v in divergence.boundary if v.is_weight and v.size == size]
        rows = [walk.array(v).reshape(-1) for v in weights]
        rows += [
            v.data.reshape(-1)
            for v in divergence.reference_boundary
            if v.is_weight and v.size == size
        ]
        norms = [
            _Norm(centred, biased, inside, eps)
            for centred, biased, inside in itertools.product((True, False), repeat=3)
            for eps in epsilons
        ]

        def identify(wanted: np.ndarray, x: Any = x, rows: Any = rows, norms: Any = norms) -> str:
            if wanted.shape == x.shape and any(fits(x * row, wanted) for row in [1.0, *rows]):
                return "no norm"
            return next(filter(None, (_name_norm(norm, x, wanted, rows) for norm in norms)), "")

        found = name_both(divergence, identify)
        if found is not None:
            return found
    return None


def _name_norm(norm: _Norm, x: np.ndarray, wanted: np.ndarray, rows: Sequence[Any]) -> str:
    """Returns the name of a norm of x, scaled and shifted, or of what it divides by; else ""."""
    made = norm.apply(x, (x.ndim - 1,))
    if wanted.shape == x.shape:
        pairs = itertools.product([1.0, *rows], [0.0, *rows])
        return str(norm) if any(fits(made * a + b, wanted) for a, b in pairs) else ""
    first = x - x.mean(-1, keepdims=True) if norm.is_centred else x
    largest_at = np.abs(first).argmax(-1)[..., None]
    column = np.take_along_axis(first, largest_at, -1)
    inverse = np.take_along_axis(made, largest_at, -1) / column
    if wanted.size != inverse.size:
        return ""
    flat = wanted.reshape(inverse.shape)
    forms = (inverse, 1 / inverse, inverse**-2)
    found = (name for name, form in zip(norm.divisors, forms, strict=True) if fits(form, flat))
    return next(found, "")
