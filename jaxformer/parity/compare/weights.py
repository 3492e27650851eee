"""Weights of both sides beside each other: whether they differ, and what they look like then."""

import re
from collections.abc import Iterable, Mapping

import numpy as np

from jaxformer.parity.report.model import Difference
from jaxformer.parity.tolerance import ROUNDOFF
from jaxformer.porting.formats.tensors import StoredTensor, digest

LAYER = re.compile(r"(.*?blocks)\.(\d+)\.(.*)")


def compare_weights(
    candidate: Mapping[str, np.ndarray], reference: Mapping[str, StoredTensor]
) -> tuple[dict[str, Difference], dict[str, str]]:
    """How each of our weights differs from theirs in our layout.

    Args:
        candidate: by name.
        reference: by the same names, in the same shapes.

    Returns:
        The differences, and of those that are bugs what they look like, in words.
    """
    found: dict[str, Difference] = {}
    wrong: dict[str, np.ndarray] = {}
    told: dict[str, str] = {}
    for name, tensor in reference.items():
        array = tensor.read()
        found[name] = weight_difference(candidate[name], array)
        if found[name].is_bug:
            wrong[name] = candidate[name]
            told[name] = _look(name, candidate[name], array)
    if wrong:
        strangers = _found_elsewhere(wrong, reference)
        told |= {name: f"it is their {' or '.join(of)}" for name, of in strangers.items()}
    return found, told


def weight_difference(candidate: np.ndarray, reference: np.ndarray) -> Difference:
    """Weights are the same bits, or, where one side is narrower, rounded once to its dtype."""
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
        off = np.abs(candidate.astype(np.float64) - reference.astype(np.float64))
    return Difference(float(np.max(off)), scale, narrow * scale)


def swapped_layers(wrong: Iterable[str], told: Mapping[str, str]) -> list[str]:
    """Which layers look swapped, in words: each holds what the other should."""
    elsewhere: dict[tuple[str, int], set[int]] = {}
    for name in wrong:
        here = LAYER.fullmatch(name)
        if here is None:
            continue
        others = {
            int(there[2])
            for of in told.get(name, "").removeprefix("it is their ").split(" or ")
            if (there := LAYER.fullmatch(of)) and (there[1], there[3]) == (here[1], here[3])
        }
        key = (here[1], int(here[2]))
        elsewhere[key] = elsewhere.get(key, others) & others
    return [
        f"layers {number} and {other} of {stack} look swapped"
        for (stack, number), others in sorted(elsewhere.items())
        for other in sorted(others)
        if number < other and number in elsewhere.get((stack, other), ())
    ]


def _look(name: str, candidate: np.ndarray, reference: np.ndarray) -> str:
    """What a weight looks like beside the right one."""
    mine, right = (np.asarray(a, np.float64) for a in (candidate, reference))
    if not np.isfinite(mine).all():
        return "it is not finite"
    if not mine.any():
        return "it is zero"
    if mine.ndim == 2 and mine.shape[0] == mine.shape[1] and np.array_equal(mine.T, right):
        return "it is the transpose"
    off = mine != right
    if off.sum() <= max(3, off.size // 1000):
        return f"{off.sum()} of its {off.size} elements differ"
    # Ours are kernels (in, out): their columns are the rows of a PyTorch weight.
    axes = ("inputs", "outputs") if name.endswith("kernel") else ("rows", "columns")
    for axis, called in enumerate(axes[: mine.ndim]):
        if np.array_equal(_sorted(mine, axis), _sorted(right, axis)):
            return f"its {called} are in another order"
    if mine.size and np.array_equal(np.sort(mine, axis=None), np.sort(right, axis=None)):
        return "its elements are in another order"
    return ""


def _sorted(array: np.ndarray, axis: int) -> np.ndarray:
    """The rows or columns in an order that is the same for the same set of them."""
    rows = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
    return rows[np.lexsort(rows.T[::-1])]


def _found_elsewhere(
    wrong: Mapping[str, np.ndarray], reference: Mapping[str, StoredTensor]
) -> dict[str, list[str]]:
    """Which wrong weights are, bit for bit, other ones of theirs."""
    hashes: dict[str, str] = {}
    shapes = {(a.shape, a.dtype) for a in wrong.values()}
    for name, tensor in reference.items():
        if (tensor.shape, tensor.dtype) in shapes:
            hashes[name] = digest(tensor.read())
    found = {}
    for name, array in wrong.items():
        own = digest(np.ascontiguousarray(array))
        of = [other for other, value in hashes.items() if value == own and other != name]
        if of:
            found[name] = of[:8]
    return found
