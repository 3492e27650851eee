"""What a pair of modules did in the whole models: errors as they add up, rounding, pictures."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxformer.parity.matching.calls import Meeting, meet
from jaxformer.parity.report.model import Histogram, Maps
from jaxformer.parity.tolerance import ROUNDOFF, judge, rounding, ulps
from jaxformer.parity.trace import jax_trace as jax_side
from jaxformer.parity.trace import torch_trace as torch_side
from jaxformer.parity.trace.padding import Padding, of_tokens

BINS = 40
# Of larger outputs a histogram counts every n-th number.
COUNTED = 1 << 18


def in_context(
    meeting: Meeting,
    low: Mapping[str, jax_side.Call],
    their_low: torch_side.Trace | None,
    dtype: str,
    padding: Padding,
) -> dict[str, Any]:
    """Fields of a node: how far our output is from theirs as both came out of the whole models.

    Args:
        meeting: the first of the pair, in float64.
        low: our calls in the dtype under test; empty where it was not run.
        their_low: their pass in the dtype under test.
        dtype: under test.
        padding: tokens that are left out.
    """
    pair = meeting.pair
    exact = _flat([meeting.answers(place)[0] for place in range(len(pair.ours))], padding)
    ours = _flat([call.outputs[0] for call in meeting.ours], padding)
    difference = judge(ours, exact)
    found: dict[str, Any] = {"histogram": _histogram(ours, exact), "maps": _maps(meeting)}
    met = [] if their_low is None else meet(pair, low, their_low)[0]
    if met:
        narrow = met[0]
        rounded = _flat([call.outputs[0] for call in narrow.ours], padding)
        theirs = _flat([narrow.answers(place)[0] for place in range(len(pair.ours))], padding)
        off = rounding(rounded, exact)
        difference = dataclasses.replace(
            difference,
            our_rounding=off,
            their_rounding=rounding(theirs, exact),
            ulps=ulps(rounded, exact, dtype),
        )
        entered = meeting.inputs(0)
        if entered and entered[0] is not None:
            came = _flat([narrow.ours[0].inputs[0]], padding)
            before = rounding(came, _flat([entered[0]], padding))
            found["condition"] = off / max(before, ROUNDOFF[dtype])
    return {**found, "in_context": difference}


def _flat(arrays: list[Any], padding: Padding) -> np.ndarray:
    flat = [of_tokens(np.asarray(a, np.float64), padding).reshape(-1) for a in arrays]
    return flat[0] if len(flat) == 1 else np.concatenate(flat)


def _histogram(ours: np.ndarray, theirs: np.ndarray) -> Histogram | None:
    every = max(1, ours.size // COUNTED)
    both = [a[np.isfinite(a)] for a in (ours[::every], theirs[::every])]
    if not all(a.size for a in both):
        return None
    low, high = min(float(a.min()) for a in both), max(float(a.max()) for a in both)
    edges = np.linspace(low, high if high > low else low + 1.0, BINS + 1)
    counts = [tuple(np.histogram(a, edges)[0].tolist()) for a in both]
    return Histogram(tuple(edges.tolist()), *counts)


def _maps(meeting: Meeting) -> Maps | None:
    ours, theirs = meeting.ours[0].weights, meeting.theirs[0].weights
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return None
    return Maps(*(_nested(seen.beginning) for seen in (ours, theirs)))


def _nested(array: np.ndarray) -> Any:
    return tuple(tuple(tuple(row) for row in head) for head in array.astype(np.float32).tolist())
