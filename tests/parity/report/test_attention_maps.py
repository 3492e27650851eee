"""Attention maps as the page of a parity report draws them."""

import base64
import json

import numpy as np
import pytest

from jaxformer.parity.findings import AttentionMaps, Node
from jaxformer.parity.report.html.attention_maps import (
    BUDGET_BYTES,
    MAX_SIDE,
    attention_pictures,
    reduce,
)


def pixels(picture, side):
    data = np.frombuffer(base64.b64decode(picture[side]), np.uint8)
    return data.reshape(picture["rows"], picture["columns"])


def node_with(candidate, reference, order=0, **more):
    maps = AttentionMaps(candidate.tolist(), reference.tolist())
    return Node(f"a.{order}", "", "A", "B", 0, order, maps=maps, **more)


def test_a_small_map_is_drawn_cell_by_cell():
    rng = np.random.default_rng(3)
    candidate, reference = rng.random((2, 3, 5, 7))
    [maps] = attention_pictures([node_with(candidate, reference)]).values()
    assert [p["head"] for p in maps["heads"]] == [0, 1, 2]
    for picture, one, other in zip(maps["heads"], candidate, reference, strict=True):
        high = max(one.max(), other.max())
        # Half a step of 255 colours.
        np.testing.assert_allclose(pixels(picture, "candidate") / 255, one / high, atol=0.5 / 255)
        np.testing.assert_allclose(pixels(picture, "reference") / 255, other / high, atol=0.5 / 255)
        difference = one - other
        drawn = (pixels(picture, "difference").astype(float) - 128) / 127
        full = np.abs(difference).max()
        np.testing.assert_allclose(drawn, difference / full, atol=0.5 / 127)
        assert picture["largest"] == pytest.approx(full, rel=5.1e-3)


def test_a_large_map_keeps_the_largest_of_every_cell():
    size = 3 * MAX_SIDE + 11
    weights = np.zeros((1, size, 5))
    weights[0, 150, 2] = 1.0
    reference = weights.copy()
    reference[0, 149, 2] = 0.3
    [maps] = attention_pictures([node_with(weights, reference)]).values()
    [picture] = maps["heads"]
    assert (picture["rows"], picture["columns"]) == (MAX_SIDE, 5)
    row = next(
        i for i in range(MAX_SIDE) if i * size // MAX_SIDE <= 150 < (i + 1) * size // MAX_SIDE
    )
    assert np.argwhere(pixels(picture, "candidate")).tolist() == [[row, 2]]
    assert pixels(picture, "candidate")[row, 2] == 255
    [[where, _]] = np.argwhere(pixels(picture, "difference") != 128).tolist()
    assert where in (row - 1, row)
    assert pixels(picture, "difference")[where, 2] == 1
    rng = np.random.default_rng(4)
    assert reduce(rng.random((size, 2 * size))).shape == (MAX_SIDE, MAX_SIDE)


def test_the_last_bits_are_not_drawn_as_a_difference():
    weights = np.full((1, 4, 6), 0.25)
    reference = weights * (1 + 1e-7)
    [maps] = attention_pictures([node_with(weights, reference)]).values()
    assert (pixels(maps["heads"][0], "difference") == 128).all()
    reference[0, 2, 3] += 1e-3
    [maps] = attention_pictures([node_with(weights, reference)]).values()
    assert pixels(maps["heads"][0], "difference")[2, 3] == 1


def test_what_the_budget_leaves_are_the_heads_that_differ_most():
    rng = np.random.default_rng(5)
    nodes = []
    for order in range(60):
        reference = rng.random((9, 64, 64))
        candidate = reference.copy()
        candidate[order % 9] += 0.5
        nodes.append(node_with(candidate, reference, order, is_root_cause=order == 59))
    drawn = attention_pictures(nodes)
    assert len(drawn) == 60
    for order, maps in drawn.items():
        assert order % 9 in [p["head"] for p in maps["heads"]]
    size = sum(
        len(p[side])
        for maps in drawn.values()
        for p in maps["heads"]
        for side in ("candidate", "reference", "difference")
    )
    assert 0.99 * BUDGET_BYTES < size <= BUDGET_BYTES
    # A root cause comes before the others of its turn.
    assert len(drawn[59]["heads"]) == max(len(maps["heads"]) for maps in drawn.values())


def test_maps_that_do_not_fit_each_other_or_are_not_finite_do_no_harm():
    candidate = np.full((2, 3, 4), 0.5)
    assert attention_pictures([node_with(candidate, candidate[:1])]) == {}
    candidate[1, 1, 1] = np.nan
    [maps] = attention_pictures([node_with(candidate, np.full((2, 3, 4), 0.5))]).values()
    assert maps["heads"][1]["largest"] == "Infinity"
    json.dumps(maps, allow_nan=False)
