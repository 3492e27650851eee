"""Compares the weights of both sides, and says what a wrong weight looks like."""

import dataclasses
import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.errors import UsageError, mismatches
from jaxformer.parity.findings import Difference
from jaxformer.parity.tolerance import ROUNDOFF
from jaxformer.porting.formats.tensors import StoredTensor, digest

# Elements that are compared at a time.
CHUNK = 1 << 21
LAYER = re.compile(r"(.*?blocks)\.(\d+)\.(.*)")


@dataclasses.dataclass(frozen=True)
class WrongWeight:
    """What a wrong weight of the candidate looks like.

    Attributes:
        look: in words, e.g. "it is the transpose"; "" if it looks like nothing known.
        found_at: names of other reference weights that have the same bits.
    """

    look: str = ""
    found_at: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.found_at:
            return f"it is the reference's {' or '.join(self.found_at)}"
        return self.look


def compare_weights(
    candidate: Mapping[str, Any], reference: Mapping[str, StoredTensor]
) -> tuple[dict[str, Difference], dict[str, WrongWeight]]:
    """Compares each weight of the candidate with the reference's, in the candidate's layout.

    Args:
        candidate: by name.
        reference: by the same names, in the same shapes.

    Returns:
        The differences, and what the weights with a bug look like.

    Raises:
        UsageError: names or shapes differ; all such are listed.
    """
    problems = mismatches(
        {name: tensor.shape for name, tensor in reference.items()},
        {name: array.shape for name, array in candidate.items()},
        "has shape",
    )
    if problems:
        raise UsageError(
            "the candidate has another architecture than the reference: " + "; ".join(problems)
        )
    differences: dict[str, Difference] = {}
    looks: dict[str, str] = {}
    for name, tensor in reference.items():
        differences[name], look = compare_weight(name, np.asarray(candidate[name]), tensor.read())
        if look is not None:
            looks[name] = look
    wrong = {name: StoredTensor.of(np.asarray(candidate[name])) for name in looks}
    return differences, describe_places(looks, wrong, reference)


def compare_weight(
    name: str, candidate: np.ndarray, reference: np.ndarray
) -> tuple[Difference, str | None]:
    """Returns the difference of one weight, and what it looks like; None if it is right."""
    difference = weight_difference(candidate, reference)
    return difference, _describe(name, candidate, reference) if difference.is_bug else None


def find_wrong_weights(
    candidate: Mapping[str, Any], reference: Mapping[str, StoredTensor]
) -> dict[str, np.ndarray]:
    """Returns the reference's numbers of the candidate's wrong weights, by name.

    What one side lacks, or has in another shape, is left out.
    """
    wrong = {}
    for name, tensor in reference.items():
        if name in candidate and candidate[name].shape == tensor.shape:
            expected = tensor.read()
            if weight_difference(np.asarray(candidate[name]), expected).is_bug:
                wrong[name] = expected
    return wrong


def describe_places(
    looks: Mapping[str, str],
    candidate: Mapping[str, StoredTensor],
    reference: Mapping[str, StoredTensor],
) -> dict[str, WrongWeight]:
    """Returns all that is known of wrong weights: what they look like, and whose bits they have.

    Args:
        looks: of each wrong weight, by name.
        candidate: the wrong weights.
        reference: all weights of the reference.
    """
    places = _find_elsewhere({name: candidate[name] for name in looks}, reference)
    return {name: WrongWeight(look, places.get(name, ())) for name, look in looks.items()}


def weight_difference(candidate: np.ndarray, reference: np.ndarray) -> Difference:
    """Compares two weights: equal bits, or if one dtype is narrower, rounded once to it."""
    narrow = max(
        (
            ROUNDOFF.get(a.dtype.name, 0.0)
            for a in (candidate, reference)
            if candidate.dtype != reference.dtype
        ),
        default=0.0,
    )
    error = scale = 0.0
    for one, other in zip(_chunks(candidate), _chunks(reference), strict=True):
        scale = float(np.maximum(scale, _largest(other)))
        if candidate.dtype != reference.dtype or not np.array_equal(_bits(one), _bits(other)):
            with np.errstate(invalid="ignore"):
                distance = np.abs(one.astype(np.float64) - other.astype(np.float64))
            error = float(np.maximum(error, distance.max()))
    return Difference(error, scale, narrow * scale)


def _chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields an array in parts of a few megabytes: a whole one in float64 may not fit."""
    flat = array.reshape(-1)
    for start in range(0, flat.size, CHUNK):
        yield flat[start : start + CHUNK]


def _bits(array: np.ndarray) -> np.ndarray:
    """Returns an array's bits as integers, which numpy compares faster than short floats."""
    return array.view(f"u{array.dtype.itemsize}")


