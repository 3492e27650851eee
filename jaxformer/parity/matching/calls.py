"""Calls of a pair of modules laid beside each other: their numbers in the form of ours."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.matching.alignment import Lineup, Way, line_up, way_to
from jaxformer.parity.matching.modules import Pair
from jaxformer.parity.trace import jax_trace as jax_side
from jaxformer.parity.trace import torch_trace as torch_side
from jaxformer.parity.trace.padding import Padding
from jaxformer.porting.mapping.rules import ONE_TO_ONE

Array = np.ndarray | None
UNCALLED = "neither side calls it"


@dataclasses.dataclass(frozen=True)
class Meeting:
    """One call of a pair of modules.

    Attributes:
        pair: which.
        ours: a call of each of ours.
        theirs: a call of each of theirs.
        entering: for each of ours, its inputs beside those of theirs.
        leaving: for each of ours, its outputs beside those of theirs that hold them.
        repeats: how often ours makes this call, with the same inputs, where theirs makes it once.
    """

    pair: Pair
    ours: tuple[jax_side.Call, ...]
    theirs: tuple[torch_side.Call, ...]
    entering: tuple[Lineup, ...]
    leaving: tuple[Lineup, ...]
    repeats: int = 1

    def inputs(self, place: int) -> list[Array]:
        """What entered theirs."""
        return self.entering[place].values(self.theirs[0].inputs)

    def integers(self, place: int) -> list[np.ndarray]:
        """What integers entered theirs, where both sides take one array of the same shape."""
        mine, theirs = self.ours[place].integers, self.theirs[0].integers
        alike = len(mine) == len(theirs) == 1 and tuple(mine[0].shape) == theirs[0].shape
        return list(theirs) if alike else []

    def answers(self, place: int) -> list[Array]:
        """What theirs gave."""
        return self.leaving[place].values(self._parted([c.outputs for c in self.theirs])[place])

    def output_gradients(self, place: int) -> list[Array]:
        """The gradients of what theirs gave."""
        gradients = [
            [
                np.broadcast_to(0.0, a.shape) if g is None else g
                for a, g in zip(call.outputs, call.output_gradients, strict=True)
            ]
            for call in self.theirs
        ]
        parted = self._parted(gradients)[place]
        return self.leaving[place].gradients(parted, range(len(parted)))

    def input_gradients(self) -> list[Array]:
        """The gradients of the inputs of the first of ours, for all of ours together."""
        total: list[Array] = []
        for call in self.theirs:
            mine = self.entering[0].gradients(call.input_gradients, call.identities)
            total = [_sum(a, b) for a, b in zip(total, mine, strict=True)] if total else mine
        return total

    def groups(self) -> list[list[int]]:
        """Inputs of the first of ours whose gradients are known only together."""
        return self.entering[0].groups(self.theirs[0].identities)

    def _parted(self, theirs: Sequence[Sequence[np.ndarray]]) -> Sequence[Sequence[np.ndarray]]:
        return _parted(self.pair, theirs, self.ours)


def _sum(a: Array, b: Array) -> Array:
    return b if a is None else a if b is None else a + b


def _parted(
    pair: Pair, theirs: Sequence[Sequence[np.ndarray]], ours: Sequence[jax_side.Call]
) -> list[list[np.ndarray]]:
    """Arrays that left theirs, for each of ours those that hold its own."""
    if pair.packing is ONE_TO_ONE:
        return [list(theirs[0])]
    first = [arrays[0] for arrays in theirs]
    widths = [call.outputs[0].shape[-1] for call in ours]
    parted = pair.part(first, [(*first[0].shape[:-1], width) for width in widths])
    return [[array] for array in parted]


def meet(
    pair: Pair, calls: Mapping[str, jax_side.Call], theirs: torch_side.Trace
) -> tuple[list[Meeting], str]:
    """The calls of a pair beside each other, or none and the reason."""
    our_calls = [calls[path].all for path in pair.ours if path in calls]
    their_calls = [theirs.calls[path].all for path in pair.theirs if path in theirs.calls]
    if not our_calls and not their_calls:
        return [], UNCALLED
    if len(our_calls) < len(pair.ours):
        return [], "theirs is called, ours is not"
    if len(their_calls) < len(pair.theirs):
        return [], "ours is called, theirs is not"
    if not pair.alone:
        return [], "compared as a part of what is around it"
    counts = {len(each) for each in our_calls}, {len(each) for each in their_calls}
    if len(counts[0] | counts[1]) > 1 and counts[1] != {1}:
        return [], f"called {_times(counts[0])} by ours, {_times(counts[1])} by theirs"
    repeats = max(counts[0]) if counts[1] == {1} else 1
    rounds = min(min(counts[0]), min(counts[1]))
    meetings = []
    for number in range(rounds):
        mine = tuple(each[number] for each in our_calls)
        other = tuple(each[number] for each in their_calls)
        leaving = _leaving(pair, mine, other, theirs.padding)
        if leaving is None:
            shapes = " and ".join(_shapes(c[0].outputs) for c in (mine, other))
            return [], f"the outputs cannot be laid beside each other: ours {shapes} theirs"
        entering = tuple(line_up(call.inputs, other[0].inputs, theirs.padding) for call in mine)
        meetings.append(Meeting(pair, mine, other, entering, leaving, repeats))
    return meetings, ""


def _leaving(
    pair: Pair,
    ours: Sequence[jax_side.Call],
    theirs: Sequence[torch_side.Call],
    padding: Padding,
) -> tuple[Lineup, ...] | None:
    if not (all(call.outputs for call in ours) and all(call.outputs for call in theirs)):
        return None
    try:
        parted = _parted(pair, [call.outputs for call in theirs], ours)
    except (ValueError, IndexError):
        return None
    lineups = []
    for call, arrays in zip(ours, parted, strict=True):
        if len(arrays) == 1:
            way: Way | None = way_to(arrays[0], call.outputs[0], padding)
            more = len(call.outputs) - 1
            lineups.append(
                Lineup((None if way is None else 0, *[None] * more), (way, *[None] * more))
            )
        else:
            lineups.append(line_up(call.outputs, arrays, padding))
        if lineups[-1].places[0] is None:
            return None
    return tuple(lineups)


def _times(counts: set[int]) -> str:
    return " or ".join(str(n) for n in sorted(counts)) + (" times" if counts != {1} else " time")


def _shapes(arrays: Sequence[Any]) -> str:
    return ", ".join(str(tuple(a.shape)) for a in arrays) or "none"
