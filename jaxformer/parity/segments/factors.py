"""Which two factors of a product are wrong at once: queries and keys, say."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxformer.parity.matching.anchors import Anchors
from jaxformer.parity.matching.layouts import (
    Layout,
    distance,
    find_layout,
    layouts,
    nearest_layout,
)
from jaxformer.parity.matching.values import largest, rounding_allowed
from jaxformer.parity.matching.weight_uses import KINDS
from jaxformer.parity.recording.operators.graph import Operator, Value, same_numbers
from jaxformer.parity.recording.operators.kinds import LAYOUT_ONLY
from jaxformer.parity.recording.operators.running_again import run_again
from jaxformer.parity.segments.divergences import MOST_RUN, Divergence, digest
from jaxformer.parity.segments.effects import depending
from jaxformer.parity.segments.ends import (
    Shape,
    allowed_left,
    inherited_layouts,
    layouts_of,
    without_ones,
)

# How many values are tried as a factor, and in how many orders of their axes.
MOST_FACTORS = 6
MOST_PERMUTED = 4
# The same product has a spread this near; the numbers in it may be rounded.
SAME_SPREAD = 1e-4
# Factors that are this many times as far off as their product make up for each other.
COMPENSATED = 1e3


def factors_to_put_right(anchors: Anchors, found: Divergence) -> list[tuple[Value, Value, Layout]]:
    """Returns the wrong factors of a product that ends a segment; none if they are not the cause.

    Args:
        anchors: of the run.
        found: the segment.
    """
    factors = _wrong_factors(
        anchors, found.value, found.reference_value, found.operators, found.reference_operators
    )
    wrong, far = [], []
    for value, wanted, layout in factors:
        error = distance(layout.apply(wanted.data), anchors.array(value))
        if error > rounding_allowed(wanted.data):
            wrong.append((value, wanted, layout))
            far.append(error / (largest(wanted.data) or 1.0))
    # Factors that are far off in a product that hardly is make up for each other: one side scales
    # the queries, the other one the scores.
    return [] if wrong and min(far) > COMPENSATED * found.error else wrong


def _wrong_factors(
    anchors: Anchors,
    value: Value,
    wanted: Value,
    operators: Sequence[Operator],
    reference_operators: Sequence[Operator],
) -> list[tuple[Value, Value, Layout]]:
    """Returns the factors of a product that make the value right if both are replaced.

    Queries and keys may both be wrong, and then neither alone makes the scores right.
    """
    inherited, left = inherited_layouts(anchors, operators), MOST_RUN
    for operator, factors in _products(anchors, operators):
        changed = {op.index: op for factor in factors for op in depending(operators, factor)}
        later = [changed[index] for index in sorted(changed)]
        before = [op for op in later if op.index <= operator.index]
        known = anchors.arrays_before(later)
        limit = allowed_left(anchors, later, value, wanted)
        spreads = _spreads(operator, operators, reference_operators)
        tried = set()
        for pair in _pairs(anchors, factors, reference_operators):
            among = [
                _different(
                    (v, layout) for v in others for layout in _tried(anchors, inherited, factor, v)
                )
                for factor, others in zip(factors, pair, strict=True)
            ]
            for one, other in itertools.product(*among):
                trial = {factors[0].index: one[2], factors[1].index: other[2]}
                same = digest(trial)
                if same in tried or left <= 0:
                    continue
                tried.add(same)
                product = run_again(before, known | trial)
                left -= len(before)
                if spreads and not _has_spread(product[operator.outputs[0].index], spreads):
                    continue
                again = run_again(later, product)
                left -= len(later)
                if value.index in again and find_layout(wanted.data, again[value.index], limit):
                    return [(factors[0], *one[:2]), (factors[1], *other[:2])]
    return []


def _products(
    anchors: Anchors, operators: Sequence[Operator]
) -> Iterator[tuple[Operator, list[Value]]]:
    """Yields the products of two activations, the last first, each with its factors.

    After the factors themselves come those that they were made of: one side may scale the queries,
    and the other one the scores, or keys may be written into a cache that is longer.
    """
    for operator in reversed(operators):
        factors = [v for v in operator.inputs if v.is_activation]
        if KINDS.get(operator.name) != "product" or len(factors) != 2:
            continue
        first = [_before_scale_or_cache(anchors, factor) for factor in factors]
        for some in [factors] if first == factors else [factors, first]:
            # One of them may equal another value of the reference, like values in place of keys.
            if not all(_is_plain(anchors, factor) for factor in some):
                yield operator, some


def _before_scale_or_cache(anchors: Anchors, factor: Value) -> Value:
    """Returns the first value of which a factor has the numbers, or a multiple, or a longer copy.

    It is the factor itself if no number has scaled it and nothing was written into a cache.
    """
    value, is_changed = factor, False
    while value.index not in anchors.matches:
        moved = same_numbers(value)
        source = moved or _scaled_or_written(value)
        if source is None or not source.is_activation:
            break
        value, is_changed = source, is_changed or moved is None
    return value if is_changed else factor


def _scaled_or_written(value: Value) -> Value | None:
    """Returns what one number has scaled to a value, or what was written into a longer array."""
    if value.producer is None:
        return None
    name, read = value.producer.name, value.producer.inputs
    if name == "dynamic_update_slice":
        return read[1]
    if name in ("mul", "div") and read[1].size == 1:
        return read[0]
    return read[1] if name == "mul" and read[0].size == 1 else None


def _different(
    ways: Iterable[tuple[Value, Layout]],
) -> list[tuple[Value, Layout, np.ndarray]]:
    """Returns the ways that give different arrays, with these."""
    found: dict[bytes, tuple[Value, Layout, np.ndarray]] = {}
    for value, layout in ways:
        array = layout.apply(value.data)
        found.setdefault(digest({0: array}), (value, layout, array))
    return list(found.values())


def _spreads(
    operator: Operator, operators: Sequence[Operator], reference_operators: Sequence[Operator]
) -> list[float]:
    """Returns the spreads of the reference's products that may be a product of the candidate.

    None are returned where one of them adds something, or may be the sum of several products.
    """
    size = operator.outputs[0].size
    own, products = (
        [
            other
            for other in side
            if KINDS.get(other.name) == "product" and other.outputs[0].size == size
        ]
        for side in (operators, reference_operators)
    )
    if len(own) > len(products) or any(len(other.inputs) != 2 for other in (operator, *products)):
        return []
    return [_spread(other.outputs[0].data) for other in products]


def _has_spread(array: np.ndarray, spreads: Sequence[float]) -> bool:
    own = _spread(array)
    # Infinite numbers have none.
    return any(not abs(own - other) > SAME_SPREAD * other for other in spreads)


def _spread(array: np.ndarray) -> float:
    """Returns what no layout changes, and no factor: the norm over the largest number."""
    norm = float(np.sqrt(np.einsum("i,i->", array.reshape(-1), array.reshape(-1))))
    return norm / (largest(array) or 1.0)


def _is_plain(anchors: Anchors, value: Value) -> bool:
    """Returns whether a value is an anchor with no part of an axis in another order."""
    matches = anchors.matches.get(value.index, ())
    turned = (match.layout.turns(match.value.shape) for match in matches)
    return bool(matches) and not any(turned)


def _tried(
    anchors: Anchors, inherited: Mapping[Shape, Sequence[Layout]], factor: Value, other: Value
) -> Iterator[Layout]:
    shape = other.shape
    nearest = nearest_layout(other.data, anchors.array(factor), is_plain=True)
    if nearest is not None:
        yield from layouts_of(nearest[0], other, factor, inherited)
    # A product of two wrong factors has no nearest; axes that only change places are the likeliest.
    whole = (n for n in layouts(shape, factor.shape) if n.split == without_ones(shape))
    yield from itertools.islice(whole, MOST_PERMUTED)


def _pairs(
    anchors: Anchors, factors: Sequence[Value], reference_operators: Sequence[Operator]
) -> Iterator[list[list[Value]]]:
    """Yields values of the reference that may be the two factors: those of its products first."""
    for operator in reversed(reference_operators):
        read = [v for v in operator.inputs if v.is_activation]
        if KINDS.get(operator.name) != "product" or len(read) != 2:
            continue
        for order in (read, read[::-1]):
            chains = [_chain(v) for v in order]
            yield [
                [v for v in reversed(chain) if v.size == factor.size]
                for chain, factor in zip(chains, factors, strict=True)
            ]
    made = [v for op in reference_operators for v in op.outputs if v.dtype.kind == "f"]
    yield [_nearest(anchors, factor, made) for factor in factors]


def _chain(value: Value) -> list[Value]:
    """Returns a value, and those of which it has the numbers in another layout."""
    found = [value]
    while value.producer is not None and value.producer.name in LAYOUT_ONLY:
        value = value.producer.inputs[0]
        found.append(value)
    return found


def _nearest(anchors: Anchors, factor: Value, among: Sequence[Value]) -> list[Value]:
    near = [
        (found[1], made.index, made)
        for made in among
        if made.size == factor.size
        for found in [nearest_layout(made.data, anchors.array(factor), is_plain=True)]
        if found is not None
    ]
    return [made for _, _, made in sorted(near, key=lambda item: item[:2])[:MOST_FACTORS]]
