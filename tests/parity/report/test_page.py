"""The page of a parity report in a headless Chromium, where there is one."""

import dataclasses
import functools
import json
import re

import matplotlib.image
import numpy as np
import pytest

from jaxformer.parity.findings import Difference, Node, SettingDifference, Step
from jaxformer.parity.report.html.writer import write_html
from jaxformer.parity.report.report import Report
from jaxformer.parity.report.text import scientific
from tests.support.chromium import EXECUTABLE, Browser
from tests.support.parity_reports import HOSTILE, MESSAGE, report

pytestmark = [
    pytest.mark.tier("full"),
    pytest.mark.skipif(EXECUTABLE is None, reason="there is no Chromium on this machine"),
]
WIDTHS = (1280, 390)
REMARKS = (
    "layers 1 and 4 of blocks look swapped",
    "the reference gives padding tokens no gradient, the candidate does: "
    "model.embed_tokens (row 0)",
)
REPORTS = {
    "bug": lambda: report(12, bugs=(3,)),
    "remarks": lambda: dataclasses.replace(report(6, bugs=(1, 4)), remarks=REMARKS),
    "bugs": lambda: report(6, bugs=(1, 4), mode="train", first_divergence=7),
    "clean": lambda: report(12),
    "generate": lambda: report(4, mode="generate", amplified=(1,)),
    "deep": lambda: report(48, bugs=(30,), heads=16, length=100),
    "empty": lambda: Report("forward", "float32"),
    "one node": lambda: Report("forward", "float32", (Node("", "", "Linear", "Linear", 0, 0),)),
}


@functools.cache
def reported(name):
    """Returns a report, made when a test first asks for it: the deep one has 600 MB."""
    return REPORTS[name]()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    started = Browser(tmp_path_factory.mktemp("profile"))
    yield started
    started.close()


@pytest.fixture
def show(browser, tmp_path):
    """Opens the page of a report; at the end nothing must have gone wrong in it."""

    def opened(what, width=1280, height=900, **more):
        path = tmp_path / "page.html"
        write_html(what, path)
        browser.open(path, width, height, **more)
        return browser

    yield opened
    assert browser.complaints == []


def texts(browser, selector):
    found = f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)"
    return browser.evaluate(found)


def seen(browser, selector):
    """Whether the window shows the beginning of an element."""
    return browser.evaluate(
        f"""(() => {{
            const box = document.querySelector({json.dumps(selector)}).getBoundingClientRect();
            return box.height > 0 && box.top >= 0 && box.top < innerHeight;
        }})()"""
    )


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", REPORTS)
def test_nothing_is_wider_than_the_window(show, name, width, dark, tmp_path):
    browser = show(reported(name), width, dark=dark)
    assert browser.evaluate("[innerWidth, document.documentElement.scrollWidth]") == [width] * 2
    # Nor cut off: text that does not fit its own box, but for class names, which may be shortened.
    cut = browser.evaluate(
        """[...document.querySelectorAll("body *:not(.kind)")].filter(e =>
            e.clientWidth && e.scrollWidth > e.clientWidth + 1 && e.namespaceURI.endsWith("xhtml")
        ).map(e => e.outerHTML.slice(0, 99))"""
    )
    assert cut == []
    browser.screenshot(tmp_path / "shot.png")
    pixels = matplotlib.image.imread(tmp_path / "shot.png")[..., :3]
    assert pixels.shape[1] == width
    assert (pixels.mean() < 0.3) == dark


@pytest.mark.parametrize("width", WIDTHS)
def test_the_verdict_and_the_place_are_the_first_thing_to_see(show, width):
    browser = show(reported("bug"), width, 700)
    assert browser.evaluate("scrollY") == 0
    assert texts(browser, "h1") == ["✗ Bug in blocks.3.attention"]
    assert seen(browser, "h1")
    assert seen(browser, ".root-causes li")
    [root_cause] = texts(browser, ".root-causes li")
    assert MESSAGE in root_cause
    assert "model.layers.3.self_attn" in root_cause
    assert (
        browser.evaluate("parseFloat(getComputedStyle(document.querySelector('h1')).fontSize)")
        >= 20
    )


@pytest.mark.parametrize("width", WIDTHS)
def test_remarks_stand_near_the_top(show, width):
    browser = show(reported("remarks"), width, 700)
    assert texts(browser, ".remarks li") == list(REMARKS)
    assert seen(browser, ".remarks li:last-child")


def test_the_root_cause_is_chosen_and_visible_in_the_tree(show):
    browser = show(reported("bug"))
    [chosen] = texts(browser, "[aria-selected=true] > .row .name")
    assert chosen == "attention"
    assert seen(browser, "[aria-selected=true] > .row")
    assert texts(browser, "#node h2") == ["✗ blocks.3.attention"]
    assert MESSAGE in texts(browser, "#node .callout")[0]


