"""Parity reports in a terminal: the tree, its numbers, the last line."""

import dataclasses
import io
import itertools
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from jaxformer.errors import UsageError
from jaxformer.parity.findings import Difference, Node, RootCause
from jaxformer.parity.report.report import MOST_LINES, Report
from jaxformer.parity.report.terminal import print_report
from jaxformer.parity.report.text import (
    MAX_STEPS,
    chosen_steps,
    scientific,
    short,
    verdict_line,
)
from jaxformer.parity.report.tree import build_tree, fold_repeats, merge
from tests.support.parity_reports import HOSTILE, MESSAGE, printed, report, with_node


def flatten(branches):
    return [node for b in branches for node in (*b.nodes, *flatten(b.parts))]


@settings(deadline=None, max_examples=80)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from("ab"), st.booleans()), max_size=30))
def test_every_node_is_in_the_tree_once_and_in_order(drawn):
    depths = list(itertools.accumulate((d for d, _, _ in drawn), lambda was, d: min(d, was + 1)))
    nodes = [
        Node(f"m.{i}", f"t.{i}", kind, kind, depth, i, "bug" if bug else "rounding")
        for i, (depth, (_, kind, bug)) in enumerate(zip(depths, drawn, strict=True))
    ]
    trees = build_tree(nodes)
    assert flatten(trees) == nodes
    merged = [merge(run) for run in fold_repeats(trees)]
    assert sorted(n.order for n in flatten(merged)) == list(range(len(nodes)))
    for run in fold_repeats(trees):
        assert len(run) == 1 or all(branch.is_clean for branch in run)


def test_similar_clean_siblings_share_a_line_with_their_worst_values():
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
def test_a_sibling_that_differs_or_is_not_clean_has_its_own_line(change):
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
    for stage, shown in (("forward", "1.0e-03"), ("backward", "7.0e-01"), ("", "7.0e-01")):
        node = Node(
            "", "", "A", "B", 0, 0, "bug", stage, "wrong", True,
            forward=small, backward={"input 0": large},
        )  # fmt: skip
        lines = printed(Report("grad", "float32", (node,)))
        assert lines[2].split() == ["✗", "A", shown]
        name = "output" if stage == "forward" else "gradient of input 0"
        assert any(f"{name}: {shown} of scale" in line for line in lines)


def test_the_last_line_names_the_first_root_cause():
    last = f"bug: blocks.3.attention (reference: model.layers.3.self_attn): {MESSAGE}"
    for width, encoding in itertools.product((120, 80, 40, 20), ("utf-8", "ascii")):
        assert printed(report(6, bugs=(3, 4)), width, encoding)[-1] == last
    assert printed(report(6))[-1] == "equal (rounding)"
    assert printed(report(6, amplified=(2,)))[-1] == "equal (amplified)"
    assert printed(Report("forward", "float32"))[-1] == "equal (exact)"
    only = Node("", "", "Linear", "Linear", 0, 0, "exact", forward=Difference(0, 1, 1e-12))
    assert printed(Report("forward", "bfloat16", (only,)))[-1] == "equal (exact)"


def test_the_last_line_where_no_node_is_a_root_cause():
    line = printed(report(2, mode="train", first_divergence=7))[-1]
    assert line.startswith("bug: step 7: candidate 3.027")
    assert line.endswith("most of all in blocks.2.attention.q_proj.kernel")
    assert printed(report(2, mode="generate", first_divergence=5))[-1].startswith(
        "bug: token 5: candidate "
    )
    unexplained = with_node(report(2), "blocks.1", verdict="bug")
    assert verdict_line(unexplained) == "bug: blocks.1 (reference: model.layers.1)"


def test_a_message_cannot_break_the_last_line():
    what = with_node(report(6, bugs=(3,)), "blocks.3.attention", message=f"one\ntwo {HOSTILE}")
    lines = printed(what)
    assert lines[-1].startswith(
        "bug: blocks.3.attention (reference: model.layers.3.self_attn): one two"
    )
    assert "\x1b" not in "".join(lines)
    assert "[red]" in lines[-1]


@pytest.mark.parametrize("width", [120, 80, 60, 44, 30])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_line_is_wider_than_the_terminal_but_for_the_bugs(width, encoding):
    lines = printed(
        report(6, bugs=(3,), mode="train", first_divergence=7, amplified=(1,)), width, encoding
    )
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


def test_a_root_cause_is_shown_with_its_numbers_and_its_reference():
    text = " ".join(" ".join(printed(report(6, bugs=(3,)), 400)).split())
    assert f"forward: {MESSAGE}" in text
    assert "1.3e-01 of scale, allowed 2.6e-12; in float32 the candidate is off by 1.1e-01" in text
    assert "reference: model.layers.3.self_attn (LlamaAttention)" in text
    assert "nodes: 1 exact, 66 rounding, 3 bug (1 root cause)" in text


def test_all_bugs_are_listed_before_the_last_line():
    lines = printed(report(6, bugs=(1, 3, 4)))
    listed = [line for line in lines if re.match(r"bug \d of 3: ", line)]
    assert [line.split()[4] for line in listed] == ["blocks.3.attention", "blocks.4.attention"]


