"""Measures a pair of modules inside the whole models: error, rounding, attention maps."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxformer.parity.findings import AttentionMaps, Histogram
from jaxformer.parity.matching.calls.calls import MatchedCall
from jaxformer.parity.recording.calls import jax_trace, torch_trace
from jaxformer.parity.recording.calls.attention import RecordedWeights
from jaxformer.parity.recording.calls.padding import Padding, drop_unused_tokens
from jaxformer.parity.tolerance import ROUNDOFF, judge, rounding, ulps

BINS = 40
# The largest number of values that a histogram counts; of larger outputs it counts every n-th one.
COUNTED = 1 << 16


def measure_in_context(matched_call: MatchedCall, padding: Padding) -> dict[str, Any]:
    """Returns the fields of a node that describe its output as it came out of the whole models.

    Args:
        matched_call: the first one of the pair, in float64.
        padding: tokens that are left out.
    """
    exact = _exact(matched_call, padding)
    candidate = _flatten([call.outputs[0] for call in matched_call.candidate], padding)
    return {
        "histogram": _make_histogram(candidate, exact),
        "maps": _make_maps(matched_call),
        "in_context": judge(candidate, exact),
    }


def measure_candidate_rounding(
    matched_call: MatchedCall, low: Sequence[jax_trace.JaxCall], dtype: str, padding: Padding
) -> dict[str, float]:
    """Returns how far the candidate's output is from the exact one in the dtype under test.

    Args:
        matched_call: the first one of the pair, in float64.
        low: the candidate's call of each module, in the dtype under test.
        dtype: the dtype under test.
        padding: tokens that are left out.
    """
    exact = _exact(matched_call, padding)
    rounded = _flatten([call.outputs[0] for call in low], padding)
    found = {"rounding": rounding(rounded, exact), "ulps": ulps(rounded, exact, dtype)}
    inputs = matched_call.inputs(0)
    if inputs and inputs[0] is not None:
        given = _flatten([low[0].inputs[0]], padding)
        error = rounding(given, _flatten([inputs[0]], padding))
        found["condition"] = found["rounding"] / max(error, ROUNDOFF[dtype])
    return found


def measure_reference_rounding(
    matched_call: MatchedCall, low: Sequence[torch_trace.TorchCall], padding: Padding
) -> float:
    """Returns how far the reference's output is from the exact one in the dtype under test."""
    rounded = dataclasses.replace(matched_call, reference=tuple(low))
    return rounding(_exact(rounded, padding), _exact(matched_call, padding))


def _exact(matched_call: MatchedCall, padding: Padding) -> np.ndarray:
    places = range(len(matched_call.pair.candidate))
    return _flatten([matched_call.outputs(place)[0] for place in places], padding)


def _flatten(arrays: Sequence[Any], padding: Padding) -> np.ndarray:
    """Returns the values of all arrays in one vector, without padding."""
    flat = [drop_unused_tokens(np.asarray(a), padding).reshape(-1) for a in arrays]
    return flat[0] if len(flat) == 1 else np.concatenate(flat)


def _make_histogram(candidate: np.ndarray, reference: np.ndarray) -> Histogram | None:
    step = max(1, candidate.size // COUNTED)
    both = [a[np.isfinite(a)] for a in (candidate[::step], reference[::step])]
    if not all(a.size for a in both):
        return None
    low, high = min(float(a.min()) for a in both), max(float(a.max()) for a in both)
    edges = np.linspace(low, high if high > low else low + 1.0, BINS + 1)
    # Equal bins are counted at once; of given edges numpy sorts the values first, which takes long
    # and is left for values of so narrow a range that two edges are one number.
    is_wide = bool(np.all(np.diff(edges) > 0))
    bins, bounds = (BINS, (edges[0], edges[-1])) if is_wide else (edges, None)
    counts = [tuple(np.histogram(a, bins, bounds)[0].tolist()) for a in both]
    return Histogram(tuple(edges.tolist()), *counts)


def _make_maps(matched_call: MatchedCall) -> AttentionMaps | None:
    candidate, reference = matched_call.candidate[0].weights, matched_call.reference[0].weights
    if candidate is None or reference is None or candidate.shape != reference.shape:
        return None
    return AttentionMaps(_to_tuples(candidate), _to_tuples(reference))


def _to_tuples(weights: RecordedWeights) -> Any:
    heads = weights.beginning.astype(np.float32).tolist()
    return tuple(tuple(tuple(row) for row in head) for head in heads)
