"""A report as one page that a browser opens from the disk, without a network."""

import base64
import hashlib
import importlib.resources
import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jaxformer.parity.report.files import write_text
from jaxformer.parity.report.html.attention_maps import attention_pictures
from jaxformer.parity.report.model import VERDICTS, Difference, Node, Report, Verdict
from jaxformer.parity.report.tree import (
    Branch,
    build_tree,
    chosen_steps,
    fold_repeats,
    merge,
    number,
    one_line,
    place,
    root_causes_among,
    scientific,
    step_line,
    title,
)

SYMBOLS = {"exact": "=", "rounding": "≈", "amplified": "▲", "bug": "✗"}
EQUAL = {
    "exact": "Equal: not one number differs",
    "rounding": "Equal: what differs is rounding",
    "amplified": "Equal: what differs is rounding, here and there amplified",
}


def write_html(report: Report, path: str | Path) -> None:
    """Writes a report as one self-contained HTML page.

    It loads nothing, its content security policy forbids it to, and whatever comes from the models
    is escaped. Attention maps are reduced to 64 by 64 and, where there are many, to the heads that
    differ most, so that the page of a model of 48 layers stays below 5 MB.

    Args:
        report: the report.
        path: the file to write; atomically.

    Raises:
        ResourceError: the folder is missing, or the disk is full or may not be written.
    """
    write_text(path, page(report))