def test_a_difference_in_the_whole_model_alone_is_no_bug(show):
    what = reported("clean")
    far = Difference(1e-9, 1.0, 1e-12, 1e-7, 1e-7, 2.0)
    nodes = tuple(dataclasses.replace(n, in_context=far) for n in what.nodes)
    browser = show(dataclasses.replace(what, nodes=nodes))
    assert texts(browser, ".stages [aria-pressed=true]") == ["in the whole model"]
    assert texts(browser, "#errors .mark.bug, #node tr.bug") == []
    assert texts(browser, "#readout") == [
        "the whole model: 1.0e-09; in float32 candidate 1.0e-07, reference 1.0e-07"
    ]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_click_on_a_node_shows_its_numbers(show, width):
    what = reported("bug")
    browser = show(what, width)
    index = next(i for i, n in enumerate(what.nodes) if n.path == "blocks.3.feed_forward")
    browser.click(f"#node-{index} > .row .name")
    assert texts(browser, "#node h2") == ["≈ blocks.3.feed_forward"]
    assert seen(browser, "#node h2")
    node = what.nodes[index]
    for difference in (node.forward, node.in_context, node.backward["input 0"]):
        for value in (
            difference.relative,
            difference.candidate_rounding,
            difference.reference_rounding,
        ):
            assert scientific(value) in texts(browser, "#node td")
    assert browser.evaluate("location.hash") == f"#node-{index}"
    assert texts(browser, "[aria-selected=true] > .row .name") == ["feed_forward"]
    # Its address leads back to the node.
    browser.open(browser.evaluate("location.href"), width)
    assert texts(browser, "#node h2") == ["≈ blocks.3.feed_forward"]


def test_alike_siblings_open_to_single_nodes(show):
    browser = show(reported("clean"))
    assert texts(browser, ".fold > .row .name") == ["blocks.0 … blocks.11"]
    visible = """[...document.querySelectorAll("#tree .name")]
        .filter(e => e.getClientRects().length).map(e => e.textContent)"""
    before = browser.evaluate(visible)
    assert len(before) == 5
    browser.click(".fold > .row .name")
    after = browser.evaluate(visible)
    assert set(after) - set(before) == {f"blocks.{i}" for i in range(12)}
    browser.click(".fold > .row .twist")
    assert browser.evaluate(visible) == before


def test_the_tree_is_used_with_the_keyboard(show):
    browser = show(reported("bug"))
    focused = "document.activeElement.querySelector('.name').textContent"
    browser.evaluate("document.querySelector('[role=treeitem][tabindex=\"0\"]').focus()")
    assert browser.evaluate(focused) == "attention"
    browser.press("ArrowRight", "ArrowDown")
    assert browser.evaluate(focused) == "q_proj"
    browser.press("Enter")
    assert texts(browser, "#node h2") == ["≈ blocks.3.attention.q_proj"]
    browser.press("ArrowDown", "Enter")
    assert texts(browser, "#node h2") == ["≈ blocks.3.attention.k_proj"]
    browser.press("ArrowLeft", "ArrowLeft", "ArrowLeft")
    assert browser.evaluate(focused) == "blocks.3"
    browser.press("Home")
    assert browser.evaluate(focused) == "TransformerLM"
    browser.press("End")
    assert browser.evaluate(focused) == "lm_head"
    # One stop of the tab key for the whole tree; the first part of the page is its link.
    assert (
        browser.evaluate("document.querySelectorAll('[role=treeitem][tabindex=\"0\"]').length") == 1
    )
    browser.evaluate("document.activeElement.blur()")


def test_the_plot_chooses_nodes(show):
    what = reported("bug")
    browser = show(what)
    left, top, width, height = browser.evaluate(
        """(() => {
            const svg = document.querySelector("#errors svg");
            svg.scrollIntoView({block: "center"});
            const box = svg.getBoundingClientRect();
            return [box.left, box.top, box.width, box.height];
        })()"""
    )
    assert len(texts(browser, "#errors .mark")) == len(what.nodes)
    index = 100
    # The axes leave 52 pixels on the left and 10 on the right.
    browser.click_at(left + 52 + (index + 0.5) / len(what.nodes) * (width - 62), top + height / 2)
    path = what.nodes[index].path
    assert texts(browser, "#node h2")[0].endswith(path)
    [readout] = texts(browser, "#readout")
    assert readout.startswith(f"{path}: {scientific(what.nodes[index].forward.relative)}")
    browser.evaluate("document.querySelector('#errors svg').focus()")
    browser.press("ArrowRight", "ArrowRight")
    assert texts(browser, "#node h2")[0].endswith(what.nodes[index + 2].path)
    browser.press("Home")
    assert texts(browser, "#node h2") == ["✗ the whole model"]


