"""Compares the weights of both sides, and says what a wrong weight looks like."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.errors import UsageError, mismatches
from jaxformer.parity.report.model import Difference
from jaxformer.parity.tolerance import ROUNDOFF
from jaxformer.porting.formats.tensors import StoredTensor, digest

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
        array = tensor.read()
        own = np.asarray(candidate[name])
        differences[name] = weight_difference(own, array)
        if differences[name].is_bug:
            looks[name] = _describe(name, own, array)
    places = _find_elsewhere({name: np.asarray(candidate[name]) for name in looks}, reference)
    return differences, {name: WrongWeight(looks[name], places.get(name, ())) for name in looks}


def weight_difference(candidate: np.ndarray, reference: np.ndarray) -> Difference:
    """Compares two weights: equal bits, or if one dtype is narrower, rounded once to it."""
    scale = float(np.max(np.abs(reference))) if reference.size else 0.0
    if candidate.dtype == reference.dtype and np.array_equal(candidate, reference):
        return Difference(0.0, scale, 0.0)
    narrow = max(
        (
            ROUNDOFF.get(a.dtype.name, 0.0)
            for a in (candidate, reference)
            if candidate.dtype != reference.dtype
        ),
        default=0.0,
    )
    with np.errstate(invalid="ignore"):
        error = np.abs(candidate.astype(np.float64) - reference.astype(np.float64))
    return Difference(float(np.max(error)), scale, narrow * scale)


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
    wrong, right = (np.asarray(a, np.float64) for a in (candidate, reference))
    if not np.isfinite(wrong).all():
        return "it is not finite"
    if not wrong.any():
        return "it is zero"
    if wrong.ndim == 2 and wrong.shape[0] == wrong.shape[1] and np.array_equal(wrong.T, right):
        return "it is the transpose"
    differs = wrong != right
    if differs.sum() <= max(3, differs.size // 1000):
        return f"{differs.sum()} of its {differs.size} elements differ"
    # Kernels are (in, out): their columns are the rows of a PyTorch weight.
    axes = ("inputs", "outputs") if name.endswith("kernel") else ("rows", "columns")
    for axis, axis_name in enumerate(axes[: wrong.ndim]):
        if np.array_equal(_sort_slices(wrong, axis), _sort_slices(right, axis)):
            return f"its {axis_name} are in another order"
    if wrong.size and np.array_equal(np.sort(wrong, axis=None), np.sort(right, axis=None)):
        return "its elements are in another order"
    return ""


def _sort_slices(array: np.ndarray, axis: int) -> np.ndarray:
    """Returns the slices along an axis in an order that depends only on the set of them."""
    rows = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
    return rows[np.lexsort(rows.T[::-1])]


def _find_elsewhere(
    wrong: Mapping[str, np.ndarray], reference: Mapping[str, StoredTensor]
) -> dict[str, tuple[str, ...]]:
    """Returns which wrong weights have the bits of reference weights of other names."""
    shapes = {(a.shape, a.dtype) for a in wrong.values()}
    hashes = {
        name: digest(tensor.read())
        for name, tensor in reference.items()
        if (tensor.shape, tensor.dtype) in shapes
    }
    found = {}
    for name, array in wrong.items():
        own = digest(np.ascontiguousarray(array))
        places = [other for other, value in hashes.items() if value == own and other != name]
        if places:
            found[name] = tuple(places[:8])
    return found
