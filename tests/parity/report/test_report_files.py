"""Parity reports as files of this and of older formats, and what got worse between two."""

import dataclasses
import functools
import json
import math
import os

import numpy as np
import pytest

from jaxformer.errors import CheckpointError, ResourceError, UnsafeFileError
from jaxformer.parity.findings import Difference, Histogram
from jaxformer.parity.report.files import load_report, save_json
from jaxformer.parity.report.html.writer import write_html
from jaxformer.parity.report.regressions import compare_reports
from jaxformer.parity.report.report import Report
from tests.support.parity_reports import HOSTILE, MESSAGE, report, with_node


def test_a_report_comes_back_from_its_file(tmp_path):
    what = report(3, bugs=(1,), mode="train", first_divergence=5)
    odd = Difference(math.nan, math.inf, 0.0, None, math.inf, -math.inf)
    what = with_node(
        what, "blocks.1", forward=odd, condition=math.inf,
        histogram=Histogram((0.0, math.inf), (3,), (4,)),
    )  # fmt: skip
    lost = dataclasses.replace(what.steps[4], candidate=math.nan, reference=math.inf)
    what = dataclasses.replace(
        what, steps=(*what.steps[:4], lost, *what.steps[5:]), remarks=("two look swapped", HOSTILE)
    )
    save_json(what, tmp_path / "report.json")
    back = load_report(tmp_path / "report.json")
    nodes = tuple(dataclasses.replace(n, maps=None) for n in what.nodes)
    # NaN is not equal to itself; its text is.
    assert repr(back) == repr(dataclasses.replace(what, nodes=nodes))
    assert back.verdict == what.verdict == "bug"
    assert back.root_causes[0].path == "blocks.1.attention"
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["format"] == 2
    assert written["remarks"] == ["two look swapped", HOSTILE]


def test_attention_maps_are_kept_by_to_json_and_left_out_of_files(tmp_path):
    what = report(2)
    save_json(what, tmp_path / "report.json")
    assert all(node.maps is None for node in load_report(tmp_path / "report.json"))
    back = Report.from_dict(json.loads(what.to_json()))
    attention = next(n for n in back if n.path == "blocks.0.attention")
    expected = next(n for n in what if n.path == "blocks.0.attention")
    np.testing.assert_array_equal(attention.maps.candidate, expected.maps.candidate)


@functools.cache
def good():
    return report(1).to_json()


def damaged(**changes):
    values = json.loads(good())
    values.update(changes)
    return json.dumps(values)


# What the keys were called in format 1.
OLD_KEYS = {
    "candidate": "ours",
    "reference": "theirs",
    "candidate_rounding": "our_rounding",
    "reference_rounding": "their_rounding",
    "reference_path": "their_path",
    "reference_kind": "their_kind",
    "is_root_cause": "is_culprit",
}
# What came later.
NEW_KEYS = ("wrong_after", "of_parameter")


