"""Measures a pair of modules inside the whole models: error, rounding, attention maps."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.matching.calls import MatchedCall, Unmatched, match_calls
from jaxformer.parity.report.model import AttentionMaps, Histogram
from jaxformer.parity.tolerance import ROUNDOFF, judge, rounding, ulps
from jaxformer.parity.trace import jax_trace, torch_trace
from jaxformer.parity.trace.attention import RecordedWeights
from jaxformer.parity.trace.padding import Padding, drop_unused_tokens

BINS = 40
# The largest number of values that a histogram counts; of larger outputs it counts every n-th one.
COUNTED = 1 << 18


def measure_in_context(
    matched_call: MatchedCall,
    low: Mapping[str, jax_trace.JaxCall],
    reference_low: torch_trace.Trace | None,
    dtype: str,
    padding: Padding,
) -> dict[str, Any]:
    """Returns the fields of a node that describe its output as it came out of the whole models.

    Args:
        matched_call: the first one of the pair, in float64.
        low: the candidate's calls in the dtype under test; empty if it was not run.
        reference_low: the reference's pass in the dtype under test.
        dtype: the dtype under test.
        padding: tokens that are left out.
    """
    pair = matched_call.pair
    places = range(len(pair.candidate))
    exact = _flatten([matched_call.outputs(place)[0] for place in places], padding)
    candidate = _flatten([call.outputs[0] for call in matched_call.candidate], padding)
    difference = judge(candidate, exact)
    fields: dict[str, Any] = {
        "histogram": _make_histogram(candidate, exact),
        "maps": _make_maps(matched_call),
    }
    matched = [] if reference_low is None else match_calls(pair, low, reference_low)
    if matched and not isinstance(matched, Unmatched):
        low_call = matched[0]
        rounded = _flatten([call.outputs[0] for call in low_call.candidate], padding)
        reference = _flatten([low_call.outputs(place)[0] for place in places], padding)
        error = rounding(rounded, exact)
        difference = dataclasses.replace(
            difference,
            candidate_rounding=error,
            reference_rounding=rounding(reference, exact),
            ulps=ulps(rounded, exact, dtype),
        )
        inputs = matched_call.inputs(0)
        if inputs and inputs[0] is not None:
            low_input = _flatten([low_call.candidate[0].inputs[0]], padding)
            input_error = rounding(low_input, _flatten([inputs[0]], padding))
            fields["condition"] = error / max(input_error, ROUNDOFF[dtype])
    return {**fields, "in_context": difference}


def _flatten(arrays: Sequence[Any], padding: Padding) -> np.ndarray:
    """Returns the values of all arrays in one float64 vector, without padding."""
    flat = [drop_unused_tokens(np.asarray(a, np.float64), padding).reshape(-1) for a in arrays]
    return flat[0] if len(flat) == 1 else np.concatenate(flat)


def _make_histogram(candidate: np.ndarray, reference: np.ndarray) -> Histogram | None:
    step = max(1, candidate.size // COUNTED)
    both = [a[np.isfinite(a)] for a in (candidate[::step], reference[::step])]
    if not all(a.size for a in both):
        return None
    low, high = min(float(a.min()) for a in both), max(float(a.max()) for a in both)
    edges = np.linspace(low, high if high > low else low + 1.0, BINS + 1)
    counts = [tuple(np.histogram(a, edges)[0].tolist()) for a in both]
    return Histogram(tuple(edges.tolist()), *counts)


def _make_maps(matched_call: MatchedCall) -> AttentionMaps | None:
    candidate, reference = matched_call.candidate[0].weights, matched_call.reference[0].weights
    if candidate is None or reference is None or candidate.shape != reference.shape:
        return None
    return AttentionMaps(_to_tuples(candidate), _to_tuples(reference))


def _to_tuples(weights: RecordedWeights) -> Any:
    heads = weights.beginning.astype(np.float32).tolist()
    return tuple(tuple(tuple(row) for row in head) for head in heads)
