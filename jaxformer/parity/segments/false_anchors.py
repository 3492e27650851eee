"""Values that equal one of the reference, and stand where another one must be.

A projection without its bias equals the reference's product; values made with the keys' kernel
equal the keys; heads that were put into groups in the wrong order hold the right numbers. Such a
value is an anchor, so the wrong segment seems to begin after it. It ends the wrong segment itself,
unless what else reads it needs it as it is.
"""

import itertools
from collections.abc import Iterator

from jaxformer.parity.matching.anchors import Anchors
from jaxformer.parity.matching.layouts import Layout, layouts
from jaxformer.parity.recording.operators.graph import Operator, Value
from jaxformer.parity.recording.operators.kinds import LAYOUT_ONLY
from jaxformer.parity.segments.divergences import Divergence, Trials
from jaxformer.parity.segments.effects import depending

# What makes a segment right agrees to this share of scale.
FITS = 1e-9
# How many layouts of another value are tried.
MOST_LAYOUTS = 24


def false_anchor(anchors: Anchors, divergence: Divergence) -> tuple[Value, Value, Layout] | None:
    """Returns a value that enters a wrong segment, and what it must be, if it is itself wrong."""
    trials = Trials(divergence)
    for value in reversed(divergence.boundary):
        matches = anchors.matches.get(value.index, ())
        if not value.is_activation or value.producer is None or value.index in anchors.pinned:
            continue
        if not matches or _is_read_right(anchors, value, divergence):
            continue
        for other, layout in _substitutes(anchors, value, divergence):
            if trials.agree({value.index: layout.apply(other.data)}, FITS):
                if not _is_made_wrong(anchors, value, other, layout):
                    return None
                if other in (match.value for match in matches):
                    return value, other, layout
                return _before_layouts(anchors, value, other, layout)
    return None


def _substitutes(
    anchors: Anchors, value: Value, divergence: Divergence
) -> Iterator[tuple[Value, Layout]]:
    """Yields values of the reference that may have to stand in the place of one, with layouts."""
    array = anchors.array(value)
    own = [match.value for match in anchors.matches[value.index]]
    others = dict.fromkeys([
        *own,
        *divergence.reference_boundary,
        *(v for step in divergence.reference_operators for v in step.outputs),
    ])  # fmt: skip
    for other in others:
        if other.size == array.size and other.is_activation:
            for layout in itertools.islice(layouts(other.shape, array.shape), MOST_LAYOUTS):
                yield other, layout


def _before_layouts(
    anchors: Anchors, value: Value, other: Value, layout: Layout
) -> tuple[Value, Value, Layout]:
    """Returns the value of which another only has the numbers in another layout."""
    while value.producer is not None and value.producer.name in LAYOUT_ONLY:
        made, source = value.producer, value.producer.inputs[0]
        if source.size != value.size or not source.is_activation:
            break
        right = layout.apply(other.data)
        found = next(
            (
                one
                for one in itertools.islice(layouts(other.shape, source.shape), MOST_LAYOUTS)
                if (made.run(one.apply(other.data))[0] == right).all()
            ),
            None,
        )
        if found is None:
            break
        value, layout = source, found
    return value, other, layout


def _is_read_right(anchors: Anchors, value: Value, divergence: Divergence) -> bool:
    """Returns whether another operator reads a value and makes what the reference has."""
    wrong = {step.index for step in divergence.operators}
    waiting, seen = [value], set()
    while waiting:
        for reader in waiting.pop().consumers:
            if reader.index in wrong or reader.index in seen:
                continue
            seen.add(reader.index)
            if reader.name in LAYOUT_ONLY:
                waiting += reader.outputs
            elif any(made.index in anchors.matches for made in reader.outputs):
                return True
    return False


def _is_made_wrong(anchors: Anchors, value: Value, other: Value, layout: Layout) -> bool:
    """Returns whether the operator that makes a value is wrong, and not the one that reads it."""
    matches = {match.value.index: match for match in anchors.matches[value.index]}
    if other.index in matches:
        # The same numbers: one of the two has parts of an axis in the wrong order.
        is_turned = any(m.layout.turns(m.value.shape) for m in matches.values())
        return is_turned and not layout.turns(other.shape)
    operators = anchors.reference.operators
    for match in matches.values():
        own, steps = match.value.producer, _steps_between(operators, match.value, other)
        if steps:
            # A step is missing: at this place, if it is of the same line and module, like a bias.
            reads = [value for step in steps for value in step.inputs]
            return (
                own is not None
                and all((s.source, s.module) == (own.source, own.module) for s in steps)
                and any(value.is_weight for value in reads)
            )
    return True


def _steps_between(operators: list[Operator], first: Value, last: Value) -> list[Operator]:
    """Returns the operators by which a later value depends on an earlier one."""
    needed, steps = {last.index}, []
    for step in reversed(depending(operators, first)):
        if any(made.index in needed for made in step.outputs):
            needed |= {read.index for read in step.inputs}
            steps.append(step)
    return steps
