"""What got worse from an earlier report of a comparison to a new one."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxformer.parity.findings import VERDICTS, Difference, Node
from jaxformer.parity.report.text import number, one_line, place, scientific

if TYPE_CHECKING:
    from jaxformer.parity.report.report import Report


def compare_reports(report: "Report", before: "Report") -> list[str]:
    """Returns what got worse, a line each.

    A node got worse in three cases: its verdict did; one of its float64 errors, relative to scale,
    is more than twice what it was, and more than allowed; one of its rounding ratios (candidate to
    reference, in the dtype under test) is more than twice what it was, the candidate is the less
    accurate side, and the node's input holds no bug. Also listed are nodes that are new or missing,
    settings that differ now and did not before, and a divergence that is new or comes earlier.

    Args:
        report: the new one.
        before: an earlier one of the same comparison.
    """
    kinds = [(one.mode, one.dtype) for one in (report, before)]
    if kinds[0] != kinds[1]:
        kind, kind_before = (f"{mode} in {dtype}" for mode, dtype in kinds)
        return [f"the reports do not compare the same: {kind}, before {kind_before}"]
    nodes = {node.path: node for node in report.nodes}
    old = {node.path: node for node in before.nodes}
    worse = [
        f"{place(node)}: missing, it was {node.verdict}"
        for path, node in old.items()
        if path not in nodes
    ]
    for path, node in nodes.items():
        if path not in old:
            worse.append(f"{place(node)}: new, {node.verdict}")
        else:
            worse += [f"{place(node)}: {reason}" for reason in _reasons(node, old[path])]
    known = {(s.name, s.candidate, s.reference) for s in before.settings}
    worse += [
        f"setting {s.name} differs: candidate {s.candidate}, reference {s.reference}; {s.effect}"
        for s in report.settings
        if (s.name, s.candidate, s.reference) not in known
    ]
    now, then = report.first_divergence, before.first_divergence
    if now is not None and (then is None or now.number < then.number):
        worse.append(
            f"the runs diverge at {now.number}, before "
            f"{'never' if then is None else f'at {then.number}'}: "
            f"candidate {number(now.candidate)}, reference {number(now.reference)}"
        )
    return worse


def _reasons(node: Node, before: Node) -> Iterator[str]:
    """Yields why a node is worse than it was."""
    # Older reports call what was not run exact, or rounding.
    was_run = before.forward is not None or not before.message
    verdict = before.verdict if was_run or before.verdict == "bug" else "incomplete"
    if VERDICTS.index(node.verdict) > VERDICTS.index(verdict):
        message = f": {one_line(node.message)}" if node.message else ""
        yield f"{node.verdict}, it was {before.verdict}{message}"
    old = before.differences
    for name, now in node.differences.items():
        then = old.get(name)
        if then is None:
            if now.is_bug:
                yield f"{name}: off by {scientific(now.relative)} of scale, new"
            continue
        # Nothing is worse than NaN.
        if now.is_bug and not now.relative <= 2 * then.relative and not math.isnan(then.error):
            yield (
                f"{name}: off by {scientific(now.relative)} of scale, "
                f"it was {scientific(then.relative)}"
            )
        yield from _rounding_reason(name, now, then)
    whole, whole_then = node.in_context, before.in_context
    # An error that float32 would show came in with a bug: another node is the cause.
    if whole and whole_then and whole.relative <= (whole.reference_rounding or 0):
        yield from _rounding_reason("in the whole model", whole, whole_then)


def _rounding_reason(name: str, now: Difference, then: Difference) -> Iterator[str]:
    """Yields that the candidate's rounding error grew, compared to the reference's, if it did."""
    ratio, ratio_then = _rounding_ratio(now), _rounding_ratio(then)
    if ratio is not None and ratio_then is not None and ratio > max(2 * ratio_then, 1):
        yield (
            f"{name}: its rounding error is {ratio:.2g} times the reference's, "
            f"it was {ratio_then:.2g}"
        )


def _rounding_ratio(difference: Difference) -> float | None:
    """Returns the candidate's rounding error over the reference's; None if not measured."""
    candidate, reference = difference.candidate_rounding, difference.reference_rounding
    if candidate is None or reference is None:
        return None
    if candidate == reference:
        return 1.0
    return candidate / reference if reference else float("inf")