def _largest(array: np.ndarray) -> float:
    """Returns the largest magnitude, NaN if there is one."""
    if array.dtype.itemsize == 1:
        return float(np.abs(array.astype(np.float64)).max())
    # Without its sign a float grows with its bits, and NaN is beyond infinity.
    bits = _bits(array)
    magnitudes = bits & (np.iinfo(bits.dtype).max >> 1)
    return float(magnitudes.max(keepdims=True).view(array.dtype).astype(np.float64)[0])


def find_swapped_layers(wrong: Mapping[str, WrongWeight]) -> list[str]:
    """Describes which layers look swapped: each holds the weights of the other.

    Args:
        wrong: all wrong weights, by name.
    """
    # By stack and layer: the layers whose weights all of its wrong weights are.
    held: dict[tuple[str, int], set[int]] = {}
    for name, weight in wrong.items():
        place = LAYER.fullmatch(name)
        if place is None:
            continue
        others = {
            int(other[2])
            for found in weight.found_at
            if (other := LAYER.fullmatch(found)) and (other[1], other[3]) == (place[1], place[3])
        }
        key = (place[1], int(place[2]))
        held[key] = held.get(key, others) & others
    return [
        f"layers {number} and {other} of {stack} look swapped"
        for (stack, number), others in sorted(held.items())
        for other in sorted(others)
        if number < other and number in held.get((stack, other), ())
    ]


def describe_wrong_weights(
    wrong: Mapping[str, WrongWeight], parameters: Sequence[str], path: str
) -> str:
    """Returns a description of those of a module's parameters that are wrong, "" if none is.

    Args:
        wrong: all wrong weights, by name.
        parameters: names of the module's own parameters.
        path: of the module; parameters are named within it.
    """
    shown = []
    for name in parameters:
        if name in wrong:
            look = str(wrong[name])
            shown.append(name.removeprefix(f"{path}.") + (f" ({look})" if look else ""))
    return f"its weights differ: {', '.join(shown)}" if shown else ""


def _describe(name: str, candidate: np.ndarray, reference: np.ndarray) -> str:
    """Returns what a wrong weight looks like beside the right one, "" if like nothing known."""
    is_square = candidate.ndim == 2 and candidate.shape[0] == candidate.shape[1]
    count, is_finite, is_zero = 0, True, True
    for wrong, right in zip(_chunks(candidate), _chunks(reference), strict=True):
        one = wrong.astype(np.float64)
        is_finite = is_finite and bool(np.isfinite(one).all())
        is_zero = is_zero and not one.any()
        count += int((one != right.astype(np.float64)).sum())
    if not is_finite:
        return "it is not finite"
    if is_zero:
        return "it is zero"
    if is_square and np.array_equal(candidate.T, reference):
        return "it is the transpose"
    if count <= max(3, candidate.size // 1000):
        return f"{count} of its {candidate.size} elements differ"
    # Kernels are (in, out): their columns are the rows of a PyTorch weight.
    axes = ("inputs", "outputs") if name.endswith("kernel") else ("rows", "columns")
    for axis, axis_name in enumerate(axes[: candidate.ndim]):
        if _slices(candidate, axis) == _slices(reference, axis):
            return f"its {axis_name} are in another order"
    ordered, expected = (np.sort(a, axis=None) for a in (candidate, reference))
    if candidate.size and np.array_equal(ordered, expected):
        return "its elements are in another order"
    return ""


def _slices(array: np.ndarray, axis: int) -> Counter[bytes]:
    """Returns how often each slice along an axis occurs, by a hash of its values."""
    slices: Counter[bytes] = Counter()
    rows = np.moveaxis(array, axis, 0)
    step = max(1, CHUNK * len(rows) // array.size)
    for start in range(0, len(rows), step):
        # Zero has two signs, which are equal.
        part = np.ascontiguousarray(rows[start : start + step]).astype(np.float64) + 0.0
        slices.update(hashlib.blake2b(row.tobytes()).digest() for row in part)
    return slices


def _find_elsewhere(
    wrong: Mapping[str, StoredTensor], reference: Mapping[str, StoredTensor]
) -> dict[str, tuple[str, ...]]:
    """Returns which wrong weights have the bits of reference weights of other names."""
    shapes = {(a.shape, a.dtype) for a in wrong.values()}
    hashes = {
        name: digest(tensor.read())
        for name, tensor in reference.items()
        if (tensor.shape, tensor.dtype) in shapes
    }
    found = {}
    for name, tensor in wrong.items():
        own = digest(tensor.read())
        places = [other for other, value in hashes.items() if value == own and other != name]
        if places:
            found[name] = tuple(places[:8])
    return found
