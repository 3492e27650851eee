"""Finds parameters that the candidate lacks, or reads wrongly, though all results are equal.

A factor of one and a term of zero move no result, and norms and biases hold these before they are
trained. Parameters are found by their numbers, so that one array of zeros may stand for all of
them. Therefore zeros and ones are counted.
"""

from collections.abc import Collection, Mapping

import numpy as np

from jaxformer.parity.matching.parameters import ParameterMatches
from jaxformer.parity.matching.values import FEWEST, largest
from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.kinds import LAYOUT_ONLY, SUMS
from jaxformer.parity.segments.effects import NO_EFFECT
from jaxformer.parity.segments.gradients import Gradients
from jaxformer.parity.segments.walk import Walk
from jaxformer.parity.words import listed


def describe_lacking(walk: Walk, parameters: ParameterMatches, gradients: Gradients) -> str:
    """Returns a sentence on parameters of zeros or ones that the candidate lacks, "" for none.

    Args:
        walk: after both passes.
        parameters: which of them are equal.
        gradients: they tell which parameters are lacking.
    """
    tape = walk.reference
    wrong = {one.reference for one in parameters.wrong}
    needed = tape.ancestors(tape.outputs)
    read = {
        name: value
        for name, value in tape.parameters.items()
        if value.index in needed and value.dtype.kind == "f" and name not in wrong
    }
    plain = {name: value for name, value in read.items() if _is_plain(walk, value)}
    if not plain:
        return ""
    # What both sides hold whole and is no such parameter has as many zeros here as there.
    held = set().union(*parameters.whole.values())
    wanted = sum(
        value.size if name in plain else _count(value)
        for name, value in read.items()
        if name in plain or name not in held
    )
    lack = wanted - _count_own(walk, parameters, plain)
    names = _names(walk, plain, gradients.right, lack) if lack > 0 else []
    if not names:
        return ""
    return (
        f"the candidate lacks {lack} of the numbers of {listed(names)} of the reference, which are "
        "zeros or ones: no result shows them"
    )


def _is_zero(walk: Walk, value: Value) -> bool:
    return value.dtype.kind == "f" and walk.index.largest(value) == 0


def _is_plain(walk: Walk, value: Value) -> bool:
    """Returns whether a parameter of the reference holds nothing but zeros, or nothing but ones."""
    moments = walk.index.moments_of(value)
    return bool(moments[0] == moments[5] == 0 and moments[2] in (0, 1))


def _count(value: Value) -> int:
    """Returns how many numbers of a value are zero or one."""
    array = value.data
    return int(np.count_nonzero(array == 0) + np.count_nonzero(array == 1))


def _count_own(walk: Walk, parameters: ParameterMatches, plain: Mapping[str, Value]) -> int:
    """Returns how many zeros and ones of the candidate may be those of the reference."""
    tape = walk.candidate
    needed = tape.ancestors(tape.outputs)
    wrong = {one.candidate for one in parameters.wrong}
    count = 0
    for name, value in tape.parameters.items():
        if value.index not in needed or value.dtype.kind != "f" or name in wrong:
            continue
        if name in parameters.whole:
            count += value.size if plain.keys() & parameters.whole[name] else 0
        else:
            # Numbers that the reference has nowhere may be made of any of its own.
            count += value.size if name in parameters.unmatched else _count(value)
    sizes = {walk.reference.parameters[name].size for name in plain}
    constants = (v for v in tape.values if v.kind == "constant" and v.index in needed)
    return count + sum(_count(v) for v in constants if v.size in sizes and v.size > 1)


def _names(
    walk: Walk, plain: Collection[str], gradients: Mapping[str, Value], lack: int
) -> list[str]:
    """Returns the parameters whose gradients the candidate does not have; without them, all."""
    if not gradients:
        return list(plain)
    plain = [name for name in plain if name in gradients]
    sizes = {name: largest(gradients[name].data) for name in plain}
    # The bias of keys has no gradient: one that lacks it trains alike.
    still = [n for n in plain if sizes[n] <= NO_EFFECT * max(sizes.values())]
    moved = [name for name in plain if name not in still]
    # Few numbers are not looked up.
    lost = [
        name
        for name in moved
        if gradients[name].index not in walk.reached and gradients[name].size >= FEWEST
    ]
    if lost or lack <= sum(walk.reference.parameters[name].size for name in still):
        return lost
    return moved


def describe_hidden(walk: Walk) -> str:
    """Returns a sentence on what weights of zeros hide, "" if they hide nothing.

    Such weights end a branch that is to learn its part, as in adapters. What enters them moves no
    result, and shows in gradients alone.

    Args:
        walk: after the forward pass.
    """
    names = []
    for operator in walk.reference.operators:
        zeros = [v for v in operator.inputs if v.is_weight and _is_zero(walk, v)]
        # Sums and changes of layout hide nothing.
        if not zeros or operator.name in SUMS | LAYOUT_ONLY:
            continue
        is_nothing = all(_is_zero(walk, value) for value in operator.outputs)
        is_hidden = is_nothing or any(value.ndim > 1 for value in zeros)
        entering = [v for v in operator.inputs if v.is_activation and v.size >= FEWEST]
        if is_hidden and any(v.index not in walk.reached for v in entering):
            names.append(f"the {operator.name} of {operator.module or 'the model'}")
    if not names:
        return ""
    return (
        f"what {listed(list(dict.fromkeys(names)))} reads was not found equal, and its weights are "
        "zeros: no result shows it; gradients do"
    )
