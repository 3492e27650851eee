"""Writes a report as one page that a browser opens from the disk, without a network."""

import base64
import hashlib
import importlib.resources
import json
import linecache
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxformer.parity.findings import VERDICTS, RootCause, Verdict
from jaxformer.parity.report.html.page_data import page_data
from jaxformer.parity.report.text import (
    SYMBOLS,
    cause_facts,
    cause_lines,
    chosen_steps,
    coverage_lines,
    has_lines,
    one_line,
    place,
    reference_place,
    root_cause_count,
    scientific,
    sentences,
    step_cells,
    step_line,
    step_unit,
    title,
)
from jaxformer.parity.report.tree import Branch, build_tree, fold_repeats, merge
from jaxformer.storage.durable_files import atomic_write_bytes

if TYPE_CHECKING:
    from jaxformer.parity.report.report import Report

EQUAL = {
    "exact": "Equal: not one number differs",
    "rounding": "Equal: what differs is rounding",
    "amplified": "Equal: what differs is rounding, here and there amplified",
    "incomplete": "Incomplete: no bug was found in what was compared",
}
# Parts of the page that need its script, which draws what was measured of each node.
SCRIPTED = re.compile(r"<!-- scripted -->.*?<!-- end -->\n", re.DOTALL)


def write_html(report: "Report", path: str | Path) -> None:
    """Writes a report as one self-contained HTML page.

    The page loads nothing, which its content security policy enforces, and all text that comes from
    the models is escaped. Attention maps are reduced to 64 by 64 and, if there are many, to the
    heads that differ most, so that the page of a model of 48 layers stays below 5 MB.

    Args:
        report: the report.
        path: the file, which is written atomically.

    Raises:
        ResourceError: the folder is missing or not writable, or the disk is full.
    """
    atomic_write_bytes(path, page(report).encode("utf-8", "backslashreplace"))


