"""Draws docs/images/architecture.svg: the packages of jaxformer, and which of them import which.

    uv run --group test python docs/draw_architecture.py            # draw it
    uv run --group test python docs/draw_architecture.py --check    # fail where it is out of date

The arrows are the imports that stand in the code. An arrow that follows from two others is left
out, so the picture shows the fewest arrows that say the same. The words in a box are the first line
of the package's docstring.
"""

import ast
import itertools
import sys
import textwrap
from pathlib import Path
from xml.sax.saxutils import escape

import grimp

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs/images/architecture.svg"
MIRROR, TWIN = "the mirror", "torch_ref"

WIDTH, BOX, HEIGHT, STEP, TOP = 1000, 236, 74, 102, 16
# Where each box stands: its row from the top, and the middle of it from the left. Rows are the
# layers that pyproject.toml enforces.
PLACES = {
    "cli": (0, 500),
    "api": (1, 130),
    "inspection": (2, 190), "parity": (2, 530), "planning": (2, 860),
    "porting": (3, 335),
    "training": (4, 580),
    "checkpoints": (5, 330), "data": (5, 700),
    "distributed": (6, 170), "storage": (6, 470), "hardware": (6, 830),
    MIRROR: (7, 560), TWIN: (7, 880),
    "execution": (8, 560),
    "errors": (9, 250),
}  # fmt: skip
NOTES = {
    MIRROR: "the files in the root of jaxformer: config, layers, attention, blocks, models, "
    "train_step, generation …",
    TWIN: "the same files, classes, keywords and attribute paths in PyTorch",
    "errors": "Errors with an exit code each.",
}
WIDE = {MIRROR: 340, TWIN: 220}

Arrow = tuple[str, str]


def box_of(module: str) -> str | None:
    """Returns the box in which a module stands; the root's own doors have none."""
    parts = module.split(".")
    if parts[0] == TWIN:
        return TWIN
    name = parts[1] if len(parts) > 1 else "__init__"
    if name.startswith("__"):
        return None
    return name if name in PLACES else MIRROR


def read_arrows() -> set[Arrow]:
    """Returns which box imports which, without the arrows that follow from others."""
    graph = grimp.build_graph("jaxformer", TWIN, exclude_type_checking_imports=True)
    arrows = set()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            ends = box_of(module), box_of(imported)
            if None not in ends and ends[0] != ends[1]:
                arrows.add(ends)
    reached = set(arrows)
    for middle, first, last in itertools.product(PLACES, repeat=3):
        if (first, middle) in reached and (middle, last) in reached:
            reached.add((first, last))
    return {
        (first, last)
        for first, last in arrows
        if not any((first, middle) in arrows and (middle, last) in reached for middle in PLACES)
    }


def note_of(box: str) -> str:
    """Returns the words in a box."""
    if box in NOTES:
        return NOTES[box]
    file = ROOT / "jaxformer" / box / "__init__.py"
    return (
        (ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "")
        .splitlines()[0]
        .replace("``", "")
    )


def corner(box: str) -> tuple[float, float, float]:
    """Returns a box's left, top and width, in pixels."""
    row, middle = PLACES[box]
    width = WIDE.get(box, BOX)
    return middle - width / 2, TOP + row * STEP, width


def draw_box(box: str) -> str:
    """Returns a box with its name and its words."""
    left, top, width = corner(box)
    kind = {MIRROR: "mirror", TWIN: "twin"}.get(box, "package")
    lines = textwrap.wrap(note_of(box), int((width - 16) / 5.9))[:3]
    name = box if box in (MIRROR, TWIN) else f"{box}/" if box != "errors" else "errors.py"
    words = "".join(
        f'<text class="note" x="{left + width / 2:.0f}" y="{top + 37 + 14 * index:.0f}">'
        f"{escape(line)}</text>"
        for index, line in enumerate(lines)
    )
    return (
        f'<rect class="{kind}" x="{left:.0f}" y="{top:.0f}" width="{width}" height="{HEIGHT}" '
        f'rx="6"/><text class="name" x="{left + width / 2:.0f}" y="{top + 19:.0f}">'
        f"{escape(name)}</text>{words}"
    )


def draw_arrow(first: str, last: str) -> str:
    """Returns an arrow from the lower edge of one box to the upper edge of another."""
    (left, top, width), (left_2, top_2, width_2) = corner(first), corner(last)
    middle, middle_2 = left + width / 2, left_2 + width_2 / 2

    def inside(place: float, left: float, width: float) -> float:
        return min(max(place, left + 20), left + width - 20)

    # Each end leans towards the other, so that arrows of one box do not start at one point.
    start = inside(middle + (middle_2 - middle) * 0.3, left, width)
    end = inside(middle_2 + (middle - middle_2) * 0.3, left_2, width_2)
    return (
        f'<line x1="{start:.0f}" y1="{top + HEIGHT:.0f}" x2="{end:.0f}" y2="{top_2 - 3:.0f}" '
        'marker-end="url(#head)"/>'
    )


def draw() -> str:
    """Returns the picture as SVG."""
    height = TOP * 2 + STEP * 8 + HEIGHT
    arrows = "\n".join(draw_arrow(*arrow) for arrow in sorted(read_arrows()) if TWIN not in arrow)
    boxes = "\n".join(map(draw_box, PLACES))
    (left, top, width), (left_2, _, _) = corner(MIRROR), corner(TWIN)
    twins = (
        f'<line class="twins" x1="{left + width + 3:.0f}" y1="{top + HEIGHT / 2:.0f}" '
        f'x2="{left_2 - 3:.0f}" y2="{top + HEIGHT / 2:.0f}"/>'
        f'<text class="note" x="{(left + width + left_2) / 2:.0f}" y="{top + HEIGHT / 2 - 7:.0f}">'
        "equal</text>"
    )
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">
<title>The packages of jaxformer</title>
<desc>Each box is a package. An arrow points from a package to one that it imports. All arrows point
down.</desc>
<style>
text {{ font-family: system-ui, sans-serif; text-anchor: middle; fill: #1b1f24; }}
.name {{ font-size: 14px; font-weight: 600; }}
.note {{ font-size: 11px; fill: #57606a; }}
rect {{ fill: #ffffff; stroke: #8c959f; }}
rect.sheet {{ stroke: none; }}
rect.mirror, rect.twin {{ fill: #fff4d6; stroke: #bf8700; }}
line {{ stroke: #8c959f; stroke-width: 1.3; }}
line.twins {{ stroke: #bf8700; stroke-width: 2; stroke-dasharray: 5 4; }}
marker path {{ fill: #8c959f; }}
</style>
<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"
orient="auto"><path d="M0 0 8 4 0 8Z"/></marker></defs>
<rect class="sheet" width="{WIDTH}" height="{height}"/>
{arrows}
{twins}
{boxes}
</svg>
"""


def main() -> int:
    """Draws the picture, or says whether the one that is there is up to date."""
    picture = draw()
    if sys.argv[1:] != ["--check"]:
        PICTURE.parent.mkdir(exist_ok=True)
        PICTURE.write_text(picture, encoding="utf-8")
        return 0
    if PICTURE.exists() and PICTURE.read_text("utf-8") == picture:
        return 0
    command = "uv run --group test python docs/draw_architecture.py"
    print(f"{PICTURE.name} is out of date: run {command}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
