"""Numbers and sentences of a report, the same in the terminal, in files and on the page."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from jaxformer.parity.findings import Difference, Node, RootCause, Step, Verdict
from jaxformer.parity.words import shorten

if TYPE_CHECKING:
    from jaxformer.parity.report.report import Report

SYMBOLS: dict[Verdict, str] = {
    "exact": "=", "rounding": "≈", "amplified": "▲", "incomplete": "?", "bug": "✗"
}  # fmt: skip
# Names of operators that a line shows.
MOST_OPERATORS = 6
# Every step is shown up to this many; of more, the first, the last and those around a divergence.
MAX_STEPS = 24


def scientific(value: float | None) -> str:
    """Returns two digits and a power of ten; "0" for zero, "" for None.

    >>> scientific(1.26e-16)
    '1.3e-16'
    """
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.1e}"


def short(value: float | None) -> str:
    """Returns a factor or a number of units in few characters; "" for None.

    >>> short(3.14), short(123456.0)
    ('3.1', '1e5')
    """
    if value is None:
        return ""
    if value == 0 or 0.05 <= abs(value) < 9999.5:
        return f"{value:.0f}" if value == 0 or abs(value) >= 99.95 else f"{value:.1f}"
    return f"{value:.0e}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


def number(value: float) -> str:
    """Returns a loss with six digits, or a token as an integer."""
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"


def json_number(value: float | None, digits: int = 3) -> float | str | None:
    """Returns a number rounded to a few digits; NaN and infinities as JavaScript spells them."""
    if value is None or math.isfinite(value):
        return value if value is None else float(f"{value:.{digits}g}")
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def one_line(text: str) -> str:
    """Returns the text without line breaks or other characters that move a terminal's cursor."""
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text).split())


def title(report: "Report") -> str:
    """Returns what was compared: the classes of the models, the mode and the dtype."""
    if not report.nodes:
        return f"{report.mode}, {report.dtype}"
    root = report.nodes[0]
    return f"{root.kind} against {root.reference_kind}, {report.mode}, {report.dtype}"


def place(node: Node | RootCause) -> str:
    """Returns the candidate's path of a node, as a sentence names it."""
    return node.path or "the whole model"


def reference_place(node: Node | RootCause) -> str:
    """Returns the reference's path of a node, as a sentence names it."""
    return node.reference_path or "the whole model"


def root_cause_line(cause: Node | RootCause) -> str:
    """Returns where a bug is, on both sides, and what it is."""
    where = f"{place(cause)} (reference: {reference_place(cause)})"
    if isinstance(cause, RootCause) and cause.node is None and not cause.candidate_path:
        # It has the reference's path alone.
        where = place(cause)
    return one_line(f"{where}: {cause.message}" if cause.message else where)


def cause_facts(cause: RootCause) -> str:
    """Returns how far off a root cause is, and how it shows."""
    is_measured = math.isfinite(cause.error)
    facts = [f"off by {scientific(cause.error)} of scale" if is_measured else "seen in the results"]
    if cause.effect is not None:
        facts.append(f"it moves the results by {scientific(cause.effect)}")
    if cause.is_backward:
        facts.append("in the backward pass alone")
    if cause.places > 1:
        facts.append(f"in {cause.places} places")
    return "; ".join(facts)


def cause_lines(cause: RootCause) -> Iterator[tuple[str, str]]:
    """Yields "candidate" and "reference", each with its line of code and its operators."""
    after = f"; reads what {shorten(cause.jax_after)} makes" if cause.jax_after else ""
    if cause.jax_after == cause.jax_source:
        after = ""
    for side, source, operators, more in (
        ("candidate", cause.jax_source, cause.jax_operators, after),
        ("reference", cause.torch_source, cause.torch_operators, ""),
    ):
        shown = " → ".join(operators[-MOST_OPERATORS:])
        yield side, f"{shorten(source) or 'source unknown'}  {shown}".rstrip() + more


def has_lines(cause: RootCause) -> bool:
    """Returns whether the operators of a root cause were found, and with them lines of code."""
    return bool(cause.jax_operators or cause.torch_operators)


def coverage_lines(report: "Report") -> list[str]:
    """Returns how much of each side was compared; nothing where that was not counted."""
    c = report.coverage
    if c is None:
        return []
    modules = "modules" if report.is_by_operators else "modules by themselves"
    operators = "operators with parameters"
    reference = {modules: c.modules, operators: c.operators, "parameters": c.reference_parameters}
    candidate = {
        modules: c.candidate_modules, operators: c.candidate_operators,
        "parameters": c.parameters, "gradients": c.gradients if c.gradients[1] else None,
        "values": c.values,
    }  # fmt: skip
    lines = [
        f"compared of the {side}: {_counted(counts)}"
        for side, counts in (("reference", reference), ("candidate", candidate))
    ]
    if not report.is_by_operators:
        lines.append("the other modules were compared as parts of those around them")
    return lines


