"""Calls of a pair of modules laid beside each other: their numbers in the form of ours."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.matching.alignment import (
    LayoutTransform,
    TensorAlignment,
    align_tensors,
    transform_to,
)
from jaxformer.parity.matching.modules import Pair
from jaxformer.parity.trace import jax_trace as jax_trace
from jaxformer.parity.trace import torch_trace as torch_trace
from jaxformer.parity.trace.padding import Padding
from jaxformer.porting.mapping.rules import ONE_TO_ONE

Array = np.ndarray | None
UNCALLED = "neither side calls it"


@dataclasses.dataclass(frozen=True)
class MatchedCall:
    """One call of a pair of modules.

    Attributes:
        pair: which.
        candidate: a call of each of ours.
        reference: a call of each of theirs.
        entering: for each of ours, its inputs beside those of theirs.
        leaving: for each of ours, its outputs beside those of theirs that hold them.
        repeats: how often ours makes this call, with the same inputs, where theirs makes it once.
    """

    pair: Pair
    candidate: tuple[jax_trace.Call, ...]
    reference: tuple[torch_trace.Call, ...]
    entering: tuple[TensorAlignment, ...]
    leaving: tuple[TensorAlignment, ...]
    repeats: int = 1

    def inputs(self, place: int) -> list[Array]:
        """What entered theirs."""
        return self.entering[place].values(self.reference[0].inputs)

    def integers(self, place: int) -> list[np.ndarray]:
        """What integers entered theirs, where both sides take one array of the same shape."""
        mine, reference = self.candidate[place].integers, self.reference[0].integers
        alike = len(mine) == len(reference) == 1 and tuple(mine[0].shape) == reference[0].shape
        return list(reference) if alike else []

    def answers(self, place: int) -> list[Array]:
        """What theirs gave."""
        return self.leaving[place].values(
            self._diverged([c.outputs for c in self.reference])[place]
        )

    def output_gradients(self, place: int) -> list[Array]:
        """The gradients of what theirs gave."""
        gradients = [
            [
                np.broadcast_to(0.0, a.shape) if g is None else g
                for a, g in zip(call.outputs, call.output_gradients, strict=True)
            ]
            for call in self.reference
        ]
        diverged = self._diverged(gradients)[place]
        return self.leaving[place].gradients(diverged, range(len(diverged)))

    def input_gradients(self) -> list[Array]:
        """The gradients of the inputs of the first of ours, for all of ours together."""
        total: list[Array] = []
        for call in self.reference:
            mine = self.entering[0].gradients(call.input_gradients, call.identities)
            total = [_sum(a, b) for a, b in zip(total, mine, strict=True)] if total else mine
        return total

    def groups(self) -> list[list[int]]:
        """Inputs of the first of ours whose gradients are known only together."""
        return self.entering[0].groups(self.reference[0].identities)

    def _diverged(
        self, reference: Sequence[Sequence[np.ndarray]]
    ) -> Sequence[Sequence[np.ndarray]]:
        return _diverged(self.pair, reference, self.candidate)


def _sum(a: Array, b: Array) -> Array:
    return b if a is None else a if b is None else a + b


def _diverged(
    pair: Pair, reference: Sequence[Sequence[np.ndarray]], candidate: Sequence[jax_trace.Call]
) -> list[list[np.ndarray]]:
    """Arrays that left theirs, for each of ours those that hold its own."""
    if pair.packing is ONE_TO_ONE:
        return [list(reference[0])]
    first = [arrays[0] for arrays in reference]
    widths = [call.outputs[0].shape[-1] for call in candidate]
    diverged = pair.part(first, [(*first[0].shape[:-1], width) for width in widths])
    return [[array] for array in diverged]


def match_calls(
    pair: Pair, calls: Mapping[str, jax_trace.Call], reference: torch_trace.Trace
) -> tuple[list[MatchedCall], str]:
    """The calls of a pair beside each other, or none and the reason."""
    candidate_calls = [calls[path].all for path in pair.candidate if path in calls]
    reference_calls = [
        reference.calls[path].all for path in pair.reference if path in reference.calls
    ]
    if not candidate_calls and not reference_calls:
        return [], UNCALLED
    if len(candidate_calls) < len(pair.candidate):
        return [], "theirs is called, ours is not"
    if len(reference_calls) < len(pair.reference):
        return [], "ours is called, theirs is not"
    if not pair.alone:
        return [], "compared as a part of what is around it"
    counts = {len(each) for each in candidate_calls}, {len(each) for each in reference_calls}
    if len(counts[0] | counts[1]) > 1 and counts[1] != {1}:
        return [], f"called {_times(counts[0])} by ours, {_times(counts[1])} by theirs"
    repeats = max(counts[0]) if counts[1] == {1} else 1
    rounds = min(min(counts[0]), min(counts[1]))
    matched_calls = []
    for number in range(rounds):
        mine = tuple(each[number] for each in candidate_calls)
        other = tuple(each[number] for each in reference_calls)
        leaving = _leaving(pair, mine, other, reference.padding)
        if leaving is None:
            shapes = " and ".join(_shapes(c[0].outputs) for c in (mine, other))
            return [], f"the outputs cannot be laid beside each other: ours {shapes} theirs"
        entering = tuple(
            align_tensors(call.inputs, other[0].inputs, reference.padding) for call in mine
        )
        matched_calls.append(MatchedCall(pair, mine, other, entering, leaving, repeats))
    return matched_calls, ""


def _leaving(
    pair: Pair,
    candidate: Sequence[jax_trace.Call],
    reference: Sequence[torch_trace.Call],
    padding: Padding,
) -> tuple[TensorAlignment, ...] | None:
    if not (all(call.outputs for call in candidate) and all(call.outputs for call in reference)):
        return None
    try:
        diverged = _diverged(pair, [call.outputs for call in reference], candidate)
    except (ValueError, IndexError):
        return None
    alignments = []
    for call, arrays in zip(candidate, diverged, strict=True):
        if len(arrays) == 1:
            transform: LayoutTransform | None = transform_to(arrays[0], call.outputs[0], padding)
            more = len(call.outputs) - 1
            alignments.append(
                TensorAlignment(
                    (None if transform is None else 0, *[None] * more), (transform, *[None] * more)
                )
            )
        else:
            alignments.append(align_tensors(call.outputs, arrays, padding))
        if alignments[-1].places[0] is None:
            return None
    return tuple(alignments)


def _times(counts: set[int]) -> str:
    return " or ".join(str(n) for n in sorted(counts)) + (" times" if counts != {1} else " time")


def _shapes(arrays: Sequence[Any]) -> str:
    return ", ".join(str(tuple(a.shape)) for a in arrays) or "none"
