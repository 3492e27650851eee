"""The line between rounding and a bug, verdicts, and what wrong weights look like."""

import math

import ml_dtypes
import numpy as np
import pytest

from jaxformer.parity.findings import Difference, Node
from jaxformer.parity.judging import weights as comparison_weights
from jaxformer.parity.judging.verdicts import AMPLIFIED, explain, judge_node, worst_difference
from jaxformer.parity.judging.weights import (
    WrongWeight,
    compare_weight,
    compare_weights,
    find_swapped_layers,
    weight_difference,
)
from jaxformer.parity.tolerance import MIDDLE, ROUNDOFF, judge, rounding, ulps
from jaxformer.porting.formats.tensors import StoredTensor

U32, U64 = ROUNDOFF["float32"], ROUNDOFF["float64"]
X = np.random.default_rng(0).standard_normal((3, 5, 7))


def never():
    raise AssertionError("run in float32 although that cannot decide")


def test_the_line_is_in_the_middle_of_the_bits_between_the_two_precisions():
    assert math.log2(U32 / U64) == 29
    assert math.log2(MIDDLE) == -14.5


def test_float64_rounding_passes_without_a_second_run():
    for noise in (U64, 100 * U64, 1000 * U64):
        assert not judge(X + noise, X, never).is_bug
    assert not judge(X.copy(), X, never).is_bug


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_share_of_float32_rounding_is_a_bug_at_any_scale(scale):
    x = scale * X
    wrong = x.copy()
    wrong[1, 2, 3] += 2.0**-13 * U32 * np.abs(x).max()
    exact_in_float32 = judge(wrong, x, lambda: wrong)
    assert exact_in_float32.is_bug
    assert exact_in_float32.excess == pytest.approx(2**1.5, rel=1e-3)
    assert not judge(x + 2.0**-16 * U32 * np.abs(x).max(), x, never).is_bug


def test_amplification_raises_the_line_in_proportion():
    # A computation that loses ten bits in float32 may lose ten in float64 as well.
    amplified = X + 2.0**10 * U32 * np.abs(X).max()
    lost = X + 2.0**10 * U64 * np.abs(X).max()
    assert not judge(lost, X, lambda: amplified).is_bug
    assert not judge(X + 2.0**-16 * (amplified - X), X, lambda: amplified).is_bug
    assert judge(X + 2.0**-13 * (amplified - X), X, lambda: amplified).is_bug


def test_a_bug_does_not_raise_its_own_line():
    # Both runs of the candidate have the bug, so their distance is the same as without it.
    wrong = 1.001 * X
    assert judge(wrong, X, lambda: wrong.astype(np.float32)).is_bug


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_on_one_side_is_a_bug(value):
    wrong = X.copy()
    wrong[0, 0, 0] = value
    for candidate, reference in ((wrong, X), (X, wrong)):
        difference = judge(candidate, reference, lambda candidate=candidate: candidate)
        assert difference.is_bug
        assert difference.excess == np.inf
    low = X.copy()
    low[2] = np.inf
    assert judge(X + 1e-9, X, lambda: low).is_bug


def test_the_same_infinity_on_both_sides_is_no_difference_but_nan_is():
    masked = X.copy()
    masked[0] = -np.inf
    assert not judge(masked, masked.copy(), never).is_bug
    off = masked.copy()
    off[1] += 1e-9
    assert judge(off, masked).is_bug
    missing = np.full((3,), np.nan)
    assert judge(missing, missing.copy()).is_bug


def test_zeros():
    zero = np.zeros((2, 3))
    assert judge(zero, zero, never) == Difference(0.0, 0.0, 0.0)
    assert judge(zero + 1e-300, zero).is_bug
    # What cancels in exact arithmetic leaves rounding of the size of what cancelled.
    assert not judge(zero + 1e-17, zero, lambda: zero + 1e-8).is_bug
    assert judge(zero + 1e-11, zero, lambda: zero + 1e-8).is_bug
    assert not judge(np.zeros((0, 3)), np.zeros((0, 3)), never).is_bug


def test_rounding_and_units_in_the_last_place():
    assert rounding(X.astype(np.float32), X) == pytest.approx(U32 / 2, rel=0.5)
    assert rounding(X, X) == 0
    assert rounding(np.ones(2), np.zeros(2)) == np.inf
    assert ulps(np.float64([1 + 2.0**-23]), np.ones(1), "float32") == 1
    assert ulps(np.float64([3 + 2.0**-6]), np.float64([3.0]), "bfloat16") == 1


def node(**fields):
    return Node("blocks.0", "h.0", "Block", "Block", 1, 0, **fields)


GOOD, BAD = Difference(0.0, 1.0, 1e-9), Difference(1e-6, 1.0, 1e-9)


