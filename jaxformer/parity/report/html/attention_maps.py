"""Turns attention weights into small pictures of eight bits a weight, of limited total size."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.findings import Node

# The longest side of a picture, in cells.
MAX_SIDE = 64
# All pictures of a page together, in base64.
BUDGET_BYTES = 2_500_000
# Differences below this fraction of the largest weight are drawn paler, down to nothing: rounding
# in a correct head must not look like a bug.
FAINT = 1e-3


def attention_pictures(nodes: Sequence[Node]) -> Mapping[int, Mapping[str, Any]]:
    """Returns the pictures of each node that has attention maps, by its index among the nodes.

    If ``BUDGET_BYTES`` does not allow all heads, those that differ most are drawn: first one of
    every node, root causes before the others, then the second of every node, and so on.
    """
    ranked = []
    for index, node in enumerate(nodes):
        if node.maps is None:
            continue
        candidate = np.asarray(node.maps.candidate, float)
        reference = np.asarray(node.maps.reference, float)
        if candidate.shape != reference.shape or candidate.ndim != 3 or not candidate.size:
            continue
        largest = np.nan_to_num(np.abs(candidate - reference), nan=np.inf).max((1, 2))
        for rank, head in enumerate(np.argsort(-largest, kind="stable").tolist()):
            key = (rank, not node.is_root_cause, -largest[head], index)
            ranked.append((key, index, head, candidate[head], reference[head], len(candidate)))
    ranked.sort(key=lambda entry: entry[0])
    drawn: dict[int, dict[str, Any]] = {}
    left = BUDGET_BYTES
    for _, index, head, candidate, reference, count in ranked:
        picture = _picture(head, candidate, reference)
        left -= sum(len(picture[name]) for name in ("candidate", "reference", "difference"))
        if left < 0:
            break
        maps = drawn.setdefault(index, {"count": count, "heads": []})
        maps["shape"] = [*candidate.shape]
        maps["heads"].append(picture)
    for maps in drawn.values():
        maps["heads"].sort(key=lambda picture: picture["head"])
    return drawn


def _picture(head: int, candidate: np.ndarray, reference: np.ndarray) -> dict[str, Any]:
    """Returns three pictures of one head in base64, and the values that full colour stands for."""
    difference = candidate - reference
    high = float(np.nan_to_num(np.maximum(candidate, reference)).max()) or 1.0
    largest = float(np.nan_to_num(np.abs(difference), nan=np.inf).max())
    full = max(min(largest, high), FAINT * high)
    # Of the cells that become one, the value furthest from zero stays, with its sign.
    above, below = reduce(difference), reduce(-difference)
    signed = np.where(above >= below, above, -below)
    small = reduce(candidate)
    return {
        "head": head,
        "rows": small.shape[0],
        "columns": small.shape[1],
        "high": float(f"{high:.3g}"),
        "full": float(f"{full:.3g}"),
        "largest": float(f"{largest:.3g}") if np.isfinite(largest) else "Infinity",
        "candidate": _bytes(255 * small / high),
        "reference": _bytes(255 * reduce(reference) / high),
        "difference": _bytes(128 + 127 * np.clip(signed / full, -1, 1)),
    }


def reduce(map_TS: np.ndarray) -> np.ndarray:
    """Reduces a map to at most ``MAX_SIDE`` rows and columns, each cell the maximum of its area."""
    for axis in (0, 1):
        size = map_TS.shape[axis]
        if size > MAX_SIDE:
            starts = np.arange(MAX_SIDE) * size // MAX_SIDE
            map_TS = np.maximum.reduceat(map_TS, starts, axis=axis)
    return map_TS


def _bytes(values: np.ndarray) -> str:
    """Returns values from 0 to 255 as bytes in base64."""
    whole = np.clip(np.rint(np.nan_to_num(values)), 0, 255).astype(np.uint8)
    return base64.b64encode(whole.tobytes()).decode()
