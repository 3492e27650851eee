"""Positions that theirs counts by its mask, where ours takes them as an argument."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxformer.parity.matching.modules import Pair
from jaxformer.parity.trace import jax_trace as jax_side
from jaxformer.parity.trace import torch_trace as torch_side
from jaxformer.positions import LearnedPositions
from jaxformer.transformer_lm import TransformerLM


def counted_positions(
    module: Any, pairs: Sequence[Pair], theirs: torch_side.Trace
) -> dict[str, np.ndarray]:
    """The argument ``positions`` (B, T) of ours, where padding moved theirs; else no argument.

    OPT counts only the tokens that its mask lets through, so that padding on the left does not
    move a text; ours is called with such positions, as generation does. Padding itself has none:
    it gets 0.

    Args:
        module: ours.
        pairs: of modules.
        theirs: a pass with padding.
    """
    if not isinstance(module, TransformerLM):
        return {}
    for pair in pairs:
        if isinstance(jax_side.resolve(module, pair.ours[0])[0], LearnedPositions):
            call = theirs.calls.get(pair.theirs[0])
            taken = None if call is None else call.positions
            unused = None if taken is None else theirs.padding.get(taken.shape)
            if taken is not None and unused is not None:
                places = np.arange(taken.shape[1])
                moved = np.where(unused, places, taken) != places
                return {"positions": np.where(unused, 0, taken)} if moved.any() else {}
    return {}
