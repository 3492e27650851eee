"""Attention masks of the reference, so that candidate modules run under the same ones.

Masks are written in many ways, but each of them makes scores far below any other. So what a mask of
the reference allows is read off its scores. A wrong mask of the candidate is then found in the
module that makes it, not in every attention that it reaches.
"""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import Block
from jaxformer.masks import expand_mask
from jaxformer.parity.findings import Difference
from jaxformer.parity.matching.calls.calls import MatchedCall
from jaxformer.parity.matching.pairs import PairKey
from jaxformer.parity.recording import jax_modules
from jaxformer.parity.recording.calls import jax_trace
from jaxformer.parity.recording.calls.attention import RecordedWeights
from jaxformer.parity.recording.calls.torch_recorder import BLOCKED
from jaxformer.parity.recording.torch_values import require_torch

# (B, N, T, S): 1 where a query may attend to a key, -1 where it may not, 0 where the score does not
# tell.
MaskState = np.ndarray
# Of each pair, call by call: the reference's mask by the name of the candidate's parameter.
Masks = dict[PairKey, list[dict[str, MaskState]]]

# What a mask adds to scores that a query may not see.
HIDDEN = -1e9
# A block's mask parameters and the attention that it passes each one to.
PASSED_ON = {"mask": "attention", "memory_mask": "cross_attention"}


def reference_masks(
    module: Any,
    matched_calls: Mapping[PairKey, Sequence[MatchedCall]],
    calls: Mapping[str, jax_trace.JaxCall],
) -> Masks:
    """Returns the reference's masks for attentions and for the blocks around them.

    Args:
        module: the candidate.
        matched_calls: of each pair.
        calls: the first call of each candidate module.
    """
    masks: Masks = {}
    blocks = []
    for key, matched in matched_calls.items():
        owner = jax_modules.resolve(module, key[0])[0] if matched and len(key) == 1 else None
        if isinstance(owner, MultiHeadAttention):
            masks[key] = [_find_attention_mask(owner, matched_call) for matched_call in matched]
        if isinstance(owner, Block):
            blocks.append((key, owner))
    for key, owner in blocks:
        masks[key] = [
            _find_block_masks(key[0], owner, matched_call, number, masks, calls)
            for number, matched_call in enumerate(matched_calls[key])
        ]
    return masks


def _find_attention_mask(
    owner: MultiHeadAttention, matched_call: MatchedCall
) -> dict[str, MaskState]:
    call = matched_call.candidate[0]
    if "mask" not in jax_trace.bind_arguments(owner, call.args, call.kwargs):
        return {}
    return _read_state(matched_call, call.weights)


def _find_block_masks(
    path: str,
    owner: Block,
    matched_call: MatchedCall,
    number: int,
    masks: Masks,
    calls: Mapping[str, jax_trace.JaxCall],
) -> dict[str, MaskState]:
    """Returns the masks of a block's attentions that the block passed on unchanged."""
    block_call = matched_call.candidate[0]
    given = jax_trace.bind_arguments(owner, block_call.args, block_call.kwargs)
    found: dict[str, MaskState] = {}
    for parameter, name in PASSED_ON.items():
        inner = f"{path}.{name}".lstrip(".")
        if parameter not in given or inner not in calls or len(calls[inner].all) <= number:
            continue
        call = calls[inner].all[number]
        received = jax_trace.bind_arguments(getattr(owner, name), call.args, call.kwargs)
        if "mask" not in received or received["mask"] is not given[parameter]:
            continue
        # An attention that is in no pair is code of the reference's block.
        known = masks.get((inner,)) or [_read_state(matched_call, call.weights)] * (number + 1)
        if number < len(known) and "mask" in known[number]:
            found[parameter] = known[number]["mask"]
    return found


def _read_state(matched_call: MatchedCall, weights: RecordedWeights | None) -> dict[str, MaskState]:
    """Returns the mask if the reference's call computed one attention, of the same shape."""
    allowed = matched_call.reference[0].allowed
    is_same = weights is not None and len(allowed) == 1 and allowed[0].shape == weights.shape
    return {"mask": allowed[0]} if is_same else {}


def wrong_entries(mask: Any, state: MaskState) -> np.ndarray:
    """Returns where a candidate's mask contradicts the reference's scores."""
    candidate = _expand(mask, state)
    wrong = ((state > 0) & ~candidate) | ((state < 0) & candidate)
    # A query that may attend to nothing is treated differently in each code base.
    return wrong & (state > 0).any(axis=-1, keepdims=True)


def mask_difference(mask: Any, state: MaskState) -> Difference:
    """Returns the share of a mask's entries that is wrong; none is allowed to be."""
    return Difference(float(np.mean(wrong_entries(mask, state))), 1.0, 0.0)


def with_masks(
    owner: Any, call: jax_trace.JaxCall, states: Mapping[str, MaskState]
) -> jax_trace.JaxCall:
    """Returns the call with every wrong mask replaced by one that allows what the reference did."""
    given = jax_trace.bind_arguments(owner, call.args, call.kwargs)
    corrected = {
        name: jnp.asarray(_expand(given[name], state) ^ wrong)
        for name, state in states.items()
        if (wrong := wrong_entries(given[name], state)).any()
    }
    return jax_trace.replace_arguments(owner, call, corrected) if corrected else call


def right_mask(mask: Any, state: MaskState) -> np.ndarray:
    """Returns a candidate's mask with every wrong entry put right."""
    return _expand(mask, state) ^ wrong_entries(mask, state)


def scores_of_mask(mask: Any, shape: Sequence[int]) -> Any:
    """Returns what a candidate's mask adds to scores of a shape: 0 or ``HIDDEN``."""
    if mask is None:
        return jnp.zeros(shape, jnp.float64)
    allowed = jnp.broadcast_to(expand_mask(jnp.asarray(mask)), shape)
    return jnp.where(allowed, 0.0, HIDDEN)


def scores_of_torch_mask(tensors: Sequence[Any], allowed: np.ndarray) -> Any:
    """Returns what the reference's mask adds to scores: 0 or ``HIDDEN``.

    Args:
        tensors: that entered the reference's module; the mask may be one of them.
        allowed: the mask, which is taken where none of them is.
    """
    torch = require_torch()
    wanted = torch.from_numpy(np.where(allowed, 0.0, HIDDEN))
    for tensor in tensors:
        if tensor.ndim < 2 or tensor.shape[-1] != allowed.shape[-1]:
            continue
        with contextlib.suppress(RuntimeError):
            made = torch.where(tensor > BLOCKED, 0.0, HIDDEN).expand(allowed.shape)
            if torch.equal(made.double(), wanted):
                return made.double()
    return wanted


def _expand(mask: Any, state: MaskState) -> np.ndarray:
    if mask is None:
        return np.ones(state.shape, bool)
    return np.broadcast_to(np.asarray(expand_mask(jnp.asarray(mask))), state.shape)
