"""Which parameters of the two sides hold the same numbers, and which almost do.

Parameters are found by content, in any layout, whole or in rows: a fused projection holds the rows
of three, a scanned model the layers of many. What matches nothing is compared with its nearest
relative.
"""

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

from jaxformer.parity.graphs.layouts import Layout, nearest_layout
from jaxformer.parity.graphs.tape import Tape, Value

# Two arrays whose numbers differ by less than this share of their size are the same parameter.
RELATED = 0.5
# Vectors up to this length may be taken apart: a bias of a fused projection.
MOST_NUMBERS = 1 << 16


@dataclasses.dataclass(frozen=True)
class WrongParameter:
    """A parameter of the candidate that is almost one of the reference.

    Attributes:
        candidate: its path.
        reference: path of the parameter that it should be.
        message: what differs.
        error: the largest difference.
        layout: from the reference's to the candidate's.
    """

    candidate: str
    reference: str
    message: str
    error: float
    layout: Layout


@dataclasses.dataclass(frozen=True)
class ParameterMatches:
    """What became of the parameters.

    Attributes:
        matched: paths of the candidate that hold the numbers of the reference.
        wrong: those that almost do.
        unmatched: those that are like nothing in the reference.
        missing: paths of the reference whose numbers the candidate does not hold.
    """

    matched: tuple[str, ...]
    wrong: tuple[WrongParameter, ...]
    unmatched: tuple[str, ...]
    missing: tuple[str, ...]


def match_parameters(reference: Tape, candidate: Tape) -> ParameterMatches:
    """Finds for each parameter of the candidate those of the reference that it is made of."""
    sources = {n: v.data for n, v in _named(reference).items() if v.data.dtype.kind == "f"}
    targets = {n: v.data for n, v in candidate.parameters.items() if _is_float(v)}
    whole: dict[bytes, list[str]] = defaultdict(list)
    for name, array in sources.items():
        whole[_key(array)].append(name)
    used: set[str] = set()
    matched: list[str] = []
    left: list[str] = []
    for name, array in targets.items():
        twins = whole.get(_key(array), [])
        used.update(twins)
        (matched if twins else left).append(name)
    # Rows of what is left: parts of a fused or stacked parameter.
    rest = {n: a for n, a in sources.items() if n not in used}
    lines = _lines(rest)
    for name in list(left):
        owners = _owners(targets[name], lines)
        if owners is not None:
            used |= owners
            matched.append(name)
            left.remove(name)
    missing = [n for n in reference.parameters if n in rest and n not in used]
    own_lines = _lines({n: targets[n] for n in matched})
    missing = [n for n in missing if _owners(sources[n], own_lines) is None]
    wrong, unmatched = [], []
    for name in left:
        relative = _nearest(targets[name], {n: sources[n] for n in missing})
        if relative is None:
            unmatched.append(name)
            continue
        source, layout = relative
        missing.remove(source)
        wrong.append(_describe(name, targets[name], source, sources[source], layout))
    return ParameterMatches(tuple(matched), tuple(wrong), tuple(unmatched), tuple(missing))


def _lines(arrays: Mapping[str, np.ndarray]) -> dict[bytes, set[str]]:
    """Returns who has which line of numbers along any axis, or which slice across any."""
    found: dict[bytes, set[str]] = defaultdict(set)
    for name, array in arrays.items():
        for keys in _keys_by_axis(array):
            for key in keys:
                found[key].add(name)
    return found


def _owners(array: np.ndarray, lines: Mapping[bytes, set[str]]) -> set[str] | None:
    """Returns the parameters that hold all slices of an array along one axis, None if none do."""
    for keys in _keys_by_axis(array):
        if all(key in lines for key in keys):
            return set().union(*(lines[key] for key in keys))
    return None


def _is_float(value: Value) -> bool:
    return getattr(value.data.dtype, "kind", "") == "f"


def _named(tape: Tape) -> dict[str, Value]:
    """Returns the parameters and the buffers."""
    buffers = {v.name: v for v in tape.values if v.kind == "constant" and v.name}
    return {**buffers, **tape.parameters}


def _key(numbers: np.ndarray) -> bytes:
    """Returns what arrays of the same numbers in any order have in common, in float32."""
    narrow = np.sort(numbers.astype(np.float32), axis=None) + np.float32(0)
    return hashlib.blake2b(narrow.tobytes(), digest_size=16).digest()


def _keys_by_axis(array: np.ndarray) -> Iterator[list[bytes]]:
    """Yields the keys of slices across each axis, then those of lines along each axis."""
    if array.ndim == 1:
        yield [_key(array)]
        if array.size <= MOST_NUMBERS:
            yield [_key(number) for number in array]
    for axis in range(array.ndim if array.ndim > 1 else 0):
        yield [_key(part) for part in np.moveaxis(array, axis, 0)]
    for axis in range(array.ndim if array.ndim > 2 else 0):
        yield [_key(line) for line in np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])]


def _nearest(array: np.ndarray, sources: Mapping[str, np.ndarray]) -> tuple[str, Layout] | None:
    """Returns the parameter of the same size that differs least, and in which layout."""
    best: tuple[float, str, Layout] | None = None
    for name, other in sources.items():
        if other.size != array.size:
            continue
        found = nearest_layout(other, array)
        if found is not None and found[1] < RELATED and (best is None or found[1] < best[0]):
            best = found[1], name, found[0]
    return None if best is None else (best[1], best[2])


def _describe(
    name: str, array: np.ndarray, source_name: str, source: np.ndarray, layout: Layout
) -> WrongParameter:
    wanted = layout.apply(source)
    far = np.abs(array - wanted)
    wrong = far > 2.0**-20 * np.abs(wanted).max()
    share = float(wrong.mean())
    message = f"{share:.0%} of its numbers differ"
    for axis in range(array.ndim):
        others = tuple(i for i in range(array.ndim) if i != axis)
        rows = np.flatnonzero(wrong.any(axis=others))
        if 0 < len(rows) <= 8 and len(rows) < array.shape[axis] / 2:
            listed = ", ".join(map(str, rows))
            message = f"equal but for entries {listed} of axis {axis}"
            break
    else:
        ratio = array[wanted != 0] / wanted[wanted != 0]
        if ratio.size and np.ptp(ratio) < 1e-5 * abs(ratio.mean()):
            message = f"it is {ratio.mean():.6g} times the reference's"
    return WrongParameter(name, source_name, message, float(far.max()), layout)
