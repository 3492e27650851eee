import base64
import dataclasses
import hashlib
import html
import io
import itertools
import json
import math
import os
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from jaxformer.errors import CheckpointError, ResourceError, UnsafeFileError
from jaxformer.parity.html_report import page, write_html
from jaxformer.parity.map_images import BUDGET_BYTES, MAX_SIDE, map_images, reduce
from jaxformer.parity.outline import (
    MAX_STEPS,
    chosen_steps,
    gather,
    grow,
    merge,
    one_line,
    scientific,
    short,
    verdict_line,
)
from jaxformer.parity.report import Difference, Histogram, Maps, Node, Report, Setting, Step
from jaxformer.parity.report_files import compare_reports, load_report, save_json
from jaxformer.parity.terminal import print_report
from tests.parity_reports import MESSAGE, report

HOSTILE = "</script><img src=x onerror=alert(1)> \"' & {{data}} [red]\x1b[31m\u2028é"


def printed(what, width=80, encoding="utf-8"):
    """The lines of the terminal report, trailing spaces cut."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_report(what, Console(file=stream, width=width))
    stream.flush()
    return [line.rstrip() for line in stream.buffer.getvalue().decode(encoding).splitlines()]


def with_node(what, path, **changes):
    nodes = [dataclasses.replace(n, **changes) if n.path == path else n for n in what.nodes]
    return dataclasses.replace(what, nodes=tuple(nodes))


def flatten(branches):
    return [node for b in branches for node in (*b.nodes, *flatten(b.parts))]


# ---- The tree ---------------------------------------------------------------------------------


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("ab"), st.booleans()), max_size=30))
def test_every_node_is_in_the_tree_once_and_in_order(drawn):
    depths = list(itertools.accumulate((d for d, _, _ in drawn), lambda was, d: min(d, was + 1)))
    nodes = [
        Node(f"m.{i}", f"t.{i}", kind, kind, depth, i, "bug" if bug else "rounding")
        for i, (depth, (_, kind, bug)) in enumerate(zip(depths, drawn, strict=True))
    ]
    trees = grow(nodes)
    assert flatten(trees) == nodes
    merged = [merge(run) for run in gather(trees)]
    assert sorted(n.order for n in flatten(merged)) == list(range(len(nodes)))
    for run in gather(trees):
        assert len(run) == 1 or all(branch.is_clean for branch in run)


def test_alike_clean_siblings_share_a_line_with_their_worst_values():
    lines = printed(report(12))
    folded = [line for line in lines if "blocks.0 … blocks.11" in line]
    assert len(folded) == 1
    blocks = [n for n in report(12).nodes if re.fullmatch(r"blocks\.\d+", n.path)]
    largest = max(max(d.relative for d in n.differences.values()) for n in blocks)
    assert folded[0].split()[-2] == scientific(largest)
    assert sum("q_proj" in line for line in lines) == 1


@pytest.mark.parametrize(
    "change", [{"kind": "Other"}, {"message": "look"}, {"verdict": "amplified", "condition": 9.0}]
)
def test_a_sibling_that_is_not_alike_or_not_clean_stands_alone(change):
    lines = printed(with_node(report(12), "blocks.5", **change))
    assert any("blocks.0 … blocks.4" in line for line in lines)
    assert any("blocks.6 … blocks.11" in line for line in lines)
    assert any(re.search(r"blocks\.5\s", line) for line in lines)


def test_siblings_whose_numbers_do_not_follow_each_other_are_apart():
    what = report(3)
    nodes = tuple(n for n in what.nodes if not n.path.startswith("blocks.1"))
    lines = printed(dataclasses.replace(what, nodes=nodes))
    assert not any("…" in line for line in lines)


def test_siblings_that_say_the_same_share_a_line_and_say_it_once():
    what = report(6)
    nodes = tuple(
        dataclasses.replace(n, message="compared as a part of what is around it")
        if n.path.endswith("feed_forward_norm")
        else n
        for n in what.nodes
    )
    lines = printed(dataclasses.replace(what, nodes=nodes))
    assert sum("compared as a part" in line for line in lines) == 1
    assert any("blocks.0 … blocks.5" in line for line in lines)


def test_the_number_of_a_bug_is_of_the_stage_where_it_shows():
    small, large = Difference(1e-3, 1.0, 1e-12), Difference(0.7, 1.0, 1e-12)
    for stage, told in (("forward", "1.0e-03"), ("backward", "7.0e-01"), ("", "7.0e-01")):
        node = Node(
            "", "", "A", "B", 0, 0, "bug", stage, "wrong", True,
            forward=small, backward={"input 0": large},
        )  # fmt: skip
        lines = printed(Report("grad", "float32", (node,)))
        assert lines[2].split() == ["✗", "A", told]
        name = "output" if stage == "forward" else "gradient of input 0"
        assert any(f"{name}: {told} of scale" in line for line in lines)


# ---- The terminal -----------------------------------------------------------------------------


def test_the_last_line_names_the_first_culprit():
    last = f"bug: blocks.3.attention (their model.layers.3.self_attn): {MESSAGE}"
    for width, encoding in itertools.product((120, 80, 40, 20), ("utf-8", "ascii")):
        assert printed(report(6, bugs=(3, 4)), width, encoding)[-1] == last
    assert printed(report(6))[-1] == "equal (rounding)"
    assert printed(report(6, amplified=(2,)))[-1] == "equal (amplified)"
    assert printed(Report("forward", "float32"))[-1] == "equal (exact)"
    only = Node("", "", "Linear", "Linear", 0, 0, "exact", forward=Difference(0, 1, 1e-12))
    assert printed(Report("forward", "bfloat16", (only,)))[-1] == "equal (exact)"


def test_the_last_line_where_no_node_is_to_blame():
    line = printed(report(2, mode="train", parting=7))[-1]
    assert line.startswith("bug: step 7: ours 3.027")
    assert line.endswith("most of all in blocks.2.attention.q_proj.kernel")
    assert printed(report(2, mode="generate", parting=5))[-1].startswith("bug: token 5: ours ")
    blamed = with_node(report(2), "blocks.1", verdict="bug")
    assert verdict_line(blamed) == "bug: blocks.1 (their model.layers.1)"


def test_a_message_cannot_break_the_last_line():
    what = with_node(report(6, bugs=(3,)), "blocks.3.attention", message=f"one\ntwo {HOSTILE}")
    lines = printed(what)
    assert lines[-1].startswith("bug: blocks.3.attention (their model.layers.3.self_attn): one two")
    assert "\x1b" not in "".join(lines)
    assert "[red]" in lines[-1]


@pytest.mark.parametrize("width", [120, 80, 60, 44, 30])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_line_is_wider_than_the_terminal_but_for_the_bugs(width, encoding):
    lines = printed(report(6, bugs=(3,), mode="train", parting=7, amplified=(1,)), width, encoding)
    tree = lines[1 : next(i for i, line in enumerate(lines) if line.startswith("nodes:"))]
    assert len(tree) > 40
    assert max(map(len, tree)) <= width


def test_numbers_stand_in_columns():
    for width, heads in ((80, ["error", "ulp", "condition"]), (50, ["error", "cond."])):
        lines = printed(report(6, amplified=(2,)), width)
        assert lines[1].split() == heads
        amplified = next(line for line in lines if line.endswith(short(1234.5)))
        assert "▲ attention" in amplified
        # The other lines end where their column does.
        ends = {len(line) for line in lines[2:10]}
        assert ends == {lines[1].index(heads[-2]) + len(heads[-2])}


def test_a_culprit_is_told_with_its_numbers_and_its_counterpart():
    text = " ".join(" ".join(printed(report(6, bugs=(3,)), 400)).split())
    assert f"forward: {MESSAGE}" in text
    assert "1.3e-01 of scale, allowed 2.6e-12; in float32 ours is off by 1.1e-01" in text
    assert "theirs: model.layers.3.self_attn (LlamaAttention)" in text
    assert "nodes: 1 exact, 66 rounding, 3 bug (1 culprit)" in text


def test_all_bugs_are_listed_before_the_last_line():
    lines = printed(report(6, bugs=(1, 3, 4)))
    listed = [line for line in lines if re.match(r"bug \d of 3: ", line)]
    assert [line.split()[4] for line in listed] == ["blocks.3.attention", "blocks.4.attention"]


@pytest.mark.parametrize("width", [100, 50])
def test_settings_are_told(width):
    text = " ".join(printed(report(2, bugs=(1,)), width))
    for word in ("rotary layout", "interleaved", "half", "wrong places", "norm_eps", "1e-06"):
        assert word in text
    assert "Settings" not in " ".join(printed(report(2)))


def test_steps_are_told_around_the_parting():
    what = report(2, mode="train", parting=17)
    shown = [s.number if s else None for s in chosen_steps(what)]
    assert shown == [0, 1, 2, 3, None, *range(13, 22), None, 36, 37, 38, 39]
    line = next(line for line in printed(what) if line.endswith("parts here"))
    assert line.split()[0] == "17"
    assert len(chosen_steps(dataclasses.replace(what, steps=what.steps[:MAX_STEPS]))) == MAX_STEPS
    tie = next(line for line in printed(report(2, mode="generate")) if line.endswith("tie"))
    assert tie.split()[:3] == ["3", "10", "10"]


def test_ascii_where_the_terminal_has_no_more():
    text = "\n".join(printed(report(6, bugs=(3,), amplified=(1,)), encoding="ascii"))
    assert "|- x blocks.3" in text
    assert "^ attention" in text
    assert "\\u" not in text


def test_colours_go_with_the_verdict():
    stream = io.StringIO()
    print_report(report(2, bugs=(1,)), Console(file=stream, force_terminal=True, width=80))
    assert re.search(r"\x1b\[1;31mattention", stream.getvalue())
    assert re.search(r"\x1b\[32m≈", stream.getvalue())


@pytest.mark.parametrize(
    ("value", "text", "brief"),
    [
        (0.0, "0", "0"),
        (1.26e-16, "1.3e-16", "1e-16"),
        (3.14, "3.1e+00", "3.1"),
        (99.96, "1.0e+02", "100"),
        (123456.0, "1.2e+05", "1e5"),
        (math.inf, "inf", "inf"),
        (math.nan, "nan", "nan"),
        (None, "", ""),
    ],
)
def test_figures(value, text, brief):
    assert scientific(value) == text
    assert short(value) == brief


def test_a_node_without_numbers_is_printed():
    bare = Report("forward", "float32", (Node("", "", "A", "B", 0, 0),))
    assert printed(bare)[2].startswith("= A")
    strange = Difference(math.nan, 0.0, 0.0, math.inf, math.nan, math.inf)
    node = Node("", "", "A", "B", 0, 0, "bug", "forward", "NaN", True, forward=strange)
    text = " ".join(printed(Report("forward", "float32", (node,))))
    assert "output: inf of scale" in text


# ---- Files ------------------------------------------------------------------------------------


def test_a_report_comes_back_from_its_file(tmp_path):
    what = report(3, bugs=(1,), mode="train", parting=5)
    odd = Difference(math.nan, math.inf, 0.0, None, math.inf, -math.inf)
    what = with_node(
        what, "blocks.1", forward=odd, condition=math.inf,
        histogram=Histogram((0.0, math.inf), (3,), (4,)),
    )  # fmt: skip
    lost = dataclasses.replace(what.steps[4], ours=math.nan, theirs=math.inf)
    what = dataclasses.replace(what, steps=(*what.steps[:4], lost, *what.steps[5:]))
    save_json(what, tmp_path / "report.json")
    back = load_report(tmp_path / "report.json")
    nodes = tuple(dataclasses.replace(n, maps=None) for n in what.nodes)
    # NaN is not equal to itself; its text is.
    assert repr(back) == repr(dataclasses.replace(what, nodes=nodes))
    assert back.verdict == what.verdict == "bug"
    assert back.culprits[0].path == "blocks.1.attention"
    assert json.loads((tmp_path / "report.json").read_text())["format"] == 1


def test_attention_maps_are_kept_by_to_json_and_left_out_of_files(tmp_path):
    what = report(2)
    save_json(what, tmp_path / "report.json")
    assert all(node.maps is None for node in load_report(tmp_path / "report.json"))
    back = Report.from_dict(json.loads(what.to_json()))
    attention = next(n for n in back if n.path == "blocks.0.attention")
    expected = next(n for n in what if n.path == "blocks.0.attention")
    np.testing.assert_array_equal(attention.maps.ours, expected.maps.ours)


def damaged(**changes):
    values = json.loads(report(1).to_json())
    values.update(changes)
    return json.dumps(values)


BAD_NODE = json.loads(report(1).to_json())["nodes"][0]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "not json",
        damaged(format=2),
        damaged(nodes=[1]),
        damaged(nodes=None),
        damaged(nodes=[{**BAD_NODE, "verdict": "fine"}]),
        damaged(nodes=[{**BAD_NODE, "forward": "x"}]),
        damaged(nodes=[{**BAD_NODE, "forward": {"error": "x"}}]),
        damaged(nodes=[{**BAD_NODE, "histogram": 3}]),
        damaged(nodes=[{**BAD_NODE, "more": 3}]),
        damaged(steps=[{"number": 0}]),
        damaged(settings=["x"]),
        report(1).to_json()[:-30],
    ],
)
def test_what_is_no_report_is_refused(text, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(CheckpointError) as refusal:
        load_report(path)
    assert "report.json" in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_files_that_are_missing_or_unsafe_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        load_report(tmp_path / "none.json")
    with pytest.raises(CheckpointError, match="not a regular file"):
        load_report(tmp_path)
    (tmp_path / "twice.json").write_text('{"format": 1, "format": 1}')
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


# ---- What got worse ---------------------------------------------------------------------------


def test_the_same_report_is_no_worse():
    for what in (report(3), report(3, bugs=(1,)), report(3, mode="train", parting=4)):
        assert compare_reports(what, what) == []
    assert compare_reports(report(3), report(3, bugs=(1,))) == []


def test_a_worse_verdict_is_told_once_for_every_node():
    worse = compare_reports(report(3, bugs=(1,)), report(3))
    heads = [line.partition(":")[0] for line in worse if ": bug, it was rounding" in line]
    assert heads == ["the whole model", "blocks.1", "blocks.1.attention"]
    assert any(f"blocks.1.attention: bug, it was rounding: {MESSAGE}" in line for line in worse)
    assert any(line.startswith("setting rotary layout differs: ours interleaved") for line in worse)


def test_float64_errors_that_more_than_doubled_are_told_where_they_are_more_than_allowed():
    def at(error, allowed=1e-3):
        return with_node(report(1), "lm_head", forward=Difference(error, 1.0, allowed))

    assert compare_reports(at(0.0205), at(0.01)) == [
        "lm_head: output: off by 2.1e-02 of scale, it was 1.0e-02"
    ]
    assert compare_reports(at(0.0195), at(0.01)) == []
    assert compare_reports(at(9e-4), at(1e-9)) == []
    assert len(compare_reports(at(math.nan), at(0.01))) == 1
    assert compare_reports(at(math.nan), at(math.nan)) == []


def test_rounding_ratios_that_more_than_doubled_are_told():
    def at(ours, theirs):
        difference = Difference(0.0, 1.0, 1e-12, ours, theirs)
        return with_node(report(1), "lm_head", forward=difference)

    assert compare_reports(at(2.1e-7, 1e-7), at(1e-7, 1e-7)) == [
        "lm_head: output: its rounding error is 2.1 times theirs, it was 1"
    ]
    assert compare_reports(at(1.9e-7, 1e-7), at(1e-7, 1e-7)) == []
    # Still the more accurate side.
    assert compare_reports(at(0.9e-7, 1e-7), at(1e-8, 1e-7)) == []
    assert compare_reports(at(1e-9, 0.0), at(0.0, 0.0)) == [
        "lm_head: output: its rounding error is inf times theirs, it was 1"
    ]
    assert compare_reports(at(None, None), at(1e-7, 1e-7)) == []


def test_rounding_in_the_whole_model_counts_where_no_bug_comes_in():
    def at(ours, error=0.0):
        difference = Difference(error, 1.0, 1e-12, ours, 1e-7)
        return with_node(report(1), "lm_head", in_context=difference)

    assert compare_reports(at(2.1e-7), at(1e-7)) == [
        "lm_head: in the whole model: its rounding error is 2.1 times theirs, it was 1"
    ]
    assert compare_reports(at(2.1e-7, error=0.1), at(1e-7)) == []


def test_new_and_missing_nodes_are_told():
    assert compare_reports(report(1), report(2))[0] == "blocks.1: missing, it was rounding"
    assert compare_reports(report(2), report(1))[0] == "blocks.1: new, rounding"


def test_a_run_that_parts_earlier_is_told():
    early, late = (report(1, mode="train", parting=parting) for parting in (4, 9))
    never = report(1, mode="train")
    assert compare_reports(late, early) == []
    assert compare_reports(early, late)[0].startswith("the two part at 4, before at 9: ours 3.4")
    assert compare_reports(early, never)[0].startswith("the two part at 4, before never")


def test_reports_of_different_comparisons_are_not_compared():
    worse = compare_reports(report(1, mode="forward"), report(1, mode="grad"))
    assert worse == [
        "the reports do not compare the same: forward in float32, before grad in float32"
    ]


# ---- The page, without a browser --------------------------------------------------------------


def page_data(text):
    return json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', text)[1])


def test_everything_is_escaped():
    node = dataclasses.replace(
        report(1, bugs=(0,)).nodes[0], path=HOSTILE, their_path=HOSTILE, kind=HOSTILE,
        their_kind=HOSTILE, message=HOSTILE, is_culprit=True,
        backward={HOSTILE: Difference(1.0, 1.0, 1e-12)},
    )  # fmt: skip
    what = Report(
        "grad", "float32", (node,), (Setting(*[HOSTILE] * 4),),
        (Step(0, 1.0, 1.0, Difference(0, 1, 1), HOSTILE, HOSTILE),),
        {HOSTILE: HOSTILE, "nested": {"a": [HOSTILE]}},
    )  # fmt: skip
    text = page(what)
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert page_data(text)["nodes"][0]["path"] == HOSTILE
    assert html.escape(one_line(HOSTILE)) in text


def test_nothing_is_loaded_and_the_policy_names_what_is_inline():
    text = page(report(2, bugs=(1,)))
    assert not re.findall(r"(?:src|href)=[\"'](?!#)", text)
    assert "@import" not in text
    assert "url(" not in text
    assert set(re.findall(r"https?://[^\"'\s<]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "style=" not in text
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none';")
    for tag in ("style", "script"):
        inline = re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


@pytest.mark.parametrize(
    ("what", "headline"),
    [
        (report(2, bugs=(1,)), "Bug in blocks.1.attention"),
        (report(3, bugs=(1, 2)), "2 bugs, the first in blocks.1.attention"),
        (report(2), "Equal: what differs is rounding"),
        (report(2, mode="train", parting=5), "They part at step 5"),
        (report(2, mode="generate", parting=5), "They part at token 5"),
        (Report("forward", "float32"), "Equal: not one number differs"),
    ],
)
def test_the_headline_says_it(what, headline):
    assert re.search(r"<h1>.*</span> (.*)</h1>", page(what))[1] == headline


def test_the_page_of_a_deep_model_stays_small(tmp_path):
    what = report(48, bugs=(30,), heads=16, length=100)
    write_html(what, tmp_path / "deep.html")
    assert (tmp_path / "deep.html").stat().st_size < 5_000_000
    nodes = page_data((tmp_path / "deep.html").read_text("utf-8"))["nodes"]
    drawn = [n["maps"] for n in nodes if n["maps"]]
    assert len(drawn) == 48
    assert all(maps["shape"] == [100, 100] and maps["count"] == 16 for maps in drawn)
    assert all(2 <= len(maps["heads"]) <= 4 for maps in drawn)


def test_numbers_of_the_page_are_those_of_the_report():
    what = report(2, bugs=(1,), mode="train", parting=3)
    data = page_data(page(what))
    for node, told in zip(what.nodes, data["nodes"], strict=True):
        relative, allowed, excess, ours, theirs, ulps = told["output"]
        difference = node.forward
        figures = difference.relative, difference.allowed / difference.scale, difference.excess
        np.testing.assert_allclose((relative, allowed, excess), figures, rtol=5.1e-3)
        assert (excess > 1) == difference.is_bug
        rounding = difference.our_rounding, difference.their_rounding, difference.ulps
        np.testing.assert_allclose((ours, theirs, ulps), rounding, rtol=5.1e-3)
    assert [s[0] for s in data["steps"]] == list(range(40))


def test_a_bug_by_a_hair_is_a_bug_on_the_page_too():
    hair = Difference(1.0001e-12, 1.0, 1e-12)
    node = Node("", "", "A", "B", 0, 0, "bug", forward=hair)
    assert page_data(page(Report("forward", "float32", (node,))))["nodes"][0]["output"][2] > 1


# ---- Attention maps ---------------------------------------------------------------------------


def pixels(picture, side):
    data = np.frombuffer(base64.b64decode(picture[side]), np.uint8)
    return data.reshape(picture["rows"], picture["columns"])


def node_with(ours, theirs, order=0, **more):
    maps = Maps(ours.tolist(), theirs.tolist())
    return Node(f"a.{order}", "", "A", "B", 0, order, maps=maps, **more)


def test_a_small_map_is_drawn_cell_by_cell():
    rng = np.random.default_rng(3)
    ours, theirs = rng.random((2, 3, 5, 7))
    [maps] = map_images([node_with(ours, theirs)]).values()
    assert [p["head"] for p in maps["heads"]] == [0, 1, 2]
    for picture, one, other in zip(maps["heads"], ours, theirs, strict=True):
        high = max(one.max(), other.max())
        # Half a step of 255 colours.
        np.testing.assert_allclose(pixels(picture, "ours") / 255, one / high, atol=0.5 / 255)
        np.testing.assert_allclose(pixels(picture, "theirs") / 255, other / high, atol=0.5 / 255)
        difference = one - other
        drawn = (pixels(picture, "difference").astype(float) - 128) / 127
        full = np.abs(difference).max()
        np.testing.assert_allclose(drawn, difference / full, atol=0.5 / 127)
        assert picture["largest"] == pytest.approx(full, rel=5.1e-3)


def test_a_large_map_keeps_the_largest_of_every_cell():
    size = 3 * MAX_SIDE + 11
    weights = np.zeros((1, size, 5))
    weights[0, 150, 2] = 1.0
    theirs = weights.copy()
    theirs[0, 149, 2] = 0.3
    [maps] = map_images([node_with(weights, theirs)]).values()
    [picture] = maps["heads"]
    assert (picture["rows"], picture["columns"]) == (MAX_SIDE, 5)
    row = next(
        i for i in range(MAX_SIDE) if i * size // MAX_SIDE <= 150 < (i + 1) * size // MAX_SIDE
    )
    assert np.argwhere(pixels(picture, "ours")).tolist() == [[row, 2]]
    assert pixels(picture, "ours")[row, 2] == 255
    [[where, _]] = np.argwhere(pixels(picture, "difference") != 128).tolist()
    assert where in (row - 1, row)
    assert pixels(picture, "difference")[where, 2] == 1
    rng = np.random.default_rng(4)
    assert reduce(rng.random((size, 2 * size))).shape == (MAX_SIDE, MAX_SIDE)


def test_the_last_bits_are_not_drawn_as_a_difference():
    weights = np.full((1, 4, 6), 0.25)
    theirs = weights * (1 + 1e-7)
    [maps] = map_images([node_with(weights, theirs)]).values()
    assert (pixels(maps["heads"][0], "difference") == 128).all()
    theirs[0, 2, 3] += 1e-3
    [maps] = map_images([node_with(weights, theirs)]).values()
    assert pixels(maps["heads"][0], "difference")[2, 3] == 1


def test_what_the_budget_leaves_are_the_heads_that_differ_most():
    rng = np.random.default_rng(5)
    nodes = []
    for order in range(60):
        theirs = rng.random((9, 64, 64))
        ours = theirs.copy()
        ours[order % 9] += 0.5
        nodes.append(node_with(ours, theirs, order, is_culprit=order == 59))
    drawn = map_images(nodes)
    assert len(drawn) == 60
    for order, maps in drawn.items():
        assert order % 9 in [p["head"] for p in maps["heads"]]
    size = sum(
        len(p[side])
        for maps in drawn.values()
        for p in maps["heads"]
        for side in ("ours", "theirs", "difference")
    )
    assert 0.99 * BUDGET_BYTES < size <= BUDGET_BYTES
    # A culprit comes before the others of its turn.
    assert len(drawn[59]["heads"]) == max(len(maps["heads"]) for maps in drawn.values())


def test_maps_that_do_not_fit_each_other_or_are_not_finite_do_no_harm():
    ours = np.full((2, 3, 4), 0.5)
    assert map_images([node_with(ours, ours[:1])]) == {}
    ours[1, 1, 1] = np.nan
    [maps] = map_images([node_with(ours, np.full((2, 3, 4), 0.5))]).values()
    assert maps["heads"][1]["largest"] == "Infinity"
    json.dumps(maps, allow_nan=False)
