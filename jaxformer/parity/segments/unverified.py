"""Finds parameters of the candidate that nothing shows to be right.

Their numbers are those of no parameter of the reference, so that the two cannot be compared. And no
result depends on them, as none depends on the bias of keys: a softmax takes it away. So equal
results say nothing of them.
"""

from collections.abc import Iterator

import numpy as np

from jaxformer.parity.matching.parameters import ParameterMatches
from jaxformer.parity.matching.parts import find_pieces
from jaxformer.parity.matching.values import largest
from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.running_again import run_again
from jaxformer.parity.segments.effects import NO_EFFECT, depending, seen_positions
from jaxformer.parity.segments.results import Results
from jaxformer.parity.segments.walk import Walk

SEED = 21


def find_unverified(walk: Walk, results: Results, parameters: ParameterMatches) -> tuple[str, ...]:
    """Returns the paths of such parameters.

    For each parameter with unknown numbers the candidate is run once more with other numbers in its
    place, from the first operator that reads it.

    Args:
        walk: after the forward pass.
        results: those that were compared.
        parameters: which of them are equal.
    """
    tape = walk.candidate
    needed = tape.ancestors(tape.outputs)
    return tuple(
        name
        for name in _with_unknown_numbers(walk, parameters)
        if tape.parameters[name].index in needed
        and tape.parameters[name].dtype.kind == "f"
        and not _moves_results(walk, results, tape.parameters[name])
    )


def _with_unknown_numbers(walk: Walk, parameters: ParameterMatches) -> Iterator[str]:
    yield from parameters.unmatched
    reference = walk.reference
    # Zeros, say, are in many places: where no parameter lacks its numbers, they are right.
    lacking = {reference.parameters[name].size for name in parameters.missing}
    known = reference.parameters | reference.buffers
    for name, owners in parameters.in_parts.items():
        value = walk.candidate.parameters[name]
        if value.size in lacking:
            sources = {owner: known[owner].data for owner in owners if owner in known}
            if find_pieces(value.data, sources) is None:
                yield name


def _moves_results(walk: Walk, results: Results, value: Value) -> bool:
    """Returns whether other numbers in a parameter's place move a result where it is read."""
    random = np.random.default_rng(SEED)
    noise = random.normal(scale=largest(value.data) or 1.0, size=value.shape)
    later = depending(walk.candidate.operators, value)
    with np.errstate(all="ignore"):
        arrays = run_again(later, {value.index: value.data + noise})
    places = seen_positions(walk.reference)
    seen = {v.index: where for v, where in zip(walk.reference.outputs, places, strict=True)}
    for result in results.compared.values():
        own, reference = result.candidate, result.reference
        if own.index not in arrays:
            continue
        moved = np.asarray(arrays[own.index] - own.data)
        if result.part is not None:
            moved = moved[result.part]
        moved = result.layout.invert(moved, reference.shape)
        where = seen[reference.index]
        # NaN is a move too.
        if not largest(moved if where is None else moved[where]) <= NO_EFFECT * largest(own.data):
            return True
    return False
