"""Turns what was measured of a pair of modules into a verdict and a message."""

import dataclasses
from collections.abc import Iterable, Sequence

from jaxformer.parity.findings import INPUT_OF, Difference, Node, Stage, Verdict

# An output whose relative error is over this many times that of the input has lost three bits.
AMPLIFIED = 8.0


def judge_node(node: Node, wrong_weights: str = "") -> Node:
    """Returns the node with its verdict, its message and whether it is the root cause of a bug.

    Args:
        node: with all that was measured, and as message where forward or backward goes wrong.
        wrong_weights: a description of its parameters that differ.
    """
    stages: list[tuple[Stage, list[Difference]]] = [
        ("parameters", list(node.parameters.values())),
        ("forward", [node.forward] if node.forward is not None else []),
        ("backward", list(node.backward.values())),
    ]
    wrong = [stage for stage, differences in stages if any(d.is_bug for d in differences)]
    if wrong:
        messages = [wrong_weights] if "parameters" in wrong else []
        # A module with wrong weights may have a bug of its own too.
        messages += [node.message] if wrong[-1] != "parameters" and node.message else []
        message = "; ".join(messages) or "it differs"
        return dataclasses.replace(
            node, verdict="bug", stage=wrong[0], message=message, is_root_cause=True
        )
    everything = [d for _, differences in stages for d in differences]
    if node.in_context is not None:
        everything.append(node.in_context)
    is_exact = all(d.error == 0 and not d.candidate_rounding for d in everything)
    # After a bug it is the bug that is amplified, not rounding.
    is_after_bug = node.in_context is not None and node.in_context.is_bug
    is_amplified = node.condition is not None and node.condition > AMPLIFIED and not is_after_bug
    verdict: Verdict = "exact" if is_exact else "amplified" if is_amplified else "rounding"
    if node.forward is None and node.message:
        # It was not run; the message says why.
        return dataclasses.replace(node, verdict="incomplete")
    return dataclasses.replace(node, verdict=verdict, message="")


def arithmetic_stage(node: Node) -> Stage:
    """Returns where the arithmetic of a pair goes wrong; "" if it does not."""
    if node.forward is not None and node.forward.is_bug:
        return "forward"
    return "backward" if any(d.is_bug for d in node.backward.values()) else ""


def last_right_input(forward: Sequence[tuple[str, Difference]]) -> str:
    """Returns which submodule got the last right input before a difference; "" if none did."""
    wrong = next((n for n, (_, difference) in enumerate(forward) if difference.is_bug), 0)
    # Another input of the same submodule may be the wrong one.
    of_same = forward[wrong][0] if forward else ""
    entered = [n for n, _ in forward[:wrong] if n.startswith(INPUT_OF) and n != of_same]
    return entered[-1].removeprefix(INPUT_OF) if entered else ""


def explain(
    forward: Sequence[tuple[str, Difference]], backward: Sequence[tuple[str, Difference]]
) -> str:
    """Returns where in a module the first difference is, and what just before it is right.

    Args:
        forward: what was compared, in order.
        backward: the gradients.

    Returns:
        A sentence, or "" if nothing differs.
    """
    wrong = [name for name, difference in forward if difference.is_bug]
    if wrong:
        names = [name for name, _ in forward]
        right = [name for name, d in forward[: names.index(wrong[0])] if not d.is_bug]
        end = f", though {right[-1]} is right" if right else " on equal inputs"
        return f"{wrong[0]} differs{end}"
    wrong = [name for name, difference in backward if difference.is_bug]
    if not wrong:
        return ""
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"the forward pass is right, but the gradient of {wrong[0]} differs{more}"


def worst_difference(differences: Iterable[Difference]) -> Difference | None:
    """Returns the difference nearest to a bug, or furthest beyond; None if there is none."""
    return max(differences, key=lambda d: (d.excess, d.relative), default=None)
