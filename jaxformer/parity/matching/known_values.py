"""What else must be equal of known modules: masks and integers that enter, and what they choose.

Masks and integers are compared as floats that show them; what is put right are they themselves.
"""

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from jaxformer.parity.findings import INPUT_OF, Difference
from jaxformer.parity.matching.known_modules import (
    KnownModules,
    PairCall,
    Requirement,
)
from jaxformer.parity.matching.pairs import PairKey
from jaxformer.parity.matching.reference_attention import (
    BLOCKED,
    MaskState,
    ReferenceAttention,
)
from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.tape import Tape

# What a mask adds to scores that a query may not see.
HIDDEN = -1e9


def required_integers(known: KnownModules, own: Tape, reference: Tape) -> Iterator[Requirement]:
    """Yields what integers must enter modules, where both sides take just one array of them.

    Beside its position ids a module of the reference may take a mask of integers.

    Args:
        known: the modules.
        own: the candidate's tape.
        reference: the reference's.
    """
    for key, calls in known.calls.items():
        for call in () if known.is_outermost(key) else calls:
            values = [v for v in call.own[0].entered.values() if v.dtype.kind in "iu"]
            others = [v for v in call.right[0].entered if v.dtype.kind in "iu"]
            positions = call.right[0].positions
            if positions is not None and positions.dtype.kind in "iu":
                others = [positions]
            if len(values) == len(others) == 1 and values[0].shape == others[0].shape:
                owner, within = known.place_of(key, call.pair.candidate[0])
                yield Requirement(
                    owner, f"{INPUT_OF}{within}", [_shown(own, values[0], _as_floats)],
                    _shown(reference, others[0], _as_floats), values[0],
                    partial(_numbers_of, others[0]),
                )  # fmt: skip


def required_choices(known: KnownModules, own: Tape, reference: Tape) -> Iterator[Requirement]:
    """Yields which integers modules must return: the experts that a router chooses.

    Args:
        known: the modules.
        own: the candidate's tape.
        reference: the reference's.
    """
    for key, calls in known.calls.items():
        for call in calls if len(key) == 1 else ():
            made = [value for _, value in sorted(call.own[0].chosen.items())]
            wanted = call.right[0].chosen
            if [value.shape for value in made] != [value.shape for value in wanted]:
                continue
            for value, other in zip(made, wanted, strict=True):
                # The mark itself has the reference's numbers.
                chosen = value if value.producer is None else value.producer.inputs[0]
                yield Requirement(
                    key, "its choice", [_shown(own, chosen, _as_floats)],
                    _shown(reference, other, _as_floats), chosen, partial(_numbers_of, other),
                    partial(_far_from, other),
                )  # fmt: skip


def _far_from(other: Value, array: np.ndarray) -> Difference:
    """Returns how far integers are from the reference's; none is allowed to be."""
    wrong = float(np.max(np.abs(array - other.data), initial=0))
    return Difference(wrong, float(np.max(other.data, initial=1)), 0.0)


def _as_floats(array: np.ndarray) -> list[np.ndarray]:
    return [array.astype(np.float64)]


def _numbers_of(value: Value, array: Any) -> np.ndarray:
    return value.data.astype(array.dtype)


def _shown(tape: Tape, value: Value, show: Any) -> Value:
    """Returns a value of floats that shows another one."""
    module = "" if value.producer is None else value.producer.module
    return tape.record("show", [value], show(value.data), show, module=module)[0]


