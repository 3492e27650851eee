"""A report of ``compare`` as a page: for a notebook, or as a file."""

import linecache
from html import escape
from typing import TYPE_CHECKING

from jaxformer.parity.graphs.recording.tape import shorten

if TYPE_CHECKING:
    from jaxformer.parity.graphs.report import GraphReport, RootCause

STYLE = (
    "font-family:sans-serif;line-height:1.4;max-width:60em",
    "border-left:4px solid #b3261e;padding:0 0 0 1em;margin:1em 0",
    "background:#8882;padding:.5em;overflow:auto",
)


def page(report: "GraphReport") -> str:
    """Returns a report as HTML that needs no other file."""
    body = [f"<h3>{escape(report.kind)} against PyTorch: {escape(report.headline)}</h3>"]
    c = report.coverage
    rows = (
        ("modules of the reference", c.modules),
        ("operators of the reference with parameters", c.operators),
        ("parameters of the candidate", c.parameters),
        ("gradients", c.gradients),
        ("values of the candidate", c.values),
    )
    cells = "".join(f"<tr><td>{name}</td><td>{a} of {b}</td></tr>" for name, (a, b) in rows)
    body.append(f"<table><tr><th>compared</th><th></th></tr>{cells}</table>")
    body += [_cause(number, cause) for number, cause in enumerate(report.root_causes, 1)]
    for title, sentences in (
        ("wrong parameters", report.weights),
        ("constants in float32 (no bug)", report.tables),
        ("not compared", report.incomplete),
        ("remarks", report.remarks),
    ):
        if sentences:
            items = "".join(f"<li>{escape(text)}</li>" for text in sentences)
            body.append(f"<h4>{title}</h4><ul>{items}</ul>")
    return f'<meta charset="utf-8"><div style="{STYLE[0]}">{"".join(body)}</div>'


def _cause(number: int, cause: "RootCause") -> str:
    facts = [f"off by {cause.error:.1e} of scale"]
    if cause.effect is not None:
        facts.append(f"moves the results by {cause.effect:.1e}")
    if cause.is_backward:
        facts.append("in the backward pass alone")
    if cause.places > 1:
        facts.append(f"in {cause.places} places")
    sides = [("candidate", cause.jax_source, cause.jax_module)]
    sides.append(("reference", cause.torch_source, cause.torch_module))
    text = escape(cause.diagnosis or "the two segments differ")
    return (
        f'<div style="{STYLE[1]}"><p><b>{number}. {text}</b><br>{", ".join(facts)}</p>'
        f"{''.join(_side(*side) for side in sides)}</div>"
    )


def _side(side: str, source: str, module: str) -> str:
    path, _, line = source.rpartition(":")
    code = linecache.getline(path, int(line)).strip() if line.isdigit() else ""
    place = escape(" in ".join(part for part in (shorten(source), module) if part))
    shown = f'<pre style="{STYLE[2]}">{escape(code)}</pre>' if code else ""
    return f"<p>{side}: {place or 'source unknown'}</p>{shown}"
