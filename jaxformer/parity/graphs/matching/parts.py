"""Puts together for a parameter of the candidate what belongs to parts of the reference's.

A fused kernel has its rows from three projections, a stacked one its slices from the layers. The
gradient of such a parameter is put together from the same places as its numbers.
"""

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np

from jaxformer.parity.graphs.matching.content import fingerprints_of_parts
from jaxformer.parity.graphs.matching.layouts import Layout, find_layout
from jaxformer.parity.graphs.matching.values import rounding_allowed

Index = tuple[int | slice, ...]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of an array of the candidate, and where it stands in the reference.

    Attributes:
        at: the part of the candidate's array.
        name: of the reference's array.
        source: the part of the reference's array.
        layout: from that part to the candidate's.
    """

    at: Index
    name: str
    source: Index
    layout: Layout


def find_pieces(array: np.ndarray, sources: Mapping[str, np.ndarray]) -> list[Piece] | None:
    """Returns the pieces that make up an array; None if one cannot be found, or stands twice.

    Args:
        array: of the candidate, floats.
        sources: of the reference, by path.
    """
    places: dict[int, list[tuple[str, Index]]] = {}
    for name, source in sources.items():
        for axes, prints in fingerprints_of_parts(source):
            for index, one in np.ndenumerate(prints):
                places.setdefault(int(one), []).append((name, _index(source.ndim, axes, index)))
    for axes, prints in fingerprints_of_parts(array):
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
    for piece in pieces:
        part = piece.layout.apply(np.atleast_1d(arrays[piece.name][piece.source]))
        made[piece.at] = part.reshape(made[piece.at].shape)
    return made


def _index(rank: int, axes: tuple[int, ...], index: tuple[int, ...]) -> Index:
    """Returns what takes one entry along some axes and all along the others."""
    full: list[int | slice] = [slice(None)] * rank
    for axis, place in zip(axes, index, strict=True):
        full[axis] = place
    return tuple(full)