@pytest.mark.parametrize("width", [100, 40])
@pytest.mark.parametrize("bugs", [(), (3, 4)])
def test_remarks_stand_beside_the_verdict(width, bugs):
    remarks = (
        "layers 3 and 4 of blocks look swapped",
        f"the reference says {HOSTILE} and\nmore of it",
    )
    lines = printed(dataclasses.replace(report(6, bugs=bugs), remarks=remarks), width)
    first = next(i for i, line in enumerate(lines) if line.startswith("layers 3 and 4"))
    assert lines[first - 1].startswith("nodes: ")
    text = " ".join(lines[first : -len(bugs) or -1])
    assert text.startswith(f"{remarks[0]} the reference says </script>")
    assert text.endswith("and more of it")
    assert max(map(len, lines[first : -len(bugs) or -1])) <= width
    assert "\x1b" not in text
    assert lines[-1] == verdict_line(report(6, bugs=bugs))


@pytest.mark.parametrize("width", [100, 50])
def test_settings_are_listed(width):
    text = " ".join(printed(report(2, bugs=(1,)), width))
    for word in ("rotary layout", "interleaved", "half", "wrong places", "norm_eps", "1e-06"):
        assert word in text
    assert "Settings" not in " ".join(printed(report(2)))


def test_steps_are_listed_around_the_divergence():
    what = report(2, mode="train", first_divergence=17)
    shown = [s.number if s else None for s in chosen_steps(what)]
    assert shown == [0, 1, 2, 3, None, *range(13, 22), None, 36, 37, 38, 39]
    line = next(line for line in printed(what) if line.endswith("diverges here"))
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


def test_a_report_shows_itself_in_two_screens_on_one_line_and_in_a_notebook():
    clean = report(12)
    text = str(clean).splitlines()
    assert len(text) < MOST_LINES
    assert text[-1] == verdict_line(clean)
    assert repr(clean) == f"<Report of {len(clean.nodes)} modules: {verdict_line(clean)}>"
    assert clean._repr_html_().startswith("<!doctype html>")
    # Branches with other messages do not share a line.
    long = dataclasses.replace(
        clean, nodes=tuple(dataclasses.replace(n, message=f"{n.order}") for n in clean.nodes)
    )
    text = str(long).splitlines()
    assert len(text) == MOST_LINES
    assert any(re.fullmatch(r"… and \d+ more lines of .*; to_json has all", line) for line in text)
    assert text[-1] == verdict_line(long)


@pytest.mark.parametrize("count", [1, 2, 8, 40])
def test_of_many_root_causes_the_severe_ones_are_shown(count):
    causes = [
        RootCause(
            f"port.py:{line}", f"model.py:{line}", f"number {line} is wrong", 0.5,
            jax_operators=("add",), torch_operators=("mul",), torch_module=f"layers.{line}",
            effect=1e-12,
        )
        for line in range(count)
    ]  # fmt: skip
    causes[-1] = dataclasses.replace(causes[-1], diagnosis="the worst of all", effect=0.5)
    whole = dataclasses.replace(
        report(12),
        nodes=tuple(dataclasses.replace(n, message=f"{n.order}") for n in report(12).nodes),
        causes=tuple(causes),
        incomplete=tuple(f"part {number}" for number in range(count)),
    )
    assert whole.root_causes[0].diagnosis == "the worst of all"
    text = str(whole).splitlines()
    assert len(text) == MOST_LINES
    listed = [line for line in text if re.match(r"\d+\. ", line)]
    assert listed[0] == f"1. the worst of all (in layers.{count - 1})"
    assert len([line for line in text if "reference  model.py:" in line]) == len(listed) >= 1
    more = [line for line in text if "more, which root_causes of the report has" in line]
    assert more == [f"and {count - len(listed)} more, which root_causes of the report has"] * (
        count > len(listed)
    )
    assert "Not compared" in text
    assert any(line.startswith("nodes: ") for line in text)
    assert text[-1].startswith(f"bug: layers.{count - 1}: the worst of all")


def test_a_report_is_a_table_of_its_modules():
    found = report(2)
    try:
        import pandas  # noqa: F401
    except ImportError:
        with pytest.raises(UsageError, match="needs pandas"):
            found.to_dataframe()
        return
    table = found.to_dataframe()
    assert list(table.path) == [node.path for node in found.nodes]


def test_a_module_that_goes_wrong_behind_its_parts_is_named_after_them():
    drawn = report(6, bugs=(2,))
    whole = dataclasses.replace(
        drawn.nodes[0], path="", verdict="bug", stage="forward", is_root_cause=True,
        forward=Difference(0.5, 1.0, 1e-12),
    )  # fmt: skip
    for right, first in (("", ""), ("blocks.0", ""), ("blocks.4", "blocks.2.attention")):
        nodes = (dataclasses.replace(whole, wrong_after=right), *drawn.nodes[1:])
        found = dataclasses.replace(drawn, nodes=nodes).root_causes
        assert found[0].path == first
        assert {cause.path for cause in found} == {"", "blocks.2.attention"}