def _counted(counts: Mapping[str, tuple[int, int] | None]) -> str:
    return ", ".join(
        f"{found[0]} of {found[1]} {what}" for what, found in counts.items() if found is not None
    )


def sentences(report: "Report") -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the title of each list of sentences that is not empty, and the list."""
    for title, found in (
        ("Wrong parameters", report.weights),
        ("Constants in float32 (no bug)", report.tables),
        ("Rounded to fewer bits than float32 (left out, no bug)", report.casts),
        ("Not compared", report.incomplete),
    ):
        if found:
            yield title, found


def step_unit(report: "Report") -> str:
    """Returns what a step of the report's mode is called: a token or a step."""
    return "token" if report.mode == "generate" else "step"


def step_line(report: "Report", step: Step) -> str:
    """Returns what differs at one step of training or generation, in a sentence."""
    difference = step.difference
    what = "the logits differ" if report.mode == "generate" else "the loss differs"
    worst = f", most of all in {step.worst}" if step.worst else ""
    if step.of_parameter:
        what, worst = f"the losses are equal, and after the update {step.worst} differs", ""
    return (
        f"{step_unit(report)} {step.number}: candidate {number(step.candidate)}, "
        f"reference {number(step.reference)}, {what} by {scientific(difference.relative)} of "
        f"scale, allowed {scientific(_relative_allowed(difference))}{worst}"
    )


def verdict_line(report: "Report") -> str:
    """Returns the last line of a report: ``equal (…)``, or ``bug:`` with the first root cause."""
    if report.verdict == "incomplete":
        return "incomplete: no bug was found in what was compared"
    if report.verdict != "bug":
        most = f", at most {scientific(report.error)} of scale apart"
        return f"equal ({report.verdict}){most if report.is_by_operators else ''}"
    bad: Sequence[Node | RootCause] = report.root_causes
    bad = bad or [node for node in reversed(report.nodes) if node.verdict == "bug"]
    if bad:
        return f"bug: {root_cause_line(bad[0])}"
    if report.weights:
        return f"bug: {one_line(report.weights[0])}"
    assert report.first_divergence is not None
    return f"bug: {step_line(report, report.first_divergence)}"


def verdict_word(verdict: Verdict, count: int) -> str:
    """Returns what so many nodes with a verdict are called.

    A node that was not run by itself is a part of the one around it, and may have been compared so:
    whether anything was not is the verdict of the whole report.
    """
    if verdict != "incomplete":
        return verdict
    return f"not compared by {'itself' if count == 1 else 'themselves'}"


def root_cause_count(report: "Report", verdict: Verdict) -> str:
    """Returns how many of the nodes with a bug are root causes; "" if all are."""
    count = len(report.root_causes)
    if verdict != "bug" or count == sum(node.verdict == "bug" for node in report.nodes):
        return ""
    return f" ({count} root cause{'s' * (count != 1)})"


def numbers_line(node: Node, dtype: str) -> str:
    """Returns the numbers that show a bug, in a sentence; "" if nothing was measured."""
    worst = node.worst
    if worst is None:
        return ""
    name = next((n for n, d in node.differences.items() if d is worst), "output in the whole model")
    text = f"{name}: {scientific(worst.relative)} of scale, "
    text += f"allowed {scientific(_relative_allowed(worst))}"
    if worst.candidate_rounding is not None and worst.reference_rounding is not None:
        candidate = scientific(worst.candidate_rounding)
        reference = scientific(worst.reference_rounding)
        text += f"; in {dtype} the candidate is off by {candidate}, the reference by {reference}"
    return text


def chosen_steps(report: "Report") -> list[Step | None]:
    """Returns the steps that a table shows; None stands for those left out."""
    steps = report.steps
    if len(steps) <= MAX_STEPS:
        return list(steps)
    around = next((i for i, step in enumerate(steps) if step is report.first_divergence), 0)
    wanted = {*range(4), *range(around - 4, around + 5), *range(len(steps) - 4, len(steps))}
    shown: list[Step | None] = []
    for index, step in enumerate(steps):
        if index in wanted:
            shown.append(step)
        elif shown[-1] is not None:
            shown.append(None)
    return shown


def step_cells(report: "Report", step: Step | None) -> list[str]:
    """Returns a step's row of a table: its number, both sides, the difference and a note."""
    if step is None:
        return ["…", "", "", "", ""]
    note = step.note or ("diverges here" if step is report.first_divergence else "")
    sides = [number(step.candidate), number(step.reference)]
    return [str(step.number), *sides, scientific(step.difference.relative), note]


def _relative_allowed(difference: Difference) -> float:
    return difference.allowed / difference.scale if difference.scale else difference.allowed
