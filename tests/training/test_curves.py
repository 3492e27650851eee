"""The curves of a run's report."""

import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from jaxformer.training.logging.curves import LEFT, RIGHT, Axis, draw_curves, round_step

SVG = "{http://www.w3.org/2000/svg}"


def read(svg):
    """Returns the texts, and the points of each curve in pixels."""
    root = ElementTree.fromstring(svg)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    lines = [
        np.array([point.split(",") for point in element.get("points").split()], float)
        for element in root.iter(f"{SVG}polyline")
    ]
    return texts, lines, len(list(root.iter(f"{SVG}circle")))


def test_a_curve_is_where_its_numbers_are():
    points = [(1, 4.0), (11, 3.0), (21, 2.0)]
    texts, (line,), dots = read(draw_curves([("loss & <more>", points, False)]))
    assert line[:, 0].tolist() == [LEFT, (LEFT + RIGHT) / 2, RIGHT]
    # Down is a larger pixel.
    assert line[0, 1] < line[1, 1] < line[2, 1]
    assert line[1, 1] == pytest.approx((line[0, 1] + line[2, 1]) / 2)
    assert dots == 3
    assert texts[0] == "loss & <more>"
    assert {"2.0", "2.5", "4.0", "5", "20", "optimizer step"} <= set(texts)


def test_equal_ratios_are_equal_distances_on_a_logarithmic_axis():
    points = [(1, 0.1), (2, 10.0), (3, 1000.0)]
    texts, (line,), _ = read(draw_curves([("norm", points, True)]))
    assert line[0, 1] - line[1, 1] == pytest.approx(line[1, 1] - line[2, 1])
    assert {"0.1", "1", "100", "1000"} <= set(texts)
    # There is no logarithm of nothing.
    _, (line,), _ = read(draw_curves([("norm", [*points, (4, 0.0)], True)]))
    assert line[1, 1] - line[2, 1] > 50 * abs(line[0, 1] - line[1, 1])


def test_what_is_not_finite_is_left_out_and_nothing_is_no_picture():
    points = [(1, 2.0), (2, math.nan), (3, math.inf), (4, 1.0)]
    _, (line,), dots = read(draw_curves([("loss", points, False)]))
    assert len(line) == dots == 2
    assert draw_curves([("loss", [(1, math.nan)], False)]) == draw_curves([]) == ""


def test_many_points_are_a_line_and_two_curves_share_the_steps():
    many = [(step, 1 / step) for step in range(1, 101)]
    _, (first, second), dots = read(draw_curves([("a", many, False), ("b", [(100, 1)], False)]))
    assert len(first) == 100
    assert second[0, 0] == first[-1, 0]
    assert dots == 1


@pytest.mark.parametrize("numbers", [[3], [0], [-2, 5], [1e-9, 3e-9], [1e12, 3e12], [0.97, 1.02]])
@pytest.mark.parametrize("is_logarithmic", [False, True])
def test_ticks_are_few_round_and_on_the_axis(numbers, is_logarithmic):
    if is_logarithmic and min(numbers) <= 0:
        numbers = [1e-5, *(abs(number) + 1 for number in numbers)]
    axis = Axis(numbers, 0, 100, is_logarithmic)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 7
    assert len(set(ticks.values())) == len(ticks)
    for number, written in ticks.items():
        assert -1e-6 <= axis.place(number) <= 100 + 1e-6
        assert float(written.replace(",", "")) == pytest.approx(number, rel=0.01, abs=1e-12)


def test_steps_are_whole_numbers():
    assert Axis([1, 2], 0, 100).ticks(whole=True) == {1: "1", 2: "2"}
    assert [round_step(span) for span in (1, 5, 7, 12, 49, 0.3)] == [0.2, 1, 2, 5, 10, 0.1]