def test_the_plot_marks_what_is_more_than_allowed(show):
    browser = show(reported("bugs"))
    count = "document.querySelectorAll('#errors .mark.bug').length"
    assert browser.evaluate(count) == 2
    top = [float(d[1:].split("L")[0].split()[1]) for d in browser.evaluate(
        "[...document.querySelectorAll('#errors .mark.bug')].map(e => e.getAttribute('d'))"
    )]  # fmt: skip
    line = browser.evaluate("document.querySelector('#errors .line.allowed').getAttribute('d')")
    allowed = float(re.search(r"M\S+ ([\d.]+)", line)[1])
    assert max(top) + 10 < allowed
    buttons = texts(browser, ".stages button")
    assert buttons == ["output", "in the whole model", "gradients", "parameters"]
    browser.click(".stages button:nth-child(4)")
    assert browser.evaluate(count) == 0
    # In the whole model what follows a bug is off too, and nothing is judged by that.
    browser.click(".stages button:nth-child(2)")
    assert browser.evaluate(count) == 5
    assert (
        browser.evaluate("document.querySelector('#errors .line.allowed').getAttribute('d')") == ""
    )


def test_attention_maps_and_histograms_are_drawn(show):
    browser = show(reported("bug"))
    drawn = browser.evaluate(
        """[...document.querySelectorAll("#node canvas")].map(canvas => {
            const {width, height} = canvas;
            const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
            let there = 0;
            for (let i = 3; i < data.length; i += 4) there += data[i] > 9;
            return [width, height, there];
        })"""
    )
    assert len(drawn) == 4 * 3
    assert all(size == [24, 24] for *size, _ in drawn)
    candidate, reference, differences = ([count for *_, count in drawn[i::3]] for i in range(3))
    # Nothing above the diagonal; a difference in the two heads that have one, and in no other.
    assert max(candidate + reference) <= 24 * 25 / 2
    assert min(candidate + reference) > 150
    assert min(differences[:2]) > 80
    assert differences[2:] == [0, 0]
    assert len(texts(browser, "#node .histogram path.line")) == 2
    assert "largest difference 0" in texts(browser, "#node figcaption")[2]


def test_steps_are_drawn(show):
    browser = show(reported("bugs"))
    assert browser.evaluate("document.querySelectorAll('#step-errors .mark.bug').length") == 33
    assert browser.evaluate("document.querySelectorAll('#step-losses .line').length") == 2
    assert len(texts(browser, "#steps .first-divergence")) == 3
    browser.click("#steps summary")
    assert any("diverges here" in row for row in texts(browser, "#steps tr"))
    browser = show(reported("generate"))
    assert browser.evaluate("document.querySelectorAll('#step-errors .mark.bug').length") == 0
    assert browser.evaluate("document.querySelector('#step-losses svg')") is None


def test_the_page_says_what_its_words_mean_and_what_was_compared(show):
    browser = show(reported("clean"))
    legend = texts(browser, "#legend dt")
    assert legend == ["= exact", "≈ rounding", "▲ amplified", "✗ bug"]
    assert "model.safetensors" in texts(browser, "#about")[0]
    assert texts(browser, ".counts") == ["≈ 135 rounding\n= 1 exact"]


def test_nothing_that_comes_from_a_model_is_run(show):
    node = Node(
        HOSTILE, HOSTILE, HOSTILE, HOSTILE, 0, 0, "bug", "forward", HOSTILE, True,
        forward=Difference(float("nan"), 0.0, 0.0, float("inf"), float("nan"), float("inf")),
        backward={HOSTILE: Difference(1.0, 1.0, 1e-12)},
    )  # fmt: skip
    step = Step(0, float("nan"), 1.0, Difference(1.0, 1.0, 1e-9), HOSTILE, HOSTILE)
    what = Report(
        "train", HOSTILE, (node,), (SettingDifference(*[HOSTILE] * 4),), (step,), {HOSTILE: HOSTILE}
    )
    browser = show(what, 390)
    assert browser.evaluate("document.querySelectorAll('img').length") == 0
    assert browser.evaluate("document.documentElement.scrollWidth") == 390
    assert "onerror=alert(1)" in texts(browser, "#node h2")[0]


def test_long_names_do_not_burst_the_page(show):
    what = reported("bug")
    long = "a_very_long_name_without_any_place_to_break" * 4
    nodes = tuple(
        dataclasses.replace(n, path=f"{n.path}.{long}", kind=long, message=long)
        if n.is_root_cause
        else n
        for n in what.nodes
    )
    browser = show(dataclasses.replace(what, nodes=nodes), 390)
    assert browser.evaluate("document.documentElement.scrollWidth") == 390


def test_text_stands_out_from_its_ground(show):
    """At least 4.5 to 1, as WCAG asks of small text, in both schemes."""
    for dark in (False, True):
        browser = show(reported("bugs"), dark=dark)
        pairs = browser.evaluate(
            """(() => {
                const style = getComputedStyle(document.documentElement);
                const colour = name => style.getPropertyValue("--" + name).trim();
                const grounds = ["card", "hover", "bug-soft", "rounding-soft", "exact-soft"];
                return ["text", "dim", "link", "bug", "rounding"].flatMap(
                    text => grounds.map(ground => [text, ground, colour(text), colour(ground)]));
            })()"""
        )
        for text, ground, one, other in pairs:
            light, shade = sorted((luminance(one), luminance(other)), reverse=True)
            assert (light + 0.05) / (shade + 0.05) >= 4.5, (text, ground, dark)


def luminance(colour):
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])
