"""Matches the calls of a pair of modules; shows reference numbers in the candidate's layout."""

import dataclasses
from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from jaxformer.parity.matching.calls.alignment import TensorAlignment, align_tensors, find_transform
from jaxformer.parity.matching.pairs import Pair
from jaxformer.parity.recording.calls import jax_trace, torch_trace
from jaxformer.parity.recording.calls.padding import Padding
from jaxformer.parity.recording.calls.torch_recorder import TorchCall
from jaxformer.porting.mapping.packings import ONE_TO_ONE

Array = np.ndarray | None


@dataclasses.dataclass(frozen=True)
class Unmatched:
    """Why the calls of a pair could not be matched.

    Attributes:
        message: the reason, for the report.
        is_uncalled: whether neither side calls the modules.
    """

    message: str
    is_uncalled: bool = False


@dataclasses.dataclass(frozen=True)
class MatchedCall:
    """One call of a pair of modules, with the tensors of both sides aligned.

    All values and gradients are those of the reference, in the layout of the candidate. ``place``
    is an index of a candidate module in the pair.

    Attributes:
        pair: the modules.
        candidate: a call of each candidate module.
        reference: a call of each reference module.
        input_alignments: of the inputs of each candidate module.
        output_alignments: of the outputs of each candidate module.
        repeats: how often the candidate makes this call, with the same inputs, where the reference
            makes it once.
    """

    pair: Pair
    candidate: tuple[jax_trace.JaxCall, ...]
    reference: tuple[torch_trace.TorchCall, ...]
    input_alignments: tuple[TensorAlignment, ...]
    output_alignments: tuple[TensorAlignment, ...]
    repeats: int = 1

    def inputs(self, place: int) -> list[Array]:
        """Returns the float inputs."""
        return self.input_alignments[place].values(self.reference[0].inputs)

    def integers(self, place: int) -> list[np.ndarray]:
        """Returns the integer input, where both sides take just one, of the same shape."""
        candidate, reference = self.candidate[place].integers, self.reference[0].integers
        if len(candidate) == len(reference) == 1 and candidate[0].shape == reference[0].shape:
            return list(reference)
        return []

    def outputs(self, place: int) -> list[Array]:
        """Returns the outputs."""
        unpacked = _unpack(self.pair, [c.outputs for c in self.reference], self.candidate)
        return self.output_alignments[place].values(unpacked[place])

    def integer_outputs(self, place: int) -> list[np.ndarray]:
        """Returns the integer outputs, where both sides have as many, of the same shapes."""
        candidate, reference = (
            self.candidate[place].integer_outputs,
            self.reference[0].integer_outputs,
        )
        shapes = [[array.shape for array in arrays] for arrays in (candidate, reference)]
        return list(reference) if shapes[0] == shapes[1] else []

    def output_gradients(self, place: int) -> list[Array]:
        """Returns the gradients of the outputs; none where they are not known."""
        if not all(call.output_gradients for call in self.reference):
            return []
        gradients = [
            [
                np.broadcast_to(0.0, a.shape) if g is None else g
                for a, g in zip(call.outputs, call.output_gradients, strict=True)
            ]
            for call in self.reference
        ]
        unpacked = _unpack(self.pair, gradients, self.candidate)[place]
        return self.output_alignments[place].gradients(unpacked, range(len(unpacked)))

    def input_gradients(self) -> list[Array]:
        """Returns the gradients of the first module's inputs, summed over all the modules.

        There are none where they are not known.
        """
        total: list[Array] = []
        if not all(len(call.input_gradients) == len(call.inputs) for call in self.reference):
            return []
        for call in self.reference:
            alignment = self.input_alignments[0]
            gradients = alignment.gradients(call.input_gradients, call.identities)
            if total:
                total = [_add(a, b) for a, b in zip(total, gradients, strict=True)]
            else:
                total = gradients
        return total

    def groups(self) -> list[list[int]]:
        """Returns the first module's inputs, grouped where only the sum of gradients is known."""
        return self.input_alignments[0].groups(self.reference[0].identities)