def page(report: Report) -> str:
    """The page as text."""
    folder = importlib.resources.files("jaxformer.parity.report.html") / "page"
    template, style, charts, drawing = (
        (folder / name).read_text("utf-8")
        for name in ("page.html", "page.css", "charts.js", "page.js")
    )
    script = f'"use strict";\n{{\n{charts}\n{drawing}}}\n'
    data = json.dumps(_data(report), separators=(",", ":"), default=str)
    parts = {
        "title": escape(f"{_headline(report)} – {title(report)}"),
        "verdict": report.verdict,
        "style": style,
        "style_hash": _hash(style),
        "script": script,
        "script_hash": _hash(script),
        "header": _header(report),
        "settings": _settings(report),
        "tree": _tree(report),
        "steps": _steps(report),
        "about": _about(report),
        # The one way out of a data block is a closing tag.
        "data": data.replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _hash(text: str) -> str:
    """As a content security policy names an inline style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _headline(report: Report) -> str:
    if report.verdict != "bug":
        return EQUAL[report.verdict]
    root_causes = report.root_causes
    if root_causes:
        count = "Bug" if len(root_causes) == 1 else f"{len(root_causes)} bugs, the first"
        return f"{count} in {place(root_causes[0])}"
    if report.first_divergence is not None:
        unit = "token" if report.mode == "generate" else "step"
        return f"They part at {unit} {report.first_divergence.number}"
    return "Bug"


def _header(report: Report) -> str:
    symbol = _symbol(report.verdict)
    lines = [
        f'<p class="kicker">{escape(title(report))}</p>',
        f"<h1>{symbol} {escape(_headline(report))}</h1>",
    ]
    if report.root_causes:
        lines.append('<ol class="root-causes">')
        for node in report.root_causes:
            stage = f'<span class="stage">{escape(node.stage)}</span> ' if node.stage else ""
            lines.append(
                f'<li><a href="#node-{report.nodes.index(node)}">{escape(place(node))}</a> '
                f"{stage}<span>{escape(one_line(node.message))}</span> "
                '<span class="reference">reference: '
                f"{escape(node.reference_path or 'the whole model')}"
                "</span></li>"
            )
        lines.append("</ol>")
    if report.first_divergence is not None:
        lines.append(f"<p>{escape(step_line(report, report.first_divergence))}</p>")
    if report.remarks:
        remarks = "".join(f"<li>{escape(one_line(remark))}</li>" for remark in report.remarks)
        lines.append(f'<ul class="remarks">{remarks}</ul>')
    counts = {v: sum(node.verdict == v for node in report.nodes) for v in reversed(VERDICTS)}
    lines.append('<ul class="counts" aria-label="nodes by verdict">')
    lines += [
        f"<li>{_symbol(v)} <b>{count}</b> {v}{root_causes_among(report, v)}</li>"
        for v, count in counts.items()
        if count
    ]
    lines.append("</ul>")
    return "\n".join(lines)


def _settings(report: Report) -> str:
    if not report.settings:
        return ""
    rows = [[s.name, s.candidate, s.reference, s.effect] for s in report.settings]
    table = _table(["setting", "candidate", "reference", "likely effect"], rows)
    return f'<section class="card" id="settings"><h2>Settings that differ</h2>{table}</section>'


def _steps(report: Report) -> str:
    if not report.steps:
        return ""
    unit = "token" if report.mode == "generate" else "step"
    rows, classes = [], []
    for step in chosen_steps(report):
        parts = step is not None and step is report.first_divergence
        classes.append("first-divergence" if parts else "")
        if step is None:
            rows.append(["…", "", "", "", ""])
            continue
        figures = [
            number(step.candidate),
            number(step.reference),
            scientific(step.difference.relative),
        ]
        rows.append([str(step.number), *figures, step.note or ("parts here" if parts else "")])
    table = _table([unit, "candidate", "reference", "difference", "note"], rows, classes)
    return (
        f'<section class="card" id="steps"><h2>{unit.capitalize()}s</h2>'
        '<div class="chart" id="step-losses"></div><div class="chart" id="step-errors"></div>'
        f"<details><summary>Table</summary>{table}</details></section>"
    )


def _about(report: Report) -> str:
    def text(value: Any) -> str:
        if isinstance(value, str | int | float):
            return str(value)
        return json.dumps(value, ensure_ascii=False, default=str)

    rows = [
        f"<div><dt>{escape(str(name))}</dt><dd>{escape(text(value))}</dd></div>"
        for name, value in {"mode": report.mode, "dtype": report.dtype, **report.about}.items()
    ]
    return f"<dl>{''.join(rows)}</dl>"


def _tree(report: Report) -> str:
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
    """A table that a narrow screen shows as a list, each value with the head of its column."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in heads)
    lines = []
    for index, row in enumerate(rows):
        cells = "".join(
            f'<td data-head="{escape(name)}">{escape(text)}</td>'
            for name, text in zip(heads, row, strict=True)
        )
        lines.append(f'<tr class="{classes[index] if classes else ""}">{cells}</tr>')
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _data(report: Report) -> dict[str, Any]:
    """What the page's script draws from."""
    images = attention_pictures(report.nodes)
    return {
        "mode": report.mode,
        "dtype": report.dtype,
        "nodes": [_node(node, images.get(index)) for index, node in enumerate(report.nodes)],
        "steps": [
            [
                s.number,
                _short(s.candidate, 8),
                _short(s.reference, 8),
                _difference(s.difference),
                s.note,
            ]
            for s in report.steps
        ],
    }


def _node(node: Node, maps: Any) -> dict[str, Any]:
    histogram = node.histogram
    return {
        "path": node.path,
        "reference": node.reference_path,
        "kind": node.kind,
        "referenceKind": node.reference_kind,
        "depth": node.depth,
        "verdict": node.verdict,
        "rootCause": node.is_root_cause,
        "stage": node.stage,
        "message": node.message,
        "condition": _short(node.condition),
        "output": _difference(node.forward),
        "whole": _difference(node.in_context),
        "gradients": {name: _difference(one) for name, one in node.backward.items()},
        "parameters": {name: _difference(one) for name, one in node.parameters.items()},
        "histogram": histogram
        and {
            "edges": [_short(edge, 4) for edge in histogram.edges],
            "candidate": histogram.candidate,
            "reference": histogram.reference,
        },
        "maps": maps,
    }


def _difference(difference: Difference | None) -> list[Any] | None:
    """Relative error, what is allowed, error over allowed, rounding of both sides, ulps."""
    if difference is None:
        return None
    scale = difference.scale or 1.0
    # Rounded to three digits, a bug must still be more than once what is allowed.
    excess = max(difference.excess, 1.01) if difference.is_bug else difference.excess
    figures = (difference.relative, difference.allowed / scale, excess)
    rounding = (difference.candidate_rounding, difference.reference_rounding, difference.ulps)
    return [_short(value) for value in (*figures, *rounding)]


def _short(value: float | None, digits: int = 3) -> float | str | None:
    """A number with few digits; what JSON does not know as the text that JavaScript reads."""
    if value is None or math.isfinite(value):
        return value if value is None else float(f"{value:.{digits}g}")
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