def test_a_node_is_judged_by_the_worst_of_it():
    assert judge_node(node(forward=GOOD)).verdict == "exact"
    assert judge_node(node(forward=Difference(1e-10, 1.0, 1e-9))).verdict == "rounding"
    rounded = node(forward=GOOD, in_context=Difference(0.0, 1.0, 1e-9, 1e-7), condition=3.0)
    assert judge_node(rounded).verdict == "rounding"
    assert judge_node(node(forward=GOOD, in_context=BAD)).verdict == "rounding"
    amplified = node(forward=Difference(1e-10, 1.0, 1e-9), condition=2 * AMPLIFIED)
    assert judge_node(amplified).verdict == "amplified"
    for stage, fields in (
        ("parameters", {"parameters": {"scale": BAD}, "forward": BAD}),
        ("forward", {"forward": BAD, "backward": {"input 0": BAD}}),
        ("backward", {"forward": GOOD, "backward": {"input 0": BAD, "scale": GOOD}}),
    ):
        found = judge_node(node(**fields), "its weights differ: scale")
        assert (found.verdict, found.stage, found.is_root_cause) == ("bug", stage, True)
        assert found.message
    both = judge_node(
        node(parameters={"scale": BAD}, forward=BAD, message="its output differs"), "off"
    )
    assert both.message == "off; its output differs"


def test_the_message_of_a_pair_that_was_not_run_says_why():
    assert judge_node(node(message="neither side calls it")).message == "neither side calls it"
    assert judge_node(node(message="all is well", forward=GOOD)).message == ""


def test_the_first_difference_is_explained():
    forward = [("the input of q_proj", GOOD), ("the input of o_proj", BAD), ("its output", BAD)]
    assert (
        explain(forward, []) == "the input of o_proj differs, though the input of q_proj is right"
    )
    assert explain(forward[1:], []) == "the input of o_proj differs on equal inputs"
    assert explain([("its output", BAD)], []) == "its output differs on equal inputs"
    backward = [("input 0", GOOD), ("kernel", BAD), ("bias", BAD)]
    assert "gradient of kernel differs, and 1 more" in explain(forward[:1], backward)
    assert explain(forward[:1], backward[:1]) == ""
    assert worst_difference(d for _, d in [*forward, *backward]) is BAD
    assert worst_difference([]) is None


def weights(*arrays):
    return {f"blocks.{n}.proj.kernel": a.astype(np.float32) for n, a in enumerate(arrays)}


def wrong_weights(candidate, reference) -> dict[str, WrongWeight]:
    tensors = {name: StoredTensor.of(array) for name, array in reference.items()}
    differences, wrong = compare_weights(candidate, tensors)
    assert set(wrong) == {name for name, d in differences.items() if d.is_bug}
    return wrong


A, C = (np.random.default_rng(n).standard_normal((5, 5)).astype(np.float32) for n in (1, 2))
ORDER = np.array([3, 1, 4, 0, 2])


@pytest.mark.parametrize(
    ("wrong", "look"),
    [
        (A.T, "it is the transpose"),
        (A[ORDER], "its inputs are in another order"),
        (A[:, ORDER], "its outputs are in another order"),
        (A.reshape(-1)[::-1].reshape(5, 5), "its elements are in another order"),
        (0 * A, "it is zero"),
        (np.where(np.eye(5) * [1, 0, 0, 0, 0], A + 1e-3, A), "1 of its 25 elements differ"),
        (A * np.nan, "it is not finite"),
        (A * 1.001, ""),
        (C, "it is the reference's blocks.1.proj.kernel"),
    ],
)
def test_what_a_wrong_weight_looks_like(wrong, look):
    found = wrong_weights(weights(wrong, C), weights(A, C))
    assert {name: str(weight) for name, weight in found.items()} == {"blocks.0.proj.kernel": look}


def test_swapped_layers_are_found():
    wrong = wrong_weights(weights(C, A, A * 2), weights(A, C, A * 2))
    assert wrong["blocks.0.proj.kernel"].found_at == ("blocks.1.proj.kernel",)
    assert find_swapped_layers(wrong) == ["layers 0 and 1 of blocks look swapped"]
    # One layer that was copied over another is no swap.
    assert find_swapped_layers(wrong_weights(weights(C, C), weights(A, C))) == []


def test_weights_of_a_narrower_dtype_are_rounded_once():
    narrow = A.astype(np.float16)
    assert not weight_difference(narrow, A).is_bug
    assert weight_difference(narrow * np.float16(1.01), A).is_bug
    assert weight_difference(A + np.float32(1e-7), A).is_bug
    assert weight_difference(A.copy(), A) == Difference(0.0, float(np.abs(A).max()), 0.0)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_the_largest_magnitude_of_any_dtype(dtype):
    values = np.array([[0.5, -3.5], [2.0, -0.0]])
    array = values.astype(getattr(ml_dtypes, dtype, dtype))
    assert weight_difference(array, array.copy()) == Difference(0.0, 3.5, 0.0)
    array[0, 0] = np.nan
    assert np.isnan(weight_difference(array, array.copy()).scale)


def test_weights_are_compared_in_parts(monkeypatch):
    rng = np.random.default_rng(0)
    array = rng.standard_normal((11, 7)).astype(np.float32)
    wrong = array.copy()
    wrong[9, 3] += 1.0
    for weights in (wrong, array[:, ::-1].copy(), array[::-1].copy(), np.zeros_like(array)):
        expected = compare_weight("a.kernel", weights, array)
        with monkeypatch.context() as patch:
            patch.setattr(comparison_weights, "CHUNK", 10)
            assert compare_weight("a.kernel", weights, array) == expected
        assert expected[1]
