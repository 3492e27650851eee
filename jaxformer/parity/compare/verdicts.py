"""From what was measured of a pair of modules to what is said of it."""

import dataclasses
from collections.abc import Sequence

from jaxformer.parity.report.model import Difference, Node, Stage, Verdict

# An output whose relative error is over this many times that of the input has lost three bits.
AMPLIFIED = 8.0


def judged(node: Node, weights: str = "") -> Node:
    """The node with its verdict, and whether it is where a bug is.

    Args:
        node: with all that was measured, and as message where forward or backward goes wrong.
        weights: what those of its parameters that differ look like.
    """
    stages: list[tuple[Stage, list[Difference]]] = [
        ("parameters", list(node.parameters.values())),
        ("forward", [node.forward] if node.forward is not None else []),
        ("backward", list(node.backward.values())),
    ]
    wrong = [stage for stage, differences in stages if any(d.is_bug for d in differences)]
    if wrong:
        said = [weights] if "parameters" in wrong else []
        # A module with wrong weights may have a bug of its own too.
        said += [node.message] if wrong[-1] != "parameters" and node.message else []
        message = "; ".join(said) or "it differs"
        return dataclasses.replace(
            node, verdict="bug", stage=wrong[0], message=message, is_root_cause=True
        )
    everything = [d for _, differences in stages for d in differences]
    if node.in_context is not None:
        everything.append(node.in_context)
    exact = all(d.error == 0 and not d.candidate_rounding for d in everything)
    # Behind a bug it is the bug that grows, not rounding.
    is_hit = node.in_context is not None and node.in_context.is_bug
    amplified = node.condition is not None and node.condition > AMPLIFIED and not is_hit
    verdict: Verdict = "exact" if exact else "amplified" if amplified else "rounding"
    # Of what was not run the message says why.
    message = node.message if node.forward is None else ""
    return dataclasses.replace(node, verdict=verdict, message=message)


def explain(
    forward: Sequence[tuple[str, Difference]], backward: Sequence[tuple[str, Difference]]
) -> str:
    """Where in a module it goes wrong: the first thing that differs, and what before it does not.

    Args:
        forward: what was compared, in order.
        backward: the gradients.
    """
    wrong = [name for name, difference in forward if difference.is_bug]
    if wrong:
        names = [name for name, _ in forward]
        before = [name for name, d in forward[: names.index(wrong[0])] if not d.is_bug]
        first = "its output differs" if wrong[0] == "output" else f"{wrong[0]} differs"
        return first + (f", though {before[-1]} is right" if before else " on equal inputs")
    off = [name for name, difference in backward if difference.is_bug]
    if not off:
        return ""
    more = f" and of {len(off) - 1} more" if len(off) > 1 else ""
    return f"forward it is right, but the gradient of {off[0]} differs{more}"


def worst(differences: Sequence[tuple[str, Difference]]) -> Difference | None:
    """Of what was compared, that which is nearest to a bug, or furthest beyond."""
    found = [difference for _, difference in differences]
    return max(found, key=lambda d: (d.excess, d.relative), default=None)
