"""Prints a report in a terminal: a tree with one line a node, and the verdict as the last line."""

import io
import itertools
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxformer.parity.findings import VERDICTS
from jaxformer.parity.report.text import (
    SYMBOLS,
    cause_facts,
    cause_lines,
    chosen_steps,
    coverage_lines,
    has_lines,
    numbers_line,
    one_line,
    place,
    reference_place,
    root_cause_count,
    root_cause_line,
    scientific,
    sentences,
    short,
    step_cells,
    step_line,
    step_unit,
    title,
    verdict_line,
    verdict_word,
)
from jaxformer.parity.report.tree import Branch, build_tree, fold_repeats, merge

if TYPE_CHECKING:
    from jaxformer.parity.report.report import Report

STYLES = {
    "exact": "dim", "rounding": "green", "amplified": "yellow", "incomplete": "yellow", "bug": "red"
}  # fmt: skip
# For terminals without Unicode; other characters are written as their codes.
ASCII = str.maketrans(
    {"≈": "~", "▲": "^", "✗": "x", "├": "|", "└": "`", "│": "|", "─": "-", "…": "...", "·": "-",
     "×": "x", "±": "+-", "−": "-", "→": "->", "–": "-", "’": "'"}
)  # fmt: skip
# Below these widths the column of units is left out, and a table becomes a list.
FULL_WIDTH, TABLE_WIDTH = 60, 72
MIN_NAME_WIDTH, MIN_EFFECT_WIDTH = 14, 24
# Root causes and sentences that are shown with all that is known of them.
MOST_LISTED = 8
# How much of a text the tree may have at least.
TREE_SHARE = 0.4
# Between the columns of a table.
GAP = 2
# Of a report that is no terminal's.
TEXT_WIDTH = 100


def print_report(report: "Report", console: Console) -> None:
    """Prints a report.

    How much of each side was compared comes first, then the tree of the model. A line shows a
    node's verdict, its worst float64 error relative to scale, its error in the dtype under test in
    units in the last place, and the condition of nodes that amplify. Similar clean siblings share a
    line with their worst values.
    Then come the settings that differ, the steps of training or generation, the lines of code of
    the root causes, what was not compared, what several nodes show together, and as the last line
    the verdict: ``equal (rounding)``, or ``bug:`` with the first root cause. That line is never
    wrapped.

    Args:
        report: the report.
        console: where it is printed; its width and encoding are respected.
    """
    printer = _Printer(report, console)
    printer.line((title(report), "bold"))
    printer.coverage()
    printer.tree()
    printer.settings()
    printer.steps()
    printer.causes()
    printer.sentences()
    printer.verdict()


def as_text(report: "Report", most_lines: int) -> str:
    """Returns what ``print_report`` prints, without colours, and short enough to be read at once.

    Of a long tree only the beginning is there. Of each list, such as that of root causes, there are
    the first ones, as many as leave room for the tree.

    Args:
        report: the report.
        most_lines: how many lines the text may have.
    """

    def lines_of(*sections: Callable[[_Printer], None]) -> list[str]:
        stream = io.StringIO()
        # In a notebook rich would show what is wanted as text.
        console = Console(file=stream, width=TEXT_WIDTH, color_system=None, force_jupyter=False)
        printer = _Printer(report, console)
        for section in sections:
            section(printer)
        return stream.getvalue().splitlines()

    def lists_of(most: int) -> list[str]:
        return lines_of(
            _Printer.settings,
            _Printer.steps,
            lambda printer: printer.causes(most),
            lambda printer: printer.sentences(most),
            lambda printer: printer.verdict(most),
        )

    def cut(lines: list[str], most: int, unit: str) -> list[str]:
        if len(lines) <= most:
            return lines
        return [*lines[: most - 1], f"… and {len(lines) - most + 1} more {unit}; to_json has all"]

    begin = [title(report), *lines_of(_Printer.coverage)]
    tree = lines_of(_Printer.tree)
    room = most_lines - len(begin) - min(len(tree), int(TREE_SHARE * most_lines))
    lists = (lists_of(most) for most in range(MOST_LISTED, 0, -1))
    end = next((lines for lines in lists if len(lines) <= room), lists_of(1))
    # The last line is the verdict.
    end = [*cut(end[:-1], room - 1, "lines"), end[-1]]
    tree = cut(tree, most_lines - len(begin) - len(end), "lines of modules")
    return "\n".join([*begin, *tree, *end])


