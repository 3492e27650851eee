"""Which parameters of the two sides hold the same numbers, and which almost do.

Parameters are found by content, in any layout, whole or in rows: a fused projection holds the rows
of three, a scanned model the layers of many. What matches nothing is compared with its nearest
relative.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from jaxformer.parity.cores import widened
from jaxformer.parity.matching.content import fingerprint, fingerprints_of_parts
from jaxformer.parity.matching.layouts import Layout, find_layout, nearest_layout
from jaxformer.parity.matching.values import largest
from jaxformer.parity.recording.torch_values import require_torch
from jaxformer.parity.tolerance import ROUNDOFF
from jaxformer.parity.words import apart

# Two arrays whose numbers differ by less than this share of their size are the same parameter.
RELATED = 0.5
# Of the numbers of a parameter that was computed from others, so many differ from those of its
# nearest relative; where only float32's rounding does it, fewer.
MOST_DIFFER, SOME_DIFFER = 0.9, 0.1
# Factors that are no further apart than this share of them are one.
ONE_FACTOR = 1e-5
# How far float32 brings what is computed in a few operations, of its largest number.
COMPUTED_ALLOWED = 4 * ROUNDOFF["float32"]
# Entries that are named one by one.
MOST_ENTRIES = 8


@dataclasses.dataclass(frozen=True)
class WrongParameter:
    """A parameter of the candidate that is almost one of the reference.

    Attributes:
        candidate: its path.
        reference: path of the parameter that it should be.
        message: what differs.
        error: the largest difference.
        layout: from the reference's to the candidate's.
        share: of its numbers, how many differ.
    """

    candidate: str
    reference: str
    message: str
    error: float
    layout: Layout
    share: float

    def __str__(self) -> str:
        return f"{self.candidate} is not {self.reference}: {self.message}"


@dataclasses.dataclass(frozen=True)
class ParameterMatches:
    """What became of the parameters.

    Attributes:
        whole: paths of the candidate that hold the numbers of one parameter of the reference, with
            the paths of all that have these numbers.
        in_parts: paths of the candidate that hold slices, rows or numbers of the reference, with
            the paths of those they may be of.
        wrong: those that almost do.
        unmatched: those that are like nothing in the reference.
        missing: paths of the reference whose numbers the candidate does not hold.
        partly: of those of them that it holds most of, which entries it does not hold.
        rounded: of those of the candidate that are matched because one side keeps them in 16 bits,
            the dtype of that side.
    """

    whole: dict[str, tuple[str, ...]]
    in_parts: dict[str, set[str]]
    wrong: tuple[WrongParameter, ...]
    unmatched: tuple[str, ...]
    missing: tuple[str, ...]
    partly: dict[str, str]
    rounded: Mapping[str, str] = dataclasses.field(default_factory=dict)


def match_parameters(
    sources: Mapping[str, np.ndarray], targets: Mapping[str, np.ndarray], buffers: Collection[str]
) -> ParameterMatches:
    """Finds for each parameter of the candidate those of the reference that it is made of.

    Args:
        sources: floats of the reference by path, parameters and buffers.
        targets: floats of the candidate by path.
        buffers: paths of the reference's buffers; the candidate need not have them.
    """
    twins: dict[int, list[str]] = defaultdict(list)
    for name, array in sources.items():
        twins[fingerprint(array)].append(name)
    prints = {name: fingerprint(array) for name, array in targets.items()}
    whole = {name: tuple(twins[one]) for name, one in prints.items() if one in twins}
    used = set().union(*whole.values())
    # Rows of what is left: parts of a fused or stacked parameter.
    rest = {n: a for n, a in sources.items() if n not in used}
    parts = Parts(rest)
    left = [name for name in targets if name not in whole]
    in_parts = {n: owners for n in left if (owners := parts.owners(targets[n])) is not None}
    used = used.union(*in_parts.values())
    left = [n for n in left if n not in in_parts]
    missing = [n for n in rest if n not in used and n not in buffers]
    if missing:
        own_parts = Parts({n: targets[n] for n in in_parts})
        missing = [n for n in missing if own_parts.owners(sources[n]) is None]
    wrong, unmatched = [], []
    for name in left:
        relative = _nearest(targets[name], {n: sources[n] for n in missing})
        if relative is None:
            unmatched.append(name)
            continue
        source, layout = relative
        if _is_computed(targets[name], layout.apply(sources[source].astype(np.float64))):
            unmatched.append(name)
            continue
        missing.remove(source)
        wrong.append(_describe(name, targets[name], source, sources[source], layout))
    held = Parts({n: targets[n] for n in unmatched} if missing else {})
    partly = {n: entries for n in missing if (entries := held.lacking(sources[n]))}
    return ParameterMatches(whole, in_parts, tuple(wrong), tuple(unmatched), tuple(missing), partly)


class Parts:
    """Slices and lines of arrays, by their numbers.

    Args:
        arrays: by name.
    """

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._owners: dict[int, set[str]] = defaultdict(set)
        for name, array in arrays.items():
            for _, prints in fingerprints_of_parts(np.atleast_1d(array)):
                for one in np.unique(prints).tolist():
                    self._owners[one].add(name)

    def owners(self, array: np.ndarray) -> set[str] | None:
        """Returns the names of those that hold all slices of an array, None if none do."""
        for _, prints in fingerprints_of_parts(np.atleast_1d(array)) if self._owners else ():
            found = [self._owners.get(one) for one in np.unique(prints).tolist()]
            if all(found):
                return set().union(*(names for names in found if names))
        return None

    def lacking(self, array: np.ndarray) -> str:
        """Returns which few slices of an array none of them holds, "" if there are no such."""
        for axes, prints in fingerprints_of_parts(np.atleast_1d(array)):
            if len(axes) == 1:
                held = [one in self._owners for one in prints.tolist()]
                entries = _few_entries(~np.array(held), axes[0])
                if entries:
                    return entries
        return ""


def _few_entries(wrong: np.ndarray, axis: int) -> str:
    """Returns which entries of an axis are wrong, given that of each; "" if none or many are."""
    rows = np.flatnonzero(wrong)
    if not 0 < len(rows) <= MOST_ENTRIES or not len(rows) < len(wrong) / 2:
        return ""
    return f"entries {', '.join(map(str, rows))} of axis {axis}"


def _nearest(array: np.ndarray, sources: Mapping[str, np.ndarray]) -> tuple[str, Layout] | None:
    """Returns the parameter of the same size that differs least, and in which layout."""
    best: tuple[float, str, Layout] | None = None
    array = array.astype(np.float64)
    for name, other in sources.items():
        if other.size != array.size:
            continue
        found = nearest_layout(other, array)
        if found is not None and found[1] < RELATED and (best is None or found[1] < best[0]):
            best = found[1], name, found[0]
    return None if best is None else (best[1], best[2])


def _is_computed(array: np.ndarray, near: np.ndarray) -> bool:
    """Returns whether a parameter is no copy of its nearest relative, but was computed from it.

    A conversion may fold a scale of each row into a matrix and into its bias. Then nearly all
    numbers differ, and not by one factor. Or it may compute in float32 what the reference computes
    each time: then they differ by no more than rounding.

    Args:
        array: the parameter of the candidate.
        near: its relative in the reference, float64, in the candidate's layout.
    """
    share = float((array != near).mean())
    far = float(np.abs(array - near).max())
    if far <= COMPUTED_ALLOWED * float(np.abs(near).max()):
        return share > SOME_DIFFER
    if share < MOST_DIFFER:
        return False
    factors = np.ones(array.shape)
    np.divide(array, near, out=factors, where=near != 0)
    if _are_one(factors[near != 0]):
        return False
    return array.ndim == 1 or any(
        all(
            _are_one(line[known])
            for line, known in zip(
                np.moveaxis(factors, axis, 0), np.moveaxis(near != 0, axis, 0), strict=True
            )
        )
        for axis in range(array.ndim)
    )


def _are_one(factors: np.ndarray) -> bool:
    """Returns whether some factors are one number in float32."""
    return not factors.size or bool(np.ptp(factors) <= ONE_FACTOR * abs(factors.mean()))


def _describe(
    name: str, array: np.ndarray, source_name: str, source: np.ndarray, layout: Layout
) -> WrongParameter:
    wanted = layout.apply(source.astype(np.float64))
    far = np.abs(array - wanted)
    wrong = far > 2.0**-20 * np.abs(wanted).max()
    share = float(wrong.mean())
    message = describe_entries(wrong)
    ratio = array[wanted != 0] / wanted[wanted != 0]
    if not message.startswith("equal but") and ratio.size and _are_one(ratio):
        message = f"it is {apart(float(ratio.mean()), 1.0)} times the reference's"
    return WrongParameter(name, source_name, message, float(far.max()), layout, share)


def describe_entries(wrong: np.ndarray) -> str:
    """Returns which numbers of an array are wrong, in a few words.

    Args:
        wrong: of each number, whether it is.
    """
    for axis in range(wrong.ndim):
        others = tuple(i for i in range(wrong.ndim) if i != axis)
        entries = _few_entries(np.asarray(wrong.any(axis=others)), axis)
        if entries:
            return f"equal but for {entries}"
    return f"{float(wrong.mean()):.0%} of its numbers differ"


def in_reference_numbers(
    matches: ParameterMatches, sources: Mapping[str, np.ndarray], targets: Mapping[str, np.ndarray]
) -> dict[str, Callable[[], np.ndarray]]:
    """Returns what reads the parameters that are equal to the reference's, or should be.

    Args:
        matches: what became of the parameters.
        sources: floats of the reference by path.
        targets: floats of the candidate by path.

    Returns:
        by path of the candidate a function that returns the reference's numbers in float64, in the
        candidate's layout.
    """
    found = {w.candidate: _reader(sources[w.reference], w.layout) for w in matches.wrong}
    for name, twins in matches.whole.items():
        source = sources[twins[0]]
        layout = find_layout(source, targets[name], ROUNDOFF["float32"] * largest(source))
        if layout is not None:
            found[name] = _reader(source, layout[0])
    return found


def _reader(source: np.ndarray, layout: Layout) -> Callable[[], np.ndarray]:
    return lambda: layout.apply(widened(source))


def buffers_with_gradients(module: Any, targets: Mapping[str, np.ndarray]) -> list[str]:
    """Returns the buffers of the reference that are parameters of the candidate.

    Args:
        module: the reference.
        targets: floats of the candidate by path.
    """
    norms = {
        id(buffer)
        for inner in module.modules()
        if isinstance(inner, require_torch().nn.modules.batchnorm._NormBase)
        for buffer in inner.buffers(recurse=False)
    }
    buffers = {
        name: buffer.detach().cpu().double().numpy()
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point() and id(buffer) not in norms
    }
    sizes = {array.size for array in buffers.values()}
    held = {fingerprint(array) for array in targets.values() if array.size in sizes}
    # What a parameter holds too is that parameter in the candidate.
    others = {
        fingerprint(parameter.detach().cpu().double().numpy())
        for parameter in module.parameters()
        if parameter.is_floating_point() and parameter.numel() in sizes
    }
    return [name for name, array in buffers.items() if fingerprint(array) in held - others]
