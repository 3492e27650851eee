"""Which wrong segments count: those that the results see, and that no other one explains."""

import dataclasses
from collections.abc import Iterator, Sequence

from jaxformer.parity.segments.divergences import Divergence
from jaxformer.parity.segments.effects import NO_EFFECT, effect_of
from jaxformer.parity.segments.walk import Walk
from jaxformer.parity.words import shorten


@dataclasses.dataclass(frozen=True)
class Judged:
    """A wrong segment that counts.

    Attributes:
        divergence: the segment.
        effect: how far it moves the results if all else is right, of their scale; None where that
            is not known.
    """

    divergence: Divergence
    effect: float | None = None


def judge_forward(walk: Walk) -> list[Judged]:
    """Returns the wrong segments that the results see; the walk gets a remark on the others."""
    effects = [effect_of(divergence, walk.reference) for divergence in walk.divergences]
    is_seen = [effect is None or effect > NO_EFFECT for effect in effects]
    walk.remarks += _without_effect(walk.divergences, is_seen)
    return [
        Judged(divergence, effect)
        for divergence, effect, seen in zip(walk.divergences, effects, is_seen, strict=True)
        if seen
    ]


def judge_backward(walk: Walk, forward: Sequence[Judged]) -> list[Judged]:
    """Returns the wrong segments of the backward pass that none of the forward one explains.

    A wrong formula has a wrong derivative, which has the same line in JAX. A wrong input sends the
    gradient elsewhere: in the same block, and where the right and the wrong input were made.

    Args:
        walk: with both passes.
        forward: what counts of the forward pass.
    """
    passed = [d for d in walk.divergences if not d.is_backward]
    backward = [d for d in walk.divergences if d.is_backward]
    lines = {line for divergence in passed for line in divergence.lines}
    lines |= _lines_of_inputs(passed, walk)
    blocks = [judged.divergence.reference_operator.module.rpartition(".")[0] for judged in forward]
    found = []
    for divergence in backward:
        path = divergence.reference_operator.module
        is_near = any(not block or f"{path}.".startswith(f"{block}.") for block in blocks)
        if not is_near and not divergence.lines & lines:
            found.append(Judged(divergence))
    explained = len(backward) - len(found)
    if explained:
        walk.remarks.append(f"gradients differ in {explained} places beside the causes above")
    return found


def _lines_of_inputs(divergences: Sequence[Divergence], walk: Walk) -> set[str]:
    """Returns the lines that made what wrong segments read, and what they should read."""
    own = {value.index for divergence in divergences for value in divergence.boundary}
    right = {v.index for divergence in divergences for v in divergence.reference_boundary}
    for value in walk.candidate.values:
        if not right.isdisjoint(m.value.index for m in walk.matches.get(value.index, ())):
            own.add(value.index)
    made = (step for step in walk.candidate.operators if step.source)
    return {step.source for step in made if any(v.index in own for v in step.outputs)}


def _without_effect(divergences: Sequence[Divergence], is_seen: Sequence[bool]) -> Iterator[str]:
    """Yields what differs and changes no result, as masks do at padding."""
    hidden = [d for d, seen in zip(divergences, is_seen, strict=True) if not seen]
    if hidden:
        first = next((op for op in reversed(hidden[0].operators) if op.source), None)
        count = "1 value differs" if len(hidden) == 1 else f"{len(hidden)} values differ"
        place = shorten(first.source) if first else "a source unknown"
        yield f"{count}, the first at {place}; the results that are read stay the same"