class _Printer:
    """Prints the sections of one report on one console."""

    def __init__(self, report: "Report", console: Console):
        self.report = report
        self.console = console
        self.ascii = console.options.ascii_only

    def line(self, *parts: tuple[str, str]) -> None:
        """Prints one line, never wrapped, of texts with their styles."""
        assembled = Text.assemble(*((self.plain(text), style) for text, style in parts))
        self.console.print(assembled, soft_wrap=True, highlight=False)

    def plain(self, text: str) -> str:
        """Returns the text in characters that the terminal has."""
        if not self.ascii:
            return text
        return text.translate(ASCII).encode("ascii", "backslashreplace").decode()

    def coverage(self) -> None:
        """Prints how much of each side was compared, and what was not counted."""
        for text in coverage_lines(self.report):
            self._paragraph(text, "", "dim")

    def tree(self) -> None:
        """Prints one line a node, numbers in columns, with a node's message below it."""
        if not self.report.nodes:
            return
        lines = list(_lines(build_tree(self.report.nodes)))
        columns = [("error", [_error(branch) for _, _, branch in lines])]
        units = [short(branch.ulps) for _, _, branch in lines]
        is_wide = self.console.width >= FULL_WIDTH
        if is_wide and any(units):
            columns.append(("ulp", units))
        conditions = [_condition(branch) for _, _, branch in lines]
        if any(conditions):
            columns.append(("condition" if is_wide else "cond.", conditions))
        widths = [max(map(len, [head, *cells])) for head, cells in columns]
        names = [self.plain(f"{guide}? {branch.name}") for guide, _, branch in lines]
        room = max(self.console.width - sum(w + 2 for w in widths), MIN_NAME_WIDTH)
        left = min(max(map(len, names), default=0), room)
        heads = [f"  {head:>{w}}" for (head, _), w in zip(columns, widths, strict=True)]
        self.line((" " * left + "".join(heads), "dim"))
        for index, (guide, below, branch) in enumerate(lines):
            name = self.plain(branch.name)
            space = left - len(guide) - 2
            if len(name) > space:
                # The end of a path says more than its beginning.
                cut = self.plain("…")
                name = cut + name[len(name) - max(space - len(cut), 1) :]
            cells = [
                f"  {cells[index]:>{w}}" for (_, cells), w in zip(columns, widths, strict=True)
            ]
            holds_bug = branch.any(lambda node: node.is_root_cause)
            is_root_cause = any(node.is_root_cause for node in branch.nodes)
            self.line(
                (guide, "dim"),
                (f"{SYMBOLS[branch.verdict]} ", STYLES[branch.verdict]),
                (name.ljust(space), "bold red" if is_root_cause else "red" if holds_bug else ""),
                ("".join(cells), STYLES[branch.verdict]),
            )
            self._messages(branch, below)

    def settings(self) -> None:
        """Prints the settings that differ."""
        rows = [
            [one_line(text) for text in (s.name, s.candidate, s.reference, s.effect)]
            for s in self.report.settings
        ]
        if not rows:
            return
        self.line()
        self.line(("Settings that differ", "bold"))
        longest = [max(map(len, column)) for column in zip(*rows, strict=True)]
        room = self.console.width - sum(longest[:3]) - 3 * GAP
        if self.console.width >= TABLE_WIDTH and room >= min(longest[3], MIN_EFFECT_WIDTH):
            heads = ["setting", "candidate", "reference", "likely effect"]
            self._table(heads, rows, whole=longest[:3])
            return
        for name, candidate, reference, effect in rows:
            self._paragraph(f"{name}: candidate {candidate}, reference {reference}", "")
            self._paragraph(effect, "  ", "dim")

    def steps(self) -> None:
        """Prints losses or tokens side by side."""
        report = self.report
        if not report.steps:
            return
        unit = step_unit(report)
        self.line()
        self.line((f"{unit.capitalize()}s", "bold"))
        steps = chosen_steps(report)
        rows = [[one_line(cell) for cell in step_cells(report, step)] for step in steps]
        divergence = report.first_divergence
        styles = ["bold red" if step is not None and step is divergence else "" for step in steps]
        self._table([unit, "candidate", "reference", "error", ""], rows, styles, "right")

    def causes(self, most: int = MOST_LISTED) -> None:
        """Prints the first root causes whose lines of code are known; severe ones come first."""
        found = [cause for cause in self.report.root_causes if has_lines(cause)]
        for number, cause in enumerate(found[:most], 1):
            self.line()
            text = cause.diagnosis or cause.message
            self._paragraph(f"{number}. {text} (in {place(cause)})", "", "bold")
            self._paragraph(cause_facts(cause), "   ")
            for side, where in cause_lines(cause):
                self.line((f"   {side}  {one_line(where)}", "dim"))
        if len(found) > most:
            self.line()
            self.line((f"and {len(found) - most} more, which root_causes of the report has", ""))

    def sentences(self, most: int = MOST_LISTED) -> None:
        """Prints the first things that are said of parameters, tables, and what was left out."""
        for heading, found in sentences(self.report):
            self.line()
            self.line((heading, "bold"))
            for text in found[:most]:
                self._paragraph(text, "  ")
            if len(found) > most:
                self.line((f"  and {len(found) - most} more, which the report has", ""))

    def verdict(self, most: int | None = None) -> None:
        """Prints the counts of verdicts, the remarks, further bugs and the last line.

        Args:
            most: how many further bugs; default all.
        """
        report = self.report
        counts = {v: sum(node.verdict == v for node in report.nodes) for v in VERDICTS}
        counted = ", ".join(
            f"{count} {verdict_word(verdict, count)}{root_cause_count(report, verdict)}"
            for verdict, count in counts.items()
            if count
        )
        self.line()
        if counted:
            self.line((f"nodes: {counted}", "dim"))
        elif not report.steps:
            self.line(("no nodes were compared", "dim"))
        for remark in report.remarks:
            self._paragraph(remark, "", STYLES["amplified"])
        count = len(report.root_causes)
        # Where there are lines of code, each has been listed with them.
        further = [
            f"bug {index} of {count}: {root_cause_line(cause)}"
            for index, cause in enumerate(report.root_causes[1:], 2)
            if not has_lines(cause) or cause.node is not None
        ]
        for line in further[:most]:
            self.line((line, "red"))
        if most is not None and len(further) > most:
            self.line((f"and {len(further) - most} more, which root_causes of the report has", ""))
        if report.first_divergence is not None and count:
            self.line((f"divergence: {step_line(report, report.first_divergence)}", "red"))
        self.line((verdict_line(report), f"bold {STYLES[report.verdict]}"))

    def _messages(self, branch: Branch, below: str) -> None:
        """Prints the messages of a line's nodes; similar nodes have the same."""
        for node in branch.nodes[:1]:
            if node.is_root_cause and node.worst is not None:
                stage = f"{node.stage}: " if node.stage else ""
                self._paragraph(f"{stage}{node.message}", below, "red")
                self._paragraph(numbers_line(node, self.report.dtype), below)
                reference = f"reference: {reference_place(node)} ({node.reference_kind})"
                self._paragraph(reference, below, "dim")
            elif node.message:
                self._paragraph(node.message, below, "dim")

    def _paragraph(self, text: str, indent: str, style: str = "") -> None:
        """Prints a wrapped text, each line with the same indentation."""
        width = max(self.console.width - len(indent), MIN_NAME_WIDTH)
        for line in textwrap.wrap(self.plain(one_line(text)), width):
            self.line((indent, "dim"), (line, style))

    def _table(
        self,
        heads: Sequence[str],
        rows: Sequence[Sequence[str]],
        styles: Sequence[str] = (),
        justify: Literal["left", "right"] = "left",
        whole: Sequence[int] = (),
    ) -> None:
        table = Table(box=None, padding=(0, GAP, 0, 0), header_style="dim", show_edge=False)
        for head, width in itertools.zip_longest(heads, whole):
            # Columns whose widths are given are not broken.
            table.add_column(head, justify=justify, overflow="fold", no_wrap=width is not None)
        for index, row in enumerate(rows):
            cells = [Text(self.plain(cell)) for cell in row]
            table.add_row(*cells, style=styles[index] if styles else None)
        self.console.print(table, highlight=False)


def _lines(
    branches: Sequence[Branch], above: str = "", root: bool = True
) -> Iterator[tuple[str, str, Branch]]:
    """Yields each line's guide, the guide of the remarks below it, and its branch."""
    merged = [merge(run) for run in fold_repeats(branches)]
    for index, branch in enumerate(merged):
        last = index == len(merged) - 1
        guide = "" if root else above + ("└─ " if last else "├─ ")
        beside = "" if root else above + ("   " if last else "│  ")
        yield guide, beside + ("│  " if branch.parts else "   "), branch
        yield from _lines(branch.parts, beside, root=False)


def _error(branch: Branch) -> str:
    return "" if branch.worst is None else scientific(branch.worst.relative)


def _condition(branch: Branch) -> str:
    return short(branch.condition) if branch.verdict == "amplified" else ""
