"""Curves of a run as one SVG: written here, since a plotting library takes seconds to draw them."""

import itertools
import math
from collections.abc import Iterator, Sequence
from html import escape

Points = Sequence[tuple[float, float]]

# Of the picture and of the rectangle that a curve is drawn in, in pixels.
WIDTH, HEIGHT = 800, 220
LEFT, RIGHT, TOP, BOTTOM = 76, 784, 36, 196
# The row below the last curve has the numbers of the steps and what they are.
FOOT = 40
COLOUR = "#0072B2"
# A curve of no more points than these shows each of them.
MOST_DOTS = 50
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1c2430}.title{font-size:14px}"
    ".grid{stroke:#dde2e7}.axis{stroke:#5b6673}"
)


class Axis:
    """Numbers along one axis, and where they are drawn.

    Args:
        numbers: those that are drawn; finite.
        start: where the least of them is drawn, in pixels.
        end: where the greatest is drawn.
        is_logarithmic: whether equal distances are equal ratios; the numbers are then positive.
    """

    def __init__(
        self, numbers: Sequence[float], start: float, end: float, is_logarithmic: bool = False
    ):
        self.is_logarithmic = is_logarithmic
        self.low, self.high = self._scale(min(numbers)), self._scale(max(numbers))
        if self.low == self.high:
            margin = abs(self.low) / 10 or 1.0
            self.low, self.high = self.low - margin, self.high + margin
        self.start, self.end = start, end

    def _scale(self, number: float) -> float:
        return math.log10(number) if self.is_logarithmic else float(number)

    def place(self, number: float) -> float:
        """Returns the pixel at which a number is drawn."""
        part = (self._scale(number) - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self, whole: bool = False) -> dict[float, str]:
        """Returns round numbers on the axis and how they are written, in order.

        Args:
            whole: whether the numbers are whole.
        """
        powers = self._powers_of_ten() if self.is_logarithmic else {}
        if len(powers) > 1:
            return powers
        step = round_step(self.high - self.low)
        if whole:
            step = max(1.0, step)
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        numbers = [number * step for number in range(first, last + 1)]
        if self.is_logarithmic:
            return {10**number: f"{10**number:.3g}" for number in numbers}
        digits = max(0, -math.floor(math.log10(step)))
        return {
            number: f"{number:,.{digits}f}" if digits < 6 else f"{number:.3g}" for number in numbers
        }

    def _powers_of_ten(self) -> dict[float, str]:
        powers = range(math.ceil(self.low), math.floor(self.high) + 1)
        every = -(-len(powers) // 6) or 1
        return {10.0**power: f"{10.0**power:g}" for power in powers[::every]}


def round_step(span: float) -> float:
    """Returns the least of 1, 2 and 5 times a power of ten that divides a span in five or less."""
    power = 10.0 ** math.floor(math.log10(span / 5))
    return next(power * size for size in (1, 2, 5, 10) if power * size * 5 >= span * (1 - 1e-9))


def draw_curves(curves: Sequence[tuple[str, Points, bool]]) -> str:
    """Returns curves over the same steps, one below the other, as an SVG.

    Args:
        curves: of each its title, its points (step, number), of which those with a number that is
            not finite are left out, and whether its axis is logarithmic where all are positive.
    """
    shown = []
    for title, points, is_logarithmic in curves:
        finite = [(step, number) for step, number in points if math.isfinite(number)]
        if finite:
            shown.append((title, finite, is_logarithmic and min(n for _, n in finite) > 0))
    if not shown:
        return ""
    steps = Axis(
        [step for step, _ in itertools.chain(*(points for _, points, _ in shown))], LEFT, RIGHT
    )
    height = HEIGHT * len(shown) + FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" role="img"><style>{STYLE}</style>'
    ]
    for row, (title, points, is_logarithmic) in enumerate(shown):
        parts.append(f'<g transform="translate(0 {row * HEIGHT})">')
        parts += _draw_curve(title, points, is_logarithmic, steps)
        parts.append("</g>")
    below = HEIGHT * (len(shown) - 1) + BOTTOM + 18
    for step, written in steps.ticks(whole=True).items():
        parts.append(_text(steps.place(step), below, written, "middle"))
    parts.append(_text((LEFT + RIGHT) / 2, below + 22, "optimizer step", "middle"))
    return "\n".join([*parts, "</svg>"])


def _draw_curve(title: str, points: Points, is_logarithmic: bool, steps: Axis) -> Iterator[str]:
    """Yields the elements of one curve, with its axes and its title."""
    numbers = Axis([number for _, number in points], BOTTOM, TOP, is_logarithmic)
    yield f'<text class="title" x="{LEFT}" y="{TOP - 16}">{escape(title)}</text>'
    for number, written in numbers.ticks().items():
        y = numbers.place(number)
        yield _line("grid", LEFT, y, RIGHT, y)
        yield _text(LEFT - 8, y + 4, written, "end")
    for step in steps.ticks(whole=True):
        x = steps.place(step)
        yield _line("grid", x, TOP, x, BOTTOM)
    yield _line("axis", LEFT, TOP, LEFT, BOTTOM)
    yield _line("axis", LEFT, BOTTOM, RIGHT, BOTTOM)
    places = [(steps.place(step), numbers.place(number)) for step, number in points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    yield f'<polyline points="{path}" fill="none" stroke="{COLOUR}"/>'
    if len(places) <= MOST_DOTS:
        for x, y in places:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{COLOUR}"/>'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, written: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(written)}</text>'
