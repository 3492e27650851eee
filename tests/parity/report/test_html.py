"""The page of a parity report, without a browser."""

import base64
import dataclasses
import hashlib
import html
import json
import re

import numpy as np
import pytest

from jaxformer.parity.findings import Difference, Node, SettingDifference, Step
from jaxformer.parity.report.html.writer import page, write_html
from jaxformer.parity.report.report import Report
from jaxformer.parity.report.text import one_line
from tests.support.parity_reports import HOSTILE, report


def page_data(text):
    return json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', text)[1])


def test_everything_is_escaped():
    node = dataclasses.replace(
        report(1, bugs=(0,)).nodes[0], path=HOSTILE, reference_path=HOSTILE, kind=HOSTILE,
        reference_kind=HOSTILE, message=HOSTILE, is_root_cause=True,
        backward={HOSTILE: Difference(1.0, 1.0, 1e-12)},
    )  # fmt: skip
    what = Report(
        "grad", "float32", (node,), (SettingDifference(*[HOSTILE] * 4),),
        (Step(0, 1.0, 1.0, Difference(0, 1, 1), HOSTILE, HOSTILE),),
        {HOSTILE: HOSTILE, "nested": {"a": [HOSTILE]}}, (HOSTILE,),
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
        (report(2, mode="train", first_divergence=5), "Divergence at step 5"),
        (report(2, mode="generate", first_divergence=5), "Divergence at token 5"),
        (Report("forward", "float32"), "Equal: not one number differs"),
    ],
)
def test_the_headline_says_it(what, headline):
    assert re.search(r"<h1>.*</span> (.*)</h1>", page(what))[1] == headline


def test_remarks_are_in_the_header():
    what = dataclasses.replace(report(2, bugs=(1,)), remarks=("layers 0 and 1 look swapped", "so"))
    header = re.search(r"<header.*?</header>", page(what), re.DOTALL)[0]
    assert '<ul class="remarks"><li>layers 0 and 1 look swapped</li><li>so</li></ul>' in header
    assert "remarks" not in re.search(r"<body>.*?<main>", page(report(2)), re.DOTALL)[0]


@pytest.mark.tier("full")
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
    what = report(2, bugs=(1,), mode="train", first_divergence=3)
    data = page_data(page(what))
    for node, drawn in zip(what.nodes, data["nodes"], strict=True):
        relative, allowed, excess, candidate, reference, ulps = drawn["output"]
        difference = node.forward
        figures = difference.relative, difference.allowed / difference.scale, difference.excess
        np.testing.assert_allclose((relative, allowed, excess), figures, rtol=5.1e-3)
        assert (excess > 1) == difference.is_bug
        rounding = difference.candidate_rounding, difference.reference_rounding, difference.ulps
        np.testing.assert_allclose((candidate, reference, ulps), rounding, rtol=5.1e-3)
    assert [step["number"] for step in data["steps"]] == list(range(40))


def test_a_bug_by_a_hair_is_a_bug_on_the_page_too():
    hair = Difference(1.0001e-12, 1.0, 1e-12)
    node = Node("", "", "A", "B", 0, 0, "bug", forward=hair)
    assert page_data(page(Report("forward", "float32", (node,))))["nodes"][0]["output"][2] > 1
