"""A report as a tree, with branches that are alike drawn together: what every report shows."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence

from jaxformer.parity.report.model import VERDICTS, Difference, Node, Report, Step, Verdict

CLEAN = ("exact", "rounding")
# Every step is shown up to this many; of more, the first, the last and those around the parting.
MAX_STEPS = 24


@dataclasses.dataclass(frozen=True)
class Branch:
    """One line of the tree.

    Attributes:
        name: within the branch around it; a range where it stands for several.
        nodes: one, or those of branches that are alike, in the order of calls.
        parts: what is inside; of branches that are alike, the same part of all of them.
    """

    name: str
    nodes: tuple[Node, ...]
    parts: tuple["Branch", ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst of its nodes."""
        return max((node.verdict for node in self.nodes), key=VERDICTS.index)

    @property
    def worst(self) -> Difference | None:
        """The worst of its nodes."""
        found = [node.worst for node in self.nodes if node.worst is not None]
        return max(found, key=lambda d: (d.excess, d.relative), default=None)

    @property
    def ulps(self) -> float | None:
        """The largest error in the dtype under test, in units in the last place."""
        return _largest([node.ulps for node in self.nodes])

    @property
    def condition(self) -> float | None:
        """The largest condition of its nodes."""
        return _largest([node.condition for node in self.nodes])

    @property
    def is_clean(self) -> bool:
        """Whether it and all its parts are exact or rounding."""
        return not self.any(lambda node: node.verdict not in CLEAN or node.is_root_cause)

    def any(self, test: Callable[[Node], bool]) -> bool:
        """Whether the test holds for it or for anything inside."""
        return any(map(test, self.nodes)) or any(part.any(test) for part in self.parts)


def build_tree(nodes: Sequence[Node]) -> tuple[Branch, ...]:
    """The nodes as trees: what is deeper than the node before it is a part of it."""
    return _build_tree(nodes, "")


def fold_repeats(branches: Sequence[Branch]) -> list[tuple[Branch, ...]]:
    """Siblings in runs: those that follow each other by number, are alike and clean, together."""
    runs: list[tuple[Branch, ...]] = []
    for branch in branches:
        if runs and _continues(runs[-1][-1], branch):
            runs[-1] = (*runs[-1], branch)
        else:
            runs.append((branch,))
    return runs


def merge(run: Sequence[Branch]) -> Branch:
    """Branches that are alike as one, with their worst values."""
    if len(run) == 1:
        return run[0]
    nodes = tuple(itertools.chain.from_iterable(branch.nodes for branch in run))
    parts = zip(*(branch.parts for branch in run), strict=True)
    return Branch(range_name(run), nodes, tuple(_same(part) for part in parts))


def range_name(run: Sequence[Branch]) -> str:
    """The first and the last name of a run."""
    return run[0].name if len(run) == 1 else f"{run[0].name} … {run[-1].name}"


def chosen_steps(report: Report) -> list[Step | None]:
    """The steps that a table shows; None where some are left out."""
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


def title(report: Report) -> str:
    """What was compared, by the classes of the whole models."""
    if not report.nodes:
        return f"{report.mode}, {report.dtype}"
    root = report.nodes[0]
    return f"{root.kind} against {root.reference_kind}, {report.mode}, {report.dtype}"


def place(node: Node) -> str:
    """The node's path, as a sentence names it."""
    return node.path or "the whole model"


def root_cause_line(node: Node) -> str:
    """Where a bug is, on both sides, and what it is."""
    where = f"{place(node)} (their {node.reference_path or 'whole model'})"
    return one_line(f"{where}: {node.message}" if node.message else where)


def step_line(report: Report, step: Step) -> str:
    """Where two runs part."""
    unit = "token" if report.mode == "generate" else "step"
    what = "logits" if report.mode == "generate" else "loss"
    worst = f", most of all in {step.worst}" if step.worst else ""
    difference = step.difference
    return (
        f"{unit} {step.number}: ours {number(step.candidate)}, theirs {number(step.reference)}, "
        f"the {what} differ{'' if what == 'logits' else 's'} by {scientific(difference.relative)} "
        f"of scale, allowed {scientific(_relative_allowed(difference))}{worst}"
    )


