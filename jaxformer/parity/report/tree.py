"""The nodes of a report as a tree, in which similar branches share a line."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence

from jaxformer.parity.findings import VERDICTS, Difference, Node, Verdict

CLEAN = ("exact", "rounding", "incomplete")


@dataclasses.dataclass(frozen=True)
class Branch:
    """One line of the tree.

    Attributes:
        name: within the enclosing branch; a range if it stands for several branches.
        nodes: one, or those of all branches that share the line, in the order of calls.
        parts: the branches inside it, each of them shared in the same way.
    """

    name: str
    nodes: tuple[Node, ...]
    parts: tuple["Branch", ...] = ()

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of its nodes."""
        return max((node.verdict for node in self.nodes), key=VERDICTS.index)

    @property
    def worst(self) -> Difference | None:
        """The difference of its nodes that is the furthest beyond what is allowed."""
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
        """Whether nothing that was compared in it is more than rounding."""
        return not self.any(lambda node: node.verdict not in CLEAN or node.is_root_cause)

    def any(self, test: Callable[[Node], bool]) -> bool:
        """Returns whether the test holds for one of its nodes or of those inside it."""
        return any(map(test, self.nodes)) or any(part.any(test) for part in self.parts)


def build_tree(nodes: Sequence[Node], around: str = "") -> tuple[Branch, ...]:
    """Builds trees: nodes deeper than the one before them are inside it.

    Args:
        nodes: in the order of calls, each before those inside it.
        around: path of the module that encloses them all; "" if there is none.
    """
    branches = []
    start = 0
    while start < len(nodes):
        node = nodes[start]
        end = start + 1
        while end < len(nodes) and nodes[end].depth > node.depth:
            end += 1
        parts = build_tree(nodes[start + 1 : end], node.path)
        branches.append(Branch(_name(node, around), (node,), parts))
        start = end
    return tuple(branches)


def fold_repeats(branches: Sequence[Branch]) -> list[tuple[Branch, ...]]:
    """Groups siblings into runs: similar clean branches with consecutive numbers are one run."""
    runs: list[tuple[Branch, ...]] = []
    for branch in branches:
        if runs and _continues(runs[-1][-1], branch):
            runs[-1] = (*runs[-1], branch)
        else:
            runs.append((branch,))
    return runs


def merge(run: Sequence[Branch]) -> Branch:
    """Merges a run into one branch, with the worst values of its members."""
    if len(run) == 1:
        return run[0]
    nodes = tuple(itertools.chain.from_iterable(branch.nodes for branch in run))
    parts = zip(*(branch.parts for branch in run), strict=True)
    merged = (dataclasses.replace(merge(part), name=part[0].name) for part in parts)
    return Branch(f"{run[0].name} … {run[-1].name}", nodes, tuple(merged))


def _name(node: Node, around: str) -> str:
    """Returns the path within the enclosing branch; for the whole model its class."""
    prefix = f"{around}." if around else ""
    return " + ".join(p.removeprefix(prefix) for p in node.path.split(" + ")) or node.kind


def _continues(one: Branch, other: Branch) -> bool:
    """Returns whether the second has the next number, is similar, and both are clean."""
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
    """Splits a name into its stem and the number at its end."""
    match = re.fullmatch(r"(.*?)(\d+)", name)
    return (match[1], int(match[2])) if match else (name, None)


def _shape(branch: Branch) -> tuple[object, ...]:
    """Returns what similar branches have in common: classes, messages, names of the parts."""
    kinds = tuple((node.kind, node.reference_kind, node.message) for node in branch.nodes)
    return kinds, tuple((part.name, _shape(part)) for part in branch.parts)


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
