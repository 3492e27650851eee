"""Packs a report's numbers for the script of the page."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxformer.parity.findings import Difference, Node
from jaxformer.parity.report.html.attention_maps import attention_pictures
from jaxformer.parity.report.text import json_number

if TYPE_CHECKING:
    from jaxformer.parity.report.report import Report


def page_data(report: "Report") -> dict[str, Any]:
    """Returns the values that ``page.js`` draws from, ready for JSON."""
    pictures = attention_pictures(report.nodes)
    return {
        "mode": report.mode,
        "dtype": report.dtype,
        "nodes": [_node_data(node, pictures.get(index)) for index, node in enumerate(report.nodes)],
        "steps": [
            {
                "number": step.number,
                "candidate": json_number(step.candidate, 8),
                "reference": json_number(step.reference, 8),
                "difference": _difference_data(step.difference),
                "note": step.note,
            }
            for step in report.steps
        ],
    }


def _node_data(node: Node, maps: Mapping[str, Any] | None) -> dict[str, Any]:
    histogram = node.histogram
    return {
        "path": node.path,
        "referencePath": node.reference_path,
        "kind": node.kind,
        "referenceKind": node.reference_kind,
        "depth": node.depth,
        "verdict": node.verdict,
        "isRootCause": node.is_root_cause,
        "stage": node.stage,
        "message": node.message,
        "condition": json_number(node.condition),
        "output": _difference_data(node.forward),
        "whole": _difference_data(node.in_context),
        "gradients": {name: _difference_data(one) for name, one in node.backward.items()},
        "parameters": {name: _difference_data(one) for name, one in node.parameters.items()},
        "histogram": histogram
        and {
            "edges": [json_number(edge, 4) for edge in histogram.edges],
            "candidate": histogram.candidate,
            "reference": histogram.reference,
        },
        "maps": maps,
    }


def _difference_data(difference: Difference | None) -> list[Any] | None:
    """Returns relative error, allowed, excess, rounding of both sides and ulps, in this order."""
    if difference is None:
        return None
    scale = difference.scale or 1.0
    # Rounded to three digits, a bug must still be more than once what is allowed.
    excess = max(difference.excess, 1.01) if difference.is_bug else difference.excess
    errors = (difference.relative, difference.allowed / scale, excess)
    rounding = (difference.candidate_rounding, difference.reference_rounding, difference.ulps)
    return [json_number(value) for value in (*errors, *rounding)]
