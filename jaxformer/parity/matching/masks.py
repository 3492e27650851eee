"""Which masks their attentions saw, so that ours are run under the same ones.

Masks are written in many ways, but all of them end in scores that are far below any other. So what
a mask of theirs allows is read off their scores, and a mask of ours that is wrong is found where it
is made, not in every attention that it reaches.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import Block
from jaxformer.masks import expand_mask
from jaxformer.parity.matching.calls import MatchedCall
from jaxformer.parity.report.model import Difference
from jaxformer.parity.trace import jax_trace as jax_trace
from jaxformer.parity.trace.recorded_weights import RecordedWeights

# 1 where a query may attend to a key, -1 where it may not, 0 where the score does not tell.
State = np.ndarray
# Of each pair and each of its calls, what stands in the parameter of that name.
Masks = dict[tuple[str, ...], list[dict[str, State]]]

# What a block hands to its attentions.
HANDED_ON = {"mask": "attention", "memory_mask": "cross_attention"}


def reference_masks(
    module: Any,
    matched_calls: Mapping[tuple[str, ...], Sequence[MatchedCall]],
    calls: Mapping[str, jax_trace.Call],
) -> Masks:
    """The masks that entered their attentions, and the blocks around these."""
    masks: Masks = {}
    blocks = []
    for key, met in matched_calls.items():
        owner = jax_trace.resolve(module, key[0])[0] if met and len(key) == 1 else None
        if isinstance(owner, MultiHeadAttention):
            masks[key] = [_of_attention(owner, matched_call) for matched_call in met]
        if isinstance(owner, Block):
            blocks.append((key, owner))
    for key, owner in blocks:
        masks[key] = [
            _of_block(key[0], owner, matched_call, number, masks, calls)
            for number, matched_call in enumerate(matched_calls[key])
        ]
    return masks


def _of_attention(owner: MultiHeadAttention, matched_call: MatchedCall) -> dict[str, State]:
    call = matched_call.candidate[0]
    if "mask" not in jax_trace.bound(owner, call.args, call.kwargs):
        return {}
    return _first_state(matched_call, call.weights)


def _of_block(
    path: str,
    owner: Block,
    matched_call: MatchedCall,
    number: int,
    masks: Masks,
    calls: Mapping[str, jax_trace.Call],
) -> dict[str, State]:
    """A block that hands a mask on as it is was given the one that its attention saw."""
    given = jax_trace.bound(owner, matched_call.candidate[0].args, matched_call.candidate[0].kwargs)
    found: dict[str, State] = {}
    for parameter, part in HANDED_ON.items():
        inner = f"{path}.{part}".lstrip(".")
        attention = getattr(owner, part)
        if parameter not in given or inner not in calls or len(calls[inner].all) <= number:
            continue
        call = calls[inner].all[number]
        received = jax_trace.bound(attention, call.args, call.kwargs)
        if "mask" not in received or received["mask"] is not given[parameter]:
            continue
        # An attention that has no counterpart of its own is a part of their block.
        known = masks.get((inner,)) or [_first_state(matched_call, call.weights)] * (number + 1)
        if number < len(known) and "mask" in known[number]:
            found[parameter] = known[number]["mask"]
    return found


def _first_state(matched_call: MatchedCall, weights: RecordedWeights | None) -> dict[str, State]:
    seen = matched_call.reference[0].allowed
    alike = weights is not None and len(seen) == 1 and seen[0].shape == weights.shape
    return {"mask": seen[0]} if alike else {}


def wrong_entries(mask: Any, state: State) -> np.ndarray:
    """Where a mask of ours is not what their scores show."""
    candidate = _full(mask, state)
    wrong = ((state > 0) & ~candidate) | ((state < 0) & candidate)
    # Where nothing at all is allowed, each code base has its own way.
    return wrong & (state > 0).any(axis=-1, keepdims=True)


def mask_difference(mask: Any, state: State) -> Difference:
    """The share of a mask's entries that is wrong; none is allowed to be."""
    return Difference(float(np.mean(wrong_entries(mask, state))), 1.0, 0.0)


def with_masks(owner: Any, call: jax_trace.Call, states: Mapping[str, State]) -> jax_trace.Call:
    """The call with masks that allow what theirs did; a mask that does so already is kept."""
    given = jax_trace.bound(owner, call.args, call.kwargs)
    other = {
        name: jnp.asarray(_full(given[name], state) ^ wrong)
        for name, state in states.items()
        if (wrong := wrong_entries(given[name], state)).any()
    }
    return jax_trace.rebound(owner, call, other) if other else call


def _full(mask: Any, state: State) -> np.ndarray:
    if mask is None:
        return np.ones(state.shape, bool)
    return np.broadcast_to(np.asarray(expand_mask(jnp.asarray(mask))), state.shape)