def verdict_line(report: Report) -> str:
    """The last line of a report: ``equal (…)``, or ``bug:`` with the first culprit."""
    if report.verdict != "bug":
        return f"equal ({report.verdict})"
    bad = report.root_causes or tuple(n for n in reversed(report.nodes) if n.verdict == "bug")
    if bad:
        return f"bug: {root_cause_line(bad[0])}"
    assert report.first_divergence is not None
    return f"bug: {step_line(report, report.first_divergence)}"


def root_causes_among(report: Report, verdict: Verdict) -> str:
    """Beside the count of nodes with a bug: how many are the bug's place, if others are around."""
    count = len(report.root_causes)
    if verdict != "bug" or count == sum(node.verdict == "bug" for node in report.nodes):
        return ""
    return f" ({count} culprit{'s' * (count != 1)})"


def numbers_line(node: Node, dtype: str) -> str:
    """The figures that show a bug, in a sentence; "" where there are none."""
    worst = node.worst
    if worst is None:
        return ""
    name = next((n for n, d in node.differences.items() if d is worst), "output in the whole model")
    text = f"{name}: {scientific(worst.relative)} of scale, "
    text += f"allowed {scientific(_relative_allowed(worst))}"
    if worst.candidate_rounding is not None and worst.reference_rounding is not None:
        candidate, reference = (
            scientific(worst.candidate_rounding),
            scientific(worst.reference_rounding),
        )
        text += f"; in {dtype} ours is off by {candidate}, theirs by {reference}"
    return text


def scientific(value: float | None) -> str:
    """Two digits and a power of ten; 0 where it is none; "" where it was not measured."""
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.1e}"


def short(value: float | None) -> str:
    """A factor or a count of units: plain as long as that is short."""
    if value is None:
        return ""
    if value == 0 or 0.05 <= abs(value) < 9999.5:
        return f"{value:.0f}" if value == 0 or abs(value) >= 99.95 else f"{value:.1f}"
    return f"{value:.0e}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")


def number(value: float) -> str:
    """A loss or a token."""
    return str(int(value)) if float(value).is_integer() else f"{value:.6g}"


def one_line(text: str) -> str:
    """The text without line breaks or other characters that move a terminal's cursor."""
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]+", " ", text).split())


def _build_tree(nodes: Sequence[Node], around: str) -> tuple[Branch, ...]:
    branches = []
    start = 0
    while start < len(nodes):
        node = nodes[start]
        end = start + 1
        while end < len(nodes) and nodes[end].depth > node.depth:
            end += 1
        parts = _build_tree(nodes[start + 1 : end], node.path)
        branches.append(Branch(_name(node, around), (node,), parts))
        start = end
    return tuple(branches)


def _name(node: Node, around: str) -> str:
    """The path without what the branch around it says already; of the whole model its class."""
    prefix = f"{around}." if around else ""
    return " + ".join(p.removeprefix(prefix) for p in node.path.split(" + ")) or node.kind


def _continues(one: Branch, other: Branch) -> bool:
    """Whether the second follows the first by number, is like it, and both are clean."""
    (stem, before), (other_stem, number) = _numbered(one.name), _numbered(other.name)
    return (
        before is not None
        and number == before + 1
        and stem == other_stem
        and one.is_clean
        and other.is_clean
        and _shape(one) == _shape(other)
    )


def _numbered(name: str) -> tuple[str, int | None]:
    match = re.fullmatch(r"(.*?)(\d+)", name)
    return (match[1], int(match[2])) if match else (name, None)


def _shape(branch: Branch) -> tuple[object, ...]:
    """What two branches must share to be alike: classes, messages, and the names of the parts."""
    kinds = tuple((node.kind, node.reference_kind, node.message) for node in branch.nodes)
    return kinds, tuple((part.name, _shape(part)) for part in branch.parts)


def _same(run: Sequence[Branch]) -> Branch:
    """The same part of branches that are alike."""
    return dataclasses.replace(merge(run), name=run[0].name)


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _relative_allowed(difference: Difference) -> float:
    return difference.allowed / difference.scale if difference.scale else difference.allowed
