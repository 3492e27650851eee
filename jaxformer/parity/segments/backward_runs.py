"""Records the backward passes of both sides, on the same tapes as the forward ones.

Both sides are given the same cotangents, random numbers, for each result that was compared.
"""

from collections.abc import Callable

import numpy as np

from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.jax_run import JaxRun
from jaxformer.parity.recording.operators.tape import Tape
from jaxformer.parity.recording.operators.torch_run import TorchRun
from jaxformer.parity.segments.effects import seen_positions
from jaxformer.parity.segments.results import Results
from jaxformer.parity.segments.walk import Walk
from jaxformer.parity.words import listed

SEED = 20


def run_backward(
    reference: TorchRun,
    candidate: JaxRun,
    walk: Walk,
    results: Results,
    unused: Callable[[np.ndarray], np.ndarray] = lambda cotangent: cotangent,
) -> tuple[dict[int, Value], dict[int, Value]] | str:
    """Records both backward passes.

    Args:
        reference: after its forward pass.
        candidate: after its forward pass.
        walk: after the forward pass, with its corrections kept.
        results: those that were compared.
        unused: returns a cotangent with zeros where nobody uses a result.

    Returns:
        the gradients of the reference's and of the candidate's parameters and inputs, by the index
        of their values; or why there are none.
    """
    reason = candidate.no_gradients or reference.no_gradients
    if not reason and not results.compared:
        reason = "no result was compared"
    if any(np.isnan(result.reference.data).any() for result in results.compared.values()):
        reason = reason or f"the results of the reference have NaN{_nan_inputs(walk.reference)}"
    counts = list(filter(None, map(walk.other_count, walk.divergences)))
    if counts:
        reason = str(counts[0][0])
    if reason:
        return reason
    before = len(walk.reference.values)
    cotangents = _cotangents(walk, results, unused)
    right = reference.backward({index: array for index, (array, _, _) in cotangents.items()})
    if reference.no_gradients:
        return reference.no_gradients
    walk.index.add(walk.reference.values[before:])
    own = candidate.backward({place: array for _, place, array in cotangents.values()})
    return right, own


def _nan_inputs(reference: Tape) -> str:
    """Returns which inputs have NaN, to be added to a sentence; "" if none have."""
    names = [v.name for v in reference.inputs if v.dtype.kind in "fc" and np.isnan(v.data).any()]
    return f", and so have its inputs: {listed(names)}" if names else ""


def _cotangents(
    walk: Walk, results: Results, unused: Callable[[np.ndarray], np.ndarray]
) -> dict[int, tuple[np.ndarray, int, np.ndarray]]:
    """Returns by result of the reference its cotangent, the candidate's place and cotangent."""
    random = np.random.default_rng(SEED)
    outputs = walk.reference.outputs
    seen = dict(zip((v.index for v in outputs), seen_positions(walk.reference), strict=True))
    found: dict[int, tuple[np.ndarray, int, np.ndarray]] = {}
    for place, result in results.compared.items():
        if result.reference.index in found:
            continue
        cotangent = random.normal(size=result.reference.shape)
        positions = seen[result.reference.index]
        if positions is not None:
            # What is computed at padding is not judged.
            cotangent[~positions] = 0
        cotangent = unused(cotangent)
        own = result.layout.apply(cotangent)
        if result.part is not None:
            whole = np.zeros(result.candidate.shape)
            whole[result.part] = own
            own = whole
        found[result.reference.index] = cotangent, place, own
    return found
