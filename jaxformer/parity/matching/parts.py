"""Puts together for a parameter of the candidate what belongs to parts of the reference's.

A fused kernel has its rows from three projections, a stacked one its slices from the layers. The
gradient of such a parameter is put together from the same places as its numbers.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from jaxformer.parity.matching.content import MOST_NUMBERS, fingerprints_of_parts
from jaxformer.parity.matching.layouts import Layout, find_layout
from jaxformer.parity.matching.values import rounding_allowed

Index = tuple[int | slice, ...]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of an array of the candidate, and where it stands in the reference.

    Attributes:
        at: the part of the candidate's array.
        name: of the reference's array.
        source: the part of the reference's array.
        layout: from that part to the candidate's.
        is_flat: whether both parts are runs of the arrays laid out as one line, and not rows or
            slices.
    """

    at: Index
    name: str
    source: Index
    layout: Layout
    is_flat: bool = False


def find_pieces(array: np.ndarray, sources: Mapping[str, np.ndarray]) -> list[Piece] | None:
    """Returns the pieces that make up an array; None if one cannot be found, or stands twice.

    Args:
        array: of the candidate, floats.
        sources: of the reference, by path.
    """
    places: dict[int, list[_Place]] = {}
    for name, source in sources.items():
        for axes, prints in fingerprints_of_parts(source):
            if len(axes) == source.ndim:
                continue
            for index, one in np.ndenumerate(prints):
                place = _Place(name, axes, tuple(index))
                places.setdefault(int(one), []).append(place)
    for axes, prints in fingerprints_of_parts(array):
        if len(axes) == array.ndim:
            return _find_runs(array, sources)
        found = [places.get(int(one), []) for one in prints.flat]
        if any(len(each) != 1 for each in found):
            continue
        only = [each[0] for each in found]
        # A block of neighbours is one piece where all of it has one layout.
        for blocks in (_neighbours(only), [(place, 1) for place in range(len(only))]):
            pieces = [
                _piece(array, axes, prints.shape, block, only[block[0]], sources)
                for block in blocks
            ]
            if all(pieces):
                return [piece for piece in pieces if piece]
    return None


@dataclasses.dataclass(frozen=True)
class _Place:
    """A part of an array of the reference: its name, along which axes it is one, and which."""

    name: str
    axes: tuple[int, ...]
    index: tuple[int, ...]

    def is_before(self, other: "_Place") -> bool:
        """Returns whether another part comes next along the same axis."""
        same = self.name == other.name and self.axes == other.axes and len(self.axes) == 1
        return same and self.index[0] + 1 == other.index[0]


def _neighbours(places: Sequence[_Place]) -> list[tuple[int, int]]:
    """Returns where runs of parts begin that come one after another, and how long they are."""
    starts = [n for n, place in enumerate(places) if n == 0 or not places[n - 1].is_before(place)]
    return [
        (start, end - start) for start, end in zip(starts, [*starts[1:], len(places)], strict=True)
    ]


def _piece(
    array: np.ndarray,
    axes: tuple[int, ...],
    shape: tuple[int, ...],
    block: tuple[int, int],
    place: _Place,
    sources: Mapping[str, np.ndarray],
) -> Piece | None:
    """Returns a block of parts of an array as one piece, None if it is none.

    Args:
        array: of the candidate.
        axes: along which it is divided into parts.
        shape: of these axes.
        block: the first part and how many parts it has.
        place: of the first part, in the reference.
        sources: of the reference, by path.
    """
    first, count = block
    if count == math.prod(shape):
        at: Index = (slice(None),) * array.ndim
    elif len(axes) == 1 and count > 1:
        at = _index(array.ndim, axes, (slice(first, first + count),))
    elif count == 1:
        at = _index(array.ndim, axes, tuple(map(int, np.unravel_index(first, shape))))
    else:
        return None
    source = sources[place.name]
    start = place.index[0] if place.index else 0
    which = place.index if count == 1 else (slice(start, start + count),)
    source_at = _index(source.ndim, place.axes, which)
    own, other = np.atleast_1d(array[at]), np.atleast_1d(source[source_at])
    layout = find_layout(other, own, rounding_allowed(other))
    return None if layout is None else Piece(at, place.name, source_at, layout[0])


def _find_runs(array: np.ndarray, sources: Mapping[str, np.ndarray]) -> list[Piece] | None:
    """Returns the runs of numbers that make up an array, such as a bias in a fused one."""
    own = _bits(array)
    lines = {name: _bits(a) for name, a in sources.items() if a.size <= MOST_NUMBERS}
    places: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for name, line in lines.items():
        for place, one in enumerate(line.tolist()):
            places[one].append((name, place))
    pieces, first = [], 0
    while first < own.size:
        # A number may stand in several places, a long run hardly ever.
        runs = [
            (_common(own[first:], lines[name][place:]), name, place)
            for name, place in places.get(int(own[first]), ())
        ]
        length = max((run[0] for run in runs), default=0)
        longest = [run for run in runs if run[0] == length]
        if len(longest) != 1:
            return None
        _, name, place = longest[0]
        layout = Layout((length,), (0,), (length,))
        at, source = slice(first, first + length), slice(place, place + length)
        pieces.append(Piece((at,), name, (source,), layout, is_flat=True))
        first += length
    return pieces


def _bits(array: np.ndarray) -> np.ndarray:
    """Returns the bits of an array's numbers as float32, in a line; those of -0 are those of 0."""
    return (array.astype(np.float32) + np.float32(0)).reshape(-1).view(np.uint32)


def _common(one: np.ndarray, other: np.ndarray) -> int:
    """Returns how many numbers two lines have in common, from the first on."""
    size = min(one.size, other.size)
    differs = one[:size] != other[:size]
    return int(differs.argmax()) if differs.any() else size


def assemble(
    shape: tuple[int, ...], pieces: Collection[Piece], arrays: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Returns an array made of pieces of others.

    Args:
        shape: of the result.
        pieces: where each part comes from.
        arrays: by the pieces' names, in the layout of the arrays in which the pieces were found.
    """
    made = np.zeros(shape)
    flat = made.reshape(-1)
    for piece in pieces:
        if piece.is_flat:
            flat[piece.at] = arrays[piece.name].reshape(-1)[piece.source]
            continue
        part = piece.layout.apply(np.atleast_1d(arrays[piece.name][piece.source]))
        made[piece.at] = part.reshape(made[piece.at].shape)
    return made


def _index(rank: int, axes: tuple[int, ...], index: tuple[int | slice, ...]) -> Index:
    """Returns what takes one entry, or a block, along some axes and all along the others."""
    full: list[int | slice] = [slice(None)] * rank
    for axis, place in zip(axes, index, strict=True):
        full[axis] = place
    return tuple(full)
