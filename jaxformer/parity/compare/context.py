"""What a pair of modules did in the whole models: errors as they add up, rounding, pictures."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxformer.parity.matching.calls import MatchedCall, match_calls
from jaxformer.parity.report.model import AttentionMaps, Histogram
from jaxformer.parity.tolerance import ROUNDOFF, judge, rounding, ulps
from jaxformer.parity.trace import jax_trace as jax_trace
from jaxformer.parity.trace import torch_trace as torch_trace
from jaxformer.parity.trace.padding import Padding, of_tokens

BINS = 40
# Of larger outputs a histogram counts every n-th number.
COUNTED = 1 << 18


def in_context(
    matched_call: MatchedCall,
    low: Mapping[str, jax_trace.Call],
    reference_low: torch_trace.Trace | None,
    dtype: str,
    padding: Padding,
) -> dict[str, Any]:
    """Fields of a node: how far our output is from theirs as both came out of the whole models.

    Args:
        matched_call: the first of the pair, in float64.
        low: our calls in the dtype under test; empty where it was not run.
        reference_low: their pass in the dtype under test.
        dtype: under test.
        padding: tokens that are left out.
    """
    pair = matched_call.pair
    exact = _flat([matched_call.answers(place)[0] for place in range(len(pair.candidate))], padding)
    candidate = _flat([call.outputs[0] for call in matched_call.candidate], padding)
    difference = judge(candidate, exact)
    found: dict[str, Any] = {"histogram": _histogram(candidate, exact), "maps": _maps(matched_call)}
    met = [] if reference_low is None else match_calls(pair, low, reference_low)[0]
    if met:
        narrow = met[0]
        rounded = _flat([call.outputs[0] for call in narrow.candidate], padding)
        reference = _flat(
            [narrow.answers(place)[0] for place in range(len(pair.candidate))], padding
        )
        off = rounding(rounded, exact)
        difference = dataclasses.replace(
            difference,
            candidate_rounding=off,
            reference_rounding=rounding(reference, exact),
            ulps=ulps(rounded, exact, dtype),
        )
        entered = matched_call.inputs(0)
        if entered and entered[0] is not None:
            came = _flat([narrow.candidate[0].inputs[0]], padding)
            before = rounding(came, _flat([entered[0]], padding))
            found["condition"] = off / max(before, ROUNDOFF[dtype])
    return {**found, "in_context": difference}


def _flat(arrays: list[Any], padding: Padding) -> np.ndarray:
    flat = [of_tokens(np.asarray(a, np.float64), padding).reshape(-1) for a in arrays]
    return flat[0] if len(flat) == 1 else np.concatenate(flat)


def _histogram(candidate: np.ndarray, reference: np.ndarray) -> Histogram | None:
    every = max(1, candidate.size // COUNTED)
    both = [a[np.isfinite(a)] for a in (candidate[::every], reference[::every])]
    if not all(a.size for a in both):
        return None
    low, high = min(float(a.min()) for a in both), max(float(a.max()) for a in both)
    edges = np.linspace(low, high if high > low else low + 1.0, BINS + 1)
    counts = [tuple(np.histogram(a, edges)[0].tolist()) for a in both]
    return Histogram(tuple(edges.tolist()), *counts)


def _maps(matched_call: MatchedCall) -> AttentionMaps | None:
    candidate, reference = matched_call.candidate[0].weights, matched_call.reference[0].weights
    if candidate is None or reference is None or candidate.shape != reference.shape:
        return None
    return AttentionMaps(*(_nested(seen.beginning) for seen in (candidate, reference)))


def _nested(array: np.ndarray) -> Any:
    return tuple(tuple(tuple(row) for row in head) for head in array.astype(np.float32).tolist())
