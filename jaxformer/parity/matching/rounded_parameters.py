"""Parameters that one side keeps in 16 bits: they have the other's numbers, each rounded once.

Such a parameter is no bug. It is found among the numbers of the reference, rounded likewise, whole
or in parts, and both sides then compute with the reference's numbers.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jaxformer.parity.matching.content import fingerprint
from jaxformer.parity.matching.parameters import (
    ParameterMatches,
    Parts,
    in_reference_numbers,
    match_parameters,
)
from jaxformer.parity.matching.parts import Piece, assemble, find_pieces

DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
Arrays = Mapping[str, np.ndarray]
Readers = Mapping[str, Callable[[], np.ndarray]]


def match_parameters_in_full(
    sources: Arrays, targets: Arrays, buffers: Collection[str]
) -> tuple[ParameterMatches, Readers]:
    """Matches parameters as ``match_parameters`` does, those of 16 bits on one side too.

    Args:
        sources: floats of the reference by path, parameters and buffers.
        targets: floats of the candidate by path.
        buffers: paths of the reference's buffers.

    Returns:
        what became of the parameters, and by path of the candidate what reads the reference's
        numbers; see ``in_reference_numbers``.
    """
    matches = match_parameters(sources, targets, buffers)
    found = dict(_find_rounded(matches, sources, targets))
    if not found:
        return matches, in_reference_numbers(matches, sources, targets)
    full = {name: each.read(sources).astype(np.float32) for name, each in found.items()}
    targets = {**targets, **full}
    matches = dataclasses.replace(
        match_parameters(sources, targets, buffers),
        rounded={name: each.dtype for name, each in sorted(found.items())},
    )
    readers = {name: _reader(each, sources) for name, each in found.items()}
    return matches, {**in_reference_numbers(matches, sources, targets), **readers}


@dataclasses.dataclass(frozen=True)
class _Rounded:
    """A parameter of the candidate that has rounded numbers, or whose rounded numbers it has.

    Attributes:
        dtype: of the side that is rounded.
        shape: of the parameter.
        pieces: where its numbers stand in the reference.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def read(self, sources: Arrays) -> np.ndarray:
        """Returns the reference's numbers, float64."""
        return assemble(self.shape, self.pieces, sources)


def _reader(rounded: _Rounded, sources: Arrays) -> Callable[[], np.ndarray]:
    return lambda: rounded.read(sources)


def _find_rounded(
    matches: ParameterMatches, sources: Arrays, targets: Arrays
) -> Iterator[tuple[str, _Rounded]]:
    """Yields those of the parameters without a match that have one in 16 bits, by their paths."""
    names = [*(one.candidate for one in matches.wrong), *matches.unmatched]
    left = {name: targets[name] for name in names}
    free = {n: sources[n] for n in (*(one.reference for one in matches.wrong), *matches.missing)}
    for dtype in DTYPES:
        if not any(_is_narrow(array, dtype) for array in (*left.values(), *free.values())):
            continue
        rounded = _without_twins({name: _round(array, dtype) for name, array in free.items()})
        parts = Parts(rounded)
        for name, array in [*left.items()]:
            own = _round(array, dtype)
            owners = parts.owners(own)
            pieces = owners and find_pieces(own, {owner: rounded[owner] for owner in owners})
            if pieces and (
                _is_narrow(array, dtype)
                or all(_is_narrow(free[piece.name], dtype) for piece in pieces)
            ):
                del left[name]
                yield name, _Rounded(dtype.name, array.shape, tuple(pieces))


def _round(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns an array rounded to a dtype, as float32."""
    with np.errstate(over="ignore"):
        return array.astype(np.float32).astype(dtype).astype(np.float32)


def _is_narrow(array: np.ndarray, dtype: Any) -> bool:
    """Returns whether a dtype has all numbers of an array."""
    return np.array_equal(_round(array, dtype), array)


def _without_twins(arrays: Arrays) -> dict[str, np.ndarray]:
    """Returns one of the arrays that hold the same numbers, of each kind."""
    return {name: arrays[name] for name in {fingerprint(a): n for n, a in arrays.items()}.values()}
