"""Puts together for a parameter of the candidate what belongs to parts of the reference's.

A fused kernel has its rows from three projections, a stacked one its slices from the layers. The
gradient of such a parameter is put together from the same places as its numbers.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Mapping

import numpy as np

from jaxformer.parity.matching.operators.content import MOST_NUMBERS, fingerprints_of_parts
from jaxformer.parity.matching.operators.layouts import Layout, find_layout
from jaxformer.parity.matching.operators.values import rounding_allowed

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
    places: dict[int, list[tuple[str, Index]]] = {}
    for name, source in sources.items():
        for axes, prints in fingerprints_of_parts(source):
            if len(axes) == source.ndim:
                continue
            for index, one in np.ndenumerate(prints):
                places.setdefault(int(one), []).append((name, _index(source.ndim, axes, index)))
    for axes, prints in fingerprints_of_parts(array):
        if len(axes) == array.ndim:
            return _find_runs(array, sources)
        pieces = []
        for index, one in np.ndenumerate(prints):
            found = places.get(int(one), ())
            if len(found) != 1:
                break
            (name, source_index), at = found[0], _index(array.ndim, axes, index)
            own, other = np.atleast_1d(array[at]), np.atleast_1d(sources[name][source_index])
            layout = find_layout(other, own, max(rounding_allowed(other), 0.0))
            if layout is None:
                break
            pieces.append(Piece(at, name, source_index, layout[0]))
        else:
            return pieces
    return None


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


def _index(rank: int, axes: tuple[int, ...], index: tuple[int, ...]) -> Index:
    """Returns what takes one entry along some axes and all along the others."""
    full: list[int | slice] = [slice(None)] * rank
    for axis, place in zip(axes, index, strict=True):
        full[axis] = place
    return tuple(full)