def required_masks(
    known: KnownModules,
    attentions: Collection[str],
    given: Mapping[str, MaskState],
    attention: ReferenceAttention,
    tapes: tuple[Tape, Tape],
) -> tuple[list[Requirement], dict[str, MaskState]]:
    """Returns what masks must allow, where they enter the first module that passes them on.

    Args:
        known: the modules.
        attentions: paths of the candidate's attentions.
        given: what masks must allow that enter other modules, by path.
        attention: of the reference.
        tapes: the candidate's and the reference's.

    Returns:
        The requirements; and what masks must allow that enter from outside of all pairs, by path.
    """
    masks = {
        mask.index: (key, call)
        for key, calls in known.calls.items()
        for call in calls
        for mask in call.own[0].entered.values()
        if mask.dtype.kind == "b"
    }
    found, outside = [], {}
    seen = set()
    for key, calls in known.calls.items():
        for call in calls:
            entered = [v for v in call.own[0].entered.values() if v.dtype.kind == "b"]
            state = given.get(key[0])
            if key[0] in attentions:
                state = _state_of(call, attention)
            if state is None or not entered:
                continue
            mask = _outermost(entered[0], masks)
            outer, outer_call = masks[mask.index]
            if mask.index in seen:
                continue
            seen.add(mask.index)
            is_outside = known.is_outermost(outer)
            if is_outside:
                outside[outer[0]] = state
            owner, within = known.place_of(outer, outer[0])
            found.append(
                Requirement(
                    owner, f"the mask of {within}",
                    [_shown(tapes[0], mask, partial(_scores, state))],
                    _reference_scores(tapes[1], outer_call, state), mask,
                    partial(_right_mask, state), partial(_share_of_wrong, state),
                    is_known=not is_outside,
                )
            )  # fmt: skip
    return found, outside


def _outermost(mask: Value, masks: Mapping[int, tuple[PairKey, PairCall]]) -> Value:
    """Returns a mask as it entered the outermost module that passes it on unchanged."""
    while mask.producer is not None and mask.producer.name == "mark":
        before = mask.producer.inputs[0]
        if before.index not in masks or masks[before.index][0] == ("",):
            break
        mask = before
    return mask


def _state_of(call: PairCall, attention: ReferenceAttention) -> MaskState | None:
    """Returns the mask if the reference's call computed one attention, of the same shape."""
    weights = call.own[0].weights.get(0)
    inside = attention.within(call.right[0].begin, call.right[0].end)
    if weights is None or len(inside) != 1 or inside[0].weights.shape != weights.shape:
        return None
    return attention.state(inside[0])


def _expand(mask: np.ndarray, state: MaskState) -> np.ndarray:
    if mask.ndim == 2:
        mask = mask[None]
    if mask.ndim == 3:
        mask = mask[:, None]
    return np.broadcast_to(mask, state.shape)


def _wrong_entries(mask: np.ndarray, state: MaskState) -> np.ndarray:
    """Returns where a candidate's mask contradicts the reference's scores."""
    allowed = _expand(mask, state)
    wrong = ((state > 0) & ~allowed) | ((state < 0) & allowed)
    # A query that may attend to nothing is treated differently in each code base.
    return wrong & (state > 0).any(axis=-1, keepdims=True)


def _right_mask(state: MaskState, mask: np.ndarray) -> np.ndarray:
    """Returns a mask with its wrong entries put right, in its own shape: one for all heads."""
    right = _expand(mask, state) ^ _wrong_entries(mask, state)
    for axis, size in enumerate((1,) * (4 - mask.ndim) + mask.shape):
        if size == 1:
            right = right.all(axis, keepdims=True)
    return right.reshape(mask.shape)


def _share_of_wrong(state: MaskState, mask: np.ndarray) -> Difference:
    """Returns the share of a mask's entries that is wrong; none is allowed to be."""
    return Difference(float(np.mean(_wrong_entries(mask, state))), 1.0, 0.0)


def _scores(state: MaskState, mask: np.ndarray) -> list[np.ndarray]:
    """Returns what a mask adds to scores: 0 or ``HIDDEN``; what is right where it may be either."""
    wrong = _wrong_entries(mask, state)
    return [np.where((state >= 0) ^ wrong, 0.0, HIDDEN)]


def _reference_scores(tape: Tape, call: PairCall, state: MaskState) -> Value:
    """Returns what the reference's mask adds to scores, made of the mask if that entered."""
    right = np.where(state >= 0, 0.0, HIDDEN)

    def show(array: np.ndarray) -> list[np.ndarray]:
        return [np.broadcast_to(np.where(array > BLOCKED, 0.0, HIDDEN), state.shape)]

    for value in call.right[0].entered:
        if value.ndim >= 2 and value.shape[-1] == state.shape[-1]:
            try:
                made = show(value.data)
            except ValueError:
                continue
            if np.array_equal(made[0], right):
                return tape.record("show", [value], made, show)[0]
    return tape.add(right, "constant")
