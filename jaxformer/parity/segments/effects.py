"""How much of a wrong segment reaches the results.

The candidate's wrong value is put into the reference's run, so that no other bug is counted. What
is computed at padding reaches no result that anybody reads: an input named as a mask says where.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.matching.layouts import distance
from jaxformer.parity.matching.values import largest
from jaxformer.parity.recording.operators.graph import Operator, Value
from jaxformer.parity.recording.operators.running_again import run_again
from jaxformer.parity.recording.operators.tape import Tape
from jaxformer.parity.segments.constants import rounded_ends
from jaxformer.parity.segments.divergences import Divergence
from jaxformer.parity.tolerance import allowed_error

# A smaller change of the results, as a share of their scale, is rounding.
NO_EFFECT = allowed_error(1.0)
# Constants in float32 move the results by less than this.
SMALL_EFFECT = 1e-4
# In torch.nn, what a mask of scores (T, S) is called, and how one of tokens ends: True is padding.
SCORE_MASKS, KEY_PADDING = ("attn_mask", "src_mask", "tgt_mask"), "key_padding_mask"


def effect_of(divergence: Divergence, reference: Tape) -> float | None:
    """Returns how far a wrong value moves the results, of their scale; None if it is not known.

    Args:
        divergence: whose end is put into the reference's run.
        reference: its tape.

    Returns:
        zero where it moves them no further than constants in float32 do.
    """
    value = divergence.reference_value
    later = depending(reference.operators, value)
    # What wrote to memory that others read cannot be run again.
    if any(operator.name == "written" for operator in later):
        return None

    def moved_by(array: np.ndarray) -> float:
        wrong = divergence.layout.invert(array, value.shape)
        with np.errstate(all="ignore"):
            arrays = run_again(later, {value.index: wrong})
        return _largest_move(reference, arrays)

    found = moved_by(divergence.array)
    if NO_EFFECT < found < SMALL_EFFECT:
        right = divergence.layout.apply(value.data)
        before, after = rounded_ends(divergence.operators, divergence.value, divergence.arrays)
        moves = [np.nan_to_num(array - before, posinf=0.0, neginf=0.0) for array in after]
        if found <= 2 * max((moved_by(right + move) for move in moves), default=0.0):
            return 0.0
    # Infinite where the reference cannot be run with the wrong value.
    return found if math.isfinite(found) else None


def _largest_move(reference: Tape, arrays: Mapping[int, Any]) -> float:
    """Returns how far results are from the reference's, of their scale, where they are read."""
    far = 0.0
    for output, seen in zip(reference.outputs, seen_positions(reference), strict=True):
        after, before = arrays.get(output.index, output.data), output.data
        if seen is not None:
            after, before = after[seen], before[seen]
        far = max(far, distance(after, before) / (largest(before) or 1.0))
    return far


def depending(operators: Sequence[Operator], value: Value) -> list[Operator]:
    """Returns the operators that depend on a value."""
    known = {value.index}
    found = []
    for operator in operators:
        if any(read.index in known for read in operator.inputs):
            found.append(operator)
            known |= {made.index for made in operator.outputs}
    return found


def seen_positions(tape: Tape) -> list[np.ndarray | None]:
    """Returns of each result which positions are no padding; None for all.

    A mask is an integer or boolean input of two axes, named as one. A result is read in the same
    places if it has the same first two axes; results that make up the length, one after another,
    are the steps of a text that is generated.
    """
    names = [(tape.argument_names.get(v.name, v.name), v.data) for v in tape.inputs]
    masks = [(name, array) for name, array in names if _is_mask(name, array)]
    if any(name.startswith("decoder") for name, _ in names):
        masks = [one for one in masks if one[0].startswith("decoder")]
    found: list[np.ndarray | None] = [None] * len(tape.outputs)
    if len(masks) != 1:
        return found
    ((name, array),) = masks
    mask = array == 0 if name.endswith(KEY_PADDING) else array != 0
    rows, length = mask.shape
    shapes = [v.shape for v in tape.outputs]
    lengths = [s[1] if len(s) > 1 and s[0] == rows else -1 for s in shapes]
    if -1 not in lengths and len(lengths) > 1 and sum(lengths) == length:
        ends = np.cumsum(lengths)
        return [mask[:, end - n : end] for end, n in zip(ends, lengths, strict=True)]
    return [mask if n == length else None for n in lengths]


def _is_mask(name: str, array: np.ndarray) -> bool:
    """Returns whether an input is a mask of the tokens that are read, and not one of scores."""
    if "mask" not in name or name in SCORE_MASKS or name.startswith("memory"):
        return False
    if array.ndim != 2 or array.dtype.kind not in "iub" or not np.isin(array, (0, 1)).all():
        return False
    is_causal = array.shape[0] == array.shape[1] and np.array_equal(array, np.tri(len(array)))
    return not is_causal
