"""Positions that theirs counts by its mask, where ours takes them as an argument."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxformer.parity.matching.modules import Pair
from jaxformer.parity.trace import jax_trace as jax_trace
from jaxformer.parity.trace import torch_trace as torch_trace
from jaxformer.positions import LearnedPositions
from jaxformer.transformer_lm import TransformerLM


def position_ids_from_mask(
    module: Any, pairs: Sequence[Pair], reference: torch_trace.Trace
) -> dict[str, np.ndarray]:
    """The argument ``positions`` (B, T) of ours, where padding moved theirs; else no argument.

    OPT counts only the tokens that its mask lets through, so that padding on the left does not
    move a text; ours is called with such positions, as generation does. Padding itself has none:
    it gets 0.

    Args:
        module: ours.
        pairs: of modules.
        reference: a pass with padding.
    """
    if not isinstance(module, TransformerLM):
        return {}
    for pair in pairs:
        if isinstance(jax_trace.resolve(module, pair.candidate[0])[0], LearnedPositions):
            call = reference.calls.get(pair.reference[0])
            taken = None if call is None else call.positions
            unused = None if taken is None else reference.padding.get(taken.shape)
            if taken is not None and unused is not None:
                places = np.arange(taken.shape[1])
                moved = np.where(unused, places, taken) != places
                return {"positions": np.where(unused, 0, taken)} if moved.any() else {}
    return {}