def page(report: "Report") -> str:
    """Returns the page as text."""
    folder = importlib.resources.files("jaxformer.parity.report.html") / "page"
    template, style, charts, drawing = (
        (folder / name).read_text("utf-8")
        for name in ("page.html", "page.css", "charts.js", "page.js")
    )
    script = f'"use strict";\n{{\n{charts}\n{drawing}}}\n'
    data = json.dumps(page_data(report), separators=(",", ":"), default=str)
    parts = {
        "title": escape(f"{_headline(report)} – {title(report)}"),
        "verdict": report.verdict,
        "style": style,
        "style_hash": _hash(style),
        "script": script,
        "script_hash": _hash(script),
        "header": _header(report),
        "settings": _settings(report) + _causes(report),
        "tree": _tree(report),
        "steps": _steps(report),
        "about": _about(report),
        # Only a closing tag could end a data block early.
        "data": data.replace("<", "\\u003c"),
    }
    if report.is_by_operators:
        # Values were matched: nothing was measured of nodes that could be drawn.
        template = SCRIPTED.sub("", template)
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _hash(text: str) -> str:
    """Returns the hash by which a content security policy allows an inline style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _headline(report: "Report") -> str:
    if report.verdict != "bug":
        return EQUAL[report.verdict]
    root_causes = report.root_causes
    if root_causes:
        count = "Bug" if len(root_causes) == 1 else f"{len(root_causes)} bugs, the first"
        return f"{count} in {place(root_causes[0])}"
    if report.first_divergence is not None:
        return f"Divergence at {step_unit(report)} {report.first_divergence.number}"
    return "Bug"


def _header(report: "Report") -> str:
    symbol = _symbol(report.verdict)
    lines = [
        f'<p class="kicker">{escape(title(report))}</p>',
        f"<h1>{symbol} {escape(_headline(report))}</h1>",
    ]
    if report.root_causes:
        lines.append('<ol class="root-causes">')
        paths = [node.path for node in report.nodes]
        for cause in report.root_causes:
            stage = f'<span class="stage">{escape(cause.stage)}</span> ' if cause.stage else ""
            name = escape(place(cause))
            if cause.path in paths:
                name = f'<a href="#node-{paths.index(cause.path)}">{name}</a>'
            lines.append(
                f"<li>{name} {stage}<span>{escape(one_line(cause.message))}</span> "
                '<span class="reference">reference: '
                f"{escape(reference_place(cause))}</span></li>"
            )
        lines.append("</ol>")
    if report.first_divergence is not None:
        lines.append(f"<p>{escape(step_line(report, report.first_divergence))}</p>")
    if report.remarks:
        remarks = "".join(f"<li>{escape(one_line(remark))}</li>" for remark in report.remarks)
        lines.append(f'<ul class="remarks">{remarks}</ul>')
    lines += [f"<p>{escape(line)}</p>" for line in coverage_lines(report)]
    counts = {v: sum(node.verdict == v for node in report.nodes) for v in reversed(VERDICTS)}
    lines.append('<ul class="counts" aria-label="nodes by verdict">')
    lines += [
        f"<li>{_symbol(v)} <b>{count}</b> {v}{root_cause_count(report, v)}</li>"
        for v, count in counts.items()
        if count
    ]
    lines.append("</ul>")
    return "\n".join(lines)


def _settings(report: "Report") -> str:
    if not report.settings:
        return ""
    rows = [[s.name, s.candidate, s.reference, s.effect] for s in report.settings]
    table = _table(["setting", "candidate", "reference", "likely effect"], rows)
    return f'<section class="card" id="settings"><h2>Settings that differ</h2>{table}</section>'


def _causes(report: "Report") -> str:
    """Returns the root causes with their lines of code, and the lists of sentences."""
    found = [cause for cause in report.root_causes if has_lines(cause)]
    bugs = len(report.root_causes) + len(report.weights)
    cards = []
    if found:
        title = "1 bug" if bugs == 1 else f"{bugs} bugs"
        cards.append(f"<h2>{title}</h2><ol>{''.join(map(_cause, found))}</ol>")
    for title, texts in sentences(report):
        items = "".join(f"<li>{escape(one_line(text))}</li>" for text in texts)
        cards.append(f"<h2>{title}</h2><ul>{items}</ul>")
    return "".join(f'<section class="card">{card}</section>' for card in cards)


def _cause(cause: RootCause) -> str:
    lines = [f"<b>{escape(one_line(cause.diagnosis or cause.message))}</b>, {cause_facts(cause)}"]
    sources = cause.jax_source, cause.torch_source
    for (side, where), source in zip(cause_lines(cause), sources, strict=True):
        path, _, line = source.rpartition(":")
        code = linecache.getline(path, int(line)).strip() if line.isdigit() else ""
        shown = f"<pre>{escape(code)}</pre>" if code else ""
        lines.append(f"{side}: {escape(one_line(where))}{shown}")
    return f"<li>{''.join(f'<div>{line}</div>' for line in lines)}</li>"


def _steps(report: "Report") -> str:
    if not report.steps:
        return ""
    unit = step_unit(report)
    steps = chosen_steps(report)
    rows = [step_cells(report, step) for step in steps]
    divergence = report.first_divergence
    classes = [
        "first-divergence" if step is not None and step is divergence else "" for step in steps
    ]
    table = _table([unit, "candidate", "reference", "difference", "note"], rows, classes)
    return (
        f'<section class="card" id="steps"><h2>{unit.capitalize()}s</h2>'
        '<div class="chart" id="step-losses"></div><div class="chart" id="step-errors"></div>'
        f"<details><summary>Table</summary>{table}</details></section>"
    )


def _about(report: "Report") -> str:
    def text(value: Any) -> str:
        if isinstance(value, str | int | float):
            return str(value)
        return json.dumps(value, ensure_ascii=False, default=str)

    rows = [
        f"<div><dt>{escape(str(name))}</dt><dd>{escape(text(value))}</dd></div>"
        for name, value in {"mode": report.mode, "dtype": report.dtype, **report.about}.items()
    ]
    return f"<dl>{''.join(rows)}</dl>"


def _tree(report: "Report") -> str:
    indices = {id(node): index for index, node in enumerate(report.nodes)}
    return (
        f'<ul role="tree" aria-label="the model">{_items(build_tree(report.nodes), indices)}</ul>'
    )


def _items(branches: Sequence[Branch], indices: Mapping[int, int]) -> str:
    items = []
    for run in fold_repeats(branches):
        members = "".join(_item(branch, indices) for branch in run)
        if len(run) == 1:
            items.append(members)
        else:
            row = _row(merge(run), f"× {len(run)}")
            items.append(_tree_item(row, 'class="fold"', members, expanded=False))
    return "".join(items)


def _item(branch: Branch, indices: Mapping[int, int]) -> str:
    node = branch.nodes[0]
    index = indices[id(node)]
    expanded = not node.path or any(not part.is_clean for part in branch.parts)
    holds_bug = branch.any(lambda inner: inner.is_root_cause)
    place_of_bug = "root-cause" if node.is_root_cause else "holds" if holds_bug else ""
    return _tree_item(
        _row(branch, "" if branch.name == node.kind else node.kind),
        f'id="node-{index}" data-node="{index}" class="{place_of_bug}"',
        _items(branch.parts, indices),
        expanded,
    )


def _tree_item(row: str, attributes: str, parts: str, expanded: bool) -> str:
    state = f' aria-expanded="{str(expanded).lower()}"' if parts else ""
    group = f'<ul role="group">{parts}</ul>' if parts else ""
    return f'<li role="treeitem" tabindex="-1" {attributes}{state}>{row}{group}</li>'


def _row(branch: Branch, kind: str) -> str:
    figure = "" if branch.worst is None else scientific(branch.worst.relative)
    return (
        f'<div class="row"><span class="twist" aria-hidden="true"></span>{_symbol(branch.verdict)}'
        f'<span class="name">{escape(branch.name)}</span><span class="kind">{escape(kind)}</span>'
        f'<span class="figure">{figure}</span></div>'
    )


def _symbol(verdict: Verdict) -> str:
    attributes = f'class="symbol {verdict}" role="img" aria-label="{verdict}"'
    return f"<span {attributes}>{SYMBOLS[verdict]}</span>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], classes: Sequence[str] = ()) -> str:
    """Returns a table, which a narrow screen shows as a list of values with their heads."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    lines = []
    for index, row in enumerate(rows):
        cells = "".join(
            f'<td data-head="{escape(name)}">{escape(text)}</td>'
            for name, text in zip(heads, row, strict=True)
        )
        lines.append(f'<tr class="{classes[index] if classes else ""}">{cells}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
