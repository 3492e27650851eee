"""Draws the three walks of ARCHITECTURE.md: how a run, a port and a comparison pass the packages.

    uv run --group test python docs/draw_walks.py            # draw them
    uv run --group test python docs/draw_walks.py --check    # fail where one is out of date

A row is a line of the walk's list, a column is a package. ``parity`` and ``porting`` are so large
that their own packages have columns.
"""

import re
import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "ARCHITECTURE.md"
# The pictures, in the order of the lists.
PICTURES = ("walk-training.svg", "walk-port.svg", "walk-comparison.svg")
LARGE = ("parity", "porting")

WIDTH, TEXT, ROW, TOP, LANE = 1000, 470, 24, 64, 84


def read_walks() -> list[tuple[str, list[tuple[int, str, str]]]]:
    """Returns the title of each walk and its rows: depth, dotted name, words."""
    walks = []
    page = PAGE.read_text(encoding="utf-8")
    for title, block in re.findall(r"^### ([^\n]+)$\n+```text\n(.*?)```", page, re.M | re.S):
        rows = []
        for line in block.splitlines():
            name, _, words = line.strip().partition(" ")
            rows.append(((len(line) - len(line.lstrip())) // 2, name, words.strip()))
        walks.append((title, rows))
    return walks


def lane_of(name: str) -> str:
    """Returns the package in which a place of the code stands."""
    parts = name.split(".")
    if parts[1] in LARGE and (ROOT / "jaxformer" / parts[1] / parts[2]).is_dir():
        return f"{parts[1]}/ {parts[2]}"
    if (ROOT / "jaxformer" / parts[1]).is_dir():
        return f"{parts[1]}/"
    return "the mirror"


def draw(title: str, rows: list[tuple[int, str, str]]) -> str:
    """Returns the picture of a walk as SVG."""
    lanes = list(dict.fromkeys(lane_of(name) for _, name, _ in rows))
    spread = min(LANE, (WIDTH - TEXT - LANE / 2) / max(len(lanes) - 1, 1))
    middles = {lane: TEXT + LANE / 2 + index * spread for index, lane in enumerate(lanes)}
    height = TOP + ROW * len(rows) + 12
    parts, points = [], []
    for lane, x in middles.items():
        for index, word in enumerate(lane.split(" ", 1) if lane != "the mirror" else [lane]):
            parts.append(f'<text class="lane" x="{x:.0f}" y="{24 + 14 * index}">{word}</text>')
        parts.append(
            f'<line class="lane" x1="{x:.0f}" y1="{TOP - 16}" x2="{x:.0f}" y2="{height - 8}"/>'
        )
    for index, (depth, name, words) in enumerate(rows):
        x, y = middles[lane_of(name)], TOP + ROW * index
        points.append(f"{x:.0f},{y}")
        short = name.rpartition(".")[2]
        parts.append(
            f'<text class="row" x="{12 + 10 * depth}" y="{y + 4}"><tspan class="name">'
            f'{escape(short)}</tspan><tspan class="words" dx="8">{escape(words)}</tspan></text>'
            f'<circle cx="{x:.0f}" cy="{y}" r="5"/>'
        )
    path = f'<polyline points="{" ".join(points)}"/>'
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">
<title>{escape(title)} through the packages of jaxformer</title>
<desc>Each row is a place in the code, from top to bottom. The line shows in which package it
stands.</desc>
<style>
text {{ font-family: system-ui, sans-serif; fill: #1b1f24; }}
text.lane {{ font-size: 11px; text-anchor: middle; fill: #57606a; }}
.name {{ font-size: 12px; font-weight: 600; }}
.words {{ font-size: 11px; fill: #57606a; }}
line.lane {{ stroke: #d0d7de; }}
polyline {{ fill: none; stroke: #bf8700; stroke-width: 2; stroke-linejoin: round; }}
circle {{ fill: #fff4d6; stroke: #bf8700; stroke-width: 2; }}
rect {{ fill: #ffffff; }}
</style>
<rect width="{WIDTH}" height="{height}"/>
{path}
{chr(10).join(parts)}
</svg>
"""


def main() -> int:
    """Draws the pictures, or says which is out of date."""
    stale = []
    for picture, walk in zip(PICTURES, read_walks(), strict=True):
        path, drawn = ROOT / "docs/images" / picture, draw(*walk)
        if sys.argv[1:] != ["--check"]:
            path.write_text(drawn, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != drawn:
            stale.append(picture)
    if stale:
        command = "uv run --group test python docs/draw_walks.py"
        print(f"out of date: {', '.join(stale)}; run {command}", file=sys.stderr)
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