def match_calls(
    pair: Pair, calls: Mapping[str, jax_trace.JaxCall], reference: torch_trace.Trace
) -> list[MatchedCall] | Unmatched:
    """Matches the calls of a pair.

    Args:
        pair: the modules.
        calls: the first call of each candidate module, by path.
        reference: the pass of the reference.

    Returns:
        The matched calls, or why there are none.
    """
    candidate_calls = [calls[path].all for path in pair.candidate if path in calls]
    reference_calls = [
        reference.calls[path].all for path in pair.reference if path in reference.calls
    ]
    if not candidate_calls and not reference_calls:
        return Unmatched("neither side calls it", is_uncalled=True)
    together = "compared together with the module around it"
    if len(candidate_calls) < len(pair.candidate):
        return Unmatched(f"{together}: the candidate does not call it")
    if len(reference_calls) < len(pair.reference):
        return Unmatched(f"{together}: the reference does not call it")
    if not pair.can_run_isolated:
        return Unmatched(together)
    counts = {len(each) for each in candidate_calls}, {len(each) for each in reference_calls}
    if len(counts[0] | counts[1]) > 1 and counts[1] != {1}:
        return Unmatched(
            f"called {_describe_counts(counts[0])} by the candidate, "
            f"{_describe_counts(counts[1])} by the reference"
        )
    repeats = max(counts[0]) if counts[1] == {1} else 1
    matched = []
    for number in range(min(min(counts[0]), min(counts[1]))):
        candidate_call = tuple(each[number] for each in candidate_calls)
        reference_call = tuple(each[number] for each in reference_calls)
        outputs = _align_outputs(pair, candidate_call, reference_call, reference.padding)
        if outputs is None:
            shapes = [_describe_shapes(c[0].outputs) for c in (candidate_call, reference_call)]
            return Unmatched(
                f"the outputs cannot be aligned: candidate {shapes[0]}, reference {shapes[1]}"
            )
        inputs = tuple(
            align_tensors(call.inputs, reference_call[0].inputs, reference.padding)
            for call in candidate_call
        )
        lost = next(
            filter(None, map(_lost_inputs, candidate_call, inputs, repeat(reference_call[0]))), ""
        )
        if lost and pair.candidate != ("",):
            return Unmatched(f"{together}: {lost}")
        matched.append(MatchedCall(pair, candidate_call, reference_call, inputs, outputs, repeats))
    return matched


def calls_inside(path: str, matched: Sequence[MatchedCall]) -> dict[str, list[TorchCall]]:
    """Returns those of the reference's calls that are inside a module, by path within it."""
    found: dict[str, list[TorchCall]] = {}
    for call in matched:
        for inner, each in zip(call.pair.reference, call.reference, strict=True):
            if inner != path and (not path or inner.startswith(f"{path}.")):
                found.setdefault(inner.removeprefix(f"{path}.") if path else inner, []).append(each)
    return found


def _lost_inputs(
    candidate: jax_trace.JaxCall, alignment: TensorAlignment, reference: torch_trace.TorchCall
) -> str:
    """Returns which inputs of both sides have no known layout in common; "" if there are none.

    On its own inputs a module would answer for whatever is wrong before it.
    """
    shapes = [
        _describe_shapes(
            [
                a
                for a, place in zip(candidate.inputs, alignment.places, strict=True)
                if place is None
            ]
        ),
        _describe_shapes([a for n, a in enumerate(reference.inputs) if n not in alignment.places]),
    ]
    if "none" in shapes:
        return ""
    return f"the inputs cannot be aligned: candidate {shapes[0]}, reference {shapes[1]}"


def _align_outputs(
    pair: Pair,
    candidate: Sequence[jax_trace.JaxCall],
    reference: Sequence[torch_trace.TorchCall],
    padding: Padding,
) -> tuple[TensorAlignment, ...] | None:
    """Returns the alignment of each candidate module's outputs; None if a first one has none."""
    if not (all(call.outputs for call in candidate) and all(call.outputs for call in reference)):
        return None
    try:
        unpacked = _unpack(pair, [call.outputs for call in reference], candidate)
    except (ValueError, IndexError):
        return None
    alignments = []
    for call, arrays in zip(candidate, unpacked, strict=True):
        if len(arrays) == 1:
            transform = find_transform(arrays[0], call.outputs[0], padding)
            others = [None] * (len(call.outputs) - 1)
            alignments.append(
                TensorAlignment((None if transform is None else 0, *others), (transform, *others))
            )
        else:
            alignments.append(align_tensors(call.outputs, arrays, padding))
        if alignments[-1].places[0] is None:
            return None
    return tuple(alignments)


def _unpack(
    pair: Pair, reference: Sequence[Sequence[np.ndarray]], candidate: Sequence[jax_trace.JaxCall]
) -> list[list[np.ndarray]]:
    """Returns for each candidate module its share of what the reference modules returned."""
    if pair.packing is ONE_TO_ONE:
        return [list(reference[0])]
    first = [arrays[0] for arrays in reference]
    widths = [call.outputs[0].shape[-1] for call in candidate]
    unpacked = pair.unpack(first, [(*first[0].shape[:-1], width) for width in widths])
    return [[array] for array in unpacked]


def _add(a: Array, b: Array) -> Array:
    return b if a is None else a if b is None else a + b


def _describe_counts(counts: set[int]) -> str:
    return " or ".join(str(n) for n in sorted(counts)) + (" times" if counts != {1} else " time")


def _describe_shapes(arrays: Sequence[Any]) -> str:
    return ", ".join(str(tuple(a.shape)) for a in arrays) or "none"