def in_format_1(value):
    """A report as format 1 wrote it, with the names of parameters as they are."""
    if isinstance(value, list):
        return [in_format_1(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        OLD_KEYS.get(key, key): {
            f"what {name.removeprefix('output of ')} gave"
            if name.startswith("output of ")
            else name: in_format_1(one)
            for name, one in inner.items()
        }
        if key in ("parameters", "backward")
        else in_format_1(inner)
        for key, inner in value.items()
        if key not in NEW_KEYS
    }


def test_a_report_of_format_1_is_read(tmp_path):
    what = report(3, bugs=(1,), mode="train", first_divergence=5)
    # Parameters may be called as the old keys were.
    names = {"ours": Difference(0.5, 1.0, 1e-3), "theirs": Difference(0.0, 1.0, 1e-3)}
    gradients = {**names, "output of blocks.0": Difference(0.25, 1.0, 1e-3)}
    what = with_node(what, "lm_head", parameters=names, backward=gradients)
    old = in_format_1(json.loads(what.to_json())) | {"format": 1}
    assert set(old["nodes"][0]) == {
        "path", "their_path", "kind", "their_kind", "depth", "order", "verdict", "stage", "message",
        "is_culprit", "parameters", "forward", "in_context", "backward", "condition", "histogram",
        "maps",
    }  # fmt: skip
    assert set(old["nodes"][0]["forward"]) == {
        "error", "scale", "allowed", "our_rounding", "their_rounding", "ulps",
    }  # fmt: skip
    assert "what blocks.0 gave" in old["nodes"][-1]["backward"]
    assert set(old["nodes"][0]["histogram"]) == {"edges", "ours", "theirs"}
    assert set(old["settings"][0]) == {"name", "ours", "theirs", "effect"}
    assert set(old["steps"][0]) == {"number", "ours", "theirs", "difference", "note", "worst"}
    path = tmp_path / "old.json"
    path.write_text(json.dumps(old))
    assert load_report(path).to_json() == what.to_json()
    assert compare_reports(what, load_report(path)) == []
    path.write_text(json.dumps({**old, "format": 2}))
    with pytest.raises(CheckpointError, match="no parity report"):
        load_report(path)


BAD_NODE = json.loads(report(1).to_json())["nodes"][0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "not json",
        damaged(format=3),
        damaged(nodes=[1]),
        damaged(nodes=None),
        damaged(nodes=[{**BAD_NODE, "verdict": "fine"}]),
        damaged(nodes=[{**BAD_NODE, "forward": "x"}]),
        damaged(nodes=[{**BAD_NODE, "forward": {"error": "x"}}]),
        damaged(nodes=[{**BAD_NODE, "histogram": 3}]),
        damaged(nodes=[{**BAD_NODE, "more": 3}]),
        damaged(steps=[{"number": 0}]),
        damaged(settings=["x"]),
        good()[:-30],
    ],
)
def test_what_is_no_report_is_rejected(text, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(CheckpointError) as refusal:
        load_report(path)
    assert "report.json" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_files_that_are_missing_or_unsafe_are_rejected(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load_report(tmp_path / "none.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_report(tmp_path)
    (tmp_path / "twice.json").write_text('{"format": 2, "format": 2}')
    with pytest.raises(UnsafeFileError, match="more than once"):
        load_report(tmp_path / "twice.json")
    with (tmp_path / "huge.json").open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(CheckpointError, match="more than any parity report"):
        load_report(tmp_path / "huge.json")


@pytest.mark.parametrize("write", [save_json, write_html])
def test_a_file_that_cannot_be_written_leaves_the_old_one(write, tmp_path, monkeypatch):
    path = tmp_path / "out"
    write(report(1), path)
    before = path.read_bytes()

    def fails(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(ResourceError, match="No space left"):
        write(report(2), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path).count("out") == 1
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
    with pytest.raises(ResourceError):
        write(report(1), tmp_path / "missing" / "out")


def test_the_same_report_is_no_worse():
    for what in (report(3), report(3, bugs=(1,)), report(3, mode="train", first_divergence=4)):
        assert compare_reports(what, what) == []
    assert compare_reports(report(3), report(3, bugs=(1,))) == []


def test_a_worse_verdict_is_listed_once_for_every_node():
    worse = compare_reports(report(3, bugs=(1,)), report(3))
    heads = [line.partition(":")[0] for line in worse if ": bug, it was rounding" in line]
    assert heads == ["the whole model", "blocks.1", "blocks.1.attention"]
    assert any(f"blocks.1.attention: bug, it was rounding: {MESSAGE}" in line for line in worse)
    assert any(
        line.startswith("setting rotary layout differs: candidate interleaved") for line in worse
    )


def test_float64_errors_that_more_than_doubled_are_listed_where_they_exceed_what_is_allowed():
    def at(error, allowed=1e-3):
        return with_node(report(1), "lm_head", forward=Difference(error, 1.0, allowed))

    assert compare_reports(at(0.0205), at(0.01)) == [
        "lm_head: output: off by 2.1e-02 of scale, it was 1.0e-02"
    ]
    assert compare_reports(at(0.0195), at(0.01)) == []
    assert compare_reports(at(9e-4), at(1e-9)) == []
    assert len(compare_reports(at(math.nan), at(0.01))) == 1
    assert compare_reports(at(math.nan), at(math.nan)) == []


def test_rounding_ratios_that_more_than_doubled_are_listed():
    def at(candidate, reference):
        difference = Difference(0.0, 1.0, 1e-12, candidate, reference)
        return with_node(report(1), "lm_head", forward=difference)

    assert compare_reports(at(2.1e-7, 1e-7), at(1e-7, 1e-7)) == [
        "lm_head: output: its rounding error is 2.1 times the reference's, it was 1"
    ]
    assert compare_reports(at(1.9e-7, 1e-7), at(1e-7, 1e-7)) == []
    # Still the more accurate side.
    assert compare_reports(at(0.9e-7, 1e-7), at(1e-8, 1e-7)) == []
    assert compare_reports(at(1e-9, 0.0), at(0.0, 0.0)) == [
        "lm_head: output: its rounding error is inf times the reference's, it was 1"
    ]
    assert compare_reports(at(None, None), at(1e-7, 1e-7)) == []


def test_rounding_in_the_whole_model_counts_where_no_bug_comes_in():
    def at(candidate, error=0.0):
        difference = Difference(error, 1.0, 1e-12, candidate, 1e-7)
        return with_node(report(1), "lm_head", in_context=difference)

    assert compare_reports(at(2.1e-7), at(1e-7)) == [
        "lm_head: in the whole model: its rounding error is 2.1 times the reference's, it was 1"
    ]
    assert compare_reports(at(2.1e-7, error=0.1), at(1e-7)) == []


def test_new_and_missing_nodes_are_listed():
    assert compare_reports(report(1), report(2))[0] == "blocks.1: missing, it was rounding"
    assert compare_reports(report(2), report(1))[0] == "blocks.1: new, rounding"


def test_a_run_that_diverges_earlier_is_listed():
    early, late = (
        report(1, mode="train", first_divergence=first_divergence) for first_divergence in (4, 9)
    )
    never = report(1, mode="train")
    assert compare_reports(late, early) == []
    assert compare_reports(early, late)[0].startswith(
        "the runs diverge at 4, before at 9: candidate 3.4"
    )
    assert compare_reports(early, never)[0].startswith("the runs diverge at 4, before never")


def test_reports_of_different_comparisons_are_not_compared():
    worse = compare_reports(report(1, mode="forward"), report(1, mode="grad"))
    assert worse == [
        "the reports do not compare the same: forward in float32, before grad in float32"
    ]
