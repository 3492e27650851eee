"""Draws docs/images/loss.svg, speed.svg and growth-*.svg from what was measured.

    uv run --group test python docs/draw_results.py              # draw them
    uv run --group test python docs/draw_results.py --check      # fail where one is out of date
    uv run --group test python docs/draw_results.py --measure    # train both sides again first

The losses are in docs/images/loss.json: the preset nano on tiny-shakespeare, in JAX and in PyTorch,
from the same first weights and on the same batches. The speeds are in benchmarks/results.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).parent.parent
sys.path.insert(1, str(ROOT / "benchmarks"))

import table  # noqa: E402

IMAGES = ROOT / "docs/images"
LOSSES = IMAGES / "loss.json"
STEPS, EVERY = 400, 2
WIDTH = 760
BLUE, ORANGE, GREY = "#2463a8", "#e8820c", "#8c959f"
GREEN = "#2f8f5b"
STYLE = """<style>
text { font-family: system-ui, sans-serif; font-size: 13px; fill: #1b1f24; }
.small { font-size: 11px; fill: #57606a; }
.end { text-anchor: end; }
.middle { text-anchor: middle; }
.title { font-size: 14px; font-weight: 600; }
line { stroke: #d8dee4; }
</style>"""


def draw_losses(found: dict[str, Any]) -> str:
    """Returns the training losses of both sides over the steps, torch's thin on top of JAX's."""
    left, top, width, height = 52, 40, WIDTH - 70, 260
    jax, torch = found["jax"], found["torch"]
    lowest, highest = math.floor(min(jax) * 2) / 2, math.ceil(max(jax) * 2) / 2

    def place(index: int, loss: float) -> str:
        x = left + width * index * found["every"] / found["steps"]
        return f"{x:.1f},{top + height * (highest - loss) / (highest - lowest):.1f}"

    def curve(losses: Sequence[float], colour: str, thickness: float, dashes: str) -> str:
        points = " ".join(place(index, loss) for index, loss in enumerate(losses))
        return (
            f'<polyline points="{points}" fill="none" stroke="{colour}" '
            f'stroke-width="{thickness}" stroke-dasharray="{dashes}"/>'
        )

    rules = []
    for half in range(round(lowest * 2), round(highest * 2) + 1):
        _, y = place(0, half / 2).split(",")
        rules.append(
            f'<line x1="{left}" y1="{y}" x2="{left + width}" y2="{y}"/>'
            f'<text class="small end" x="{left - 7}" y="{float(y) + 4:.1f}">{half / 2:g}</text>'
        )
    last = found["steps"]
    for step in range(0, found["steps"] + 1, 100):
        x = left + width * step / last
        rules.append(
            f'<text class="small middle" x="{x:.1f}" y="{top + height + 18}">{step}</text>'
        )
    about = (
        f"nano on tiny-shakespeare, the same first weights and batches. After {found['steps']} "
        f"steps the losses differ by {found['last_difference']:.0e}, at most by "
        f"{found['largest_difference']:.0e}."
    )
    return _picture(
        "Training loss of nano in JAX and in PyTorch",
        about,
        top + height + 48,
        [
            f'<text class="title" x="{left}" y="22">Training loss, nats per character</text>',
            *rules,
            curve(jax, BLUE, 5, "none"),
            curve(torch, ORANGE, 1.4, "none"),
            _key(WIDTH - 170, 60, BLUE, 5, "JAX (jaxformer)"),
            _key(WIDTH - 170, 82, ORANGE, 1.4, "PyTorch (torch_ref)"),
            f'<text class="small" x="{left}" y="{top + height + 38}">{escape(about)}</text>',
        ],
    )


def draw_speeds() -> str:
    """Returns how many times as fast as the better torch a training step is, a bar a result."""
    groups: dict[str, list[tuple[str, float]]] = {}
    for path in sorted((ROOT / "benchmarks/results").glob("training_step-*.json")):
        result = json.loads(path.read_text("utf-8"))
        seconds = {row["side"]: row["seconds_per_step"]["median"] for row in result["results"]}
        jaxformer = seconds.pop("jaxformer")
        if not seconds:
            continue
        machine = result["machine"]
        name = machine["gpu"][0].partition(",")[0] if machine["gpu"] else table.processor(machine)
        what = result["settings"]["preset"] + table.differences(result)
        groups.setdefault(name, []).append((what, min(seconds.values()) / jaxformer))
    left, bar, unit = (
        250,
        20,
        (WIDTH - 320) / max(2.0, *(ratio for rows in groups.values() for _, ratio in rows)),
    )
    parts = ['<text class="title" x="16" y="22">Training step: times as fast as PyTorch</text>']
    y = 40
    for machine_name, rows in groups.items():
        parts.append(f'<text x="16" y="{y + 15}">{escape(machine_name)}</text>')
        for what, ratio in rows:
            y += 4
            colour = BLUE if ratio >= 1 else GREY
            parts.append(
                f'<text class="small end" x="{left - 8}" y="{y + 14}">{escape(what)}</text>'
                f'<rect x="{left}" y="{y}" width="{unit * ratio:.1f}" height="{bar}" rx="2" '
                f'fill="{colour}"/><text class="small" x="{left + unit * ratio + 6:.1f}" '
                f'y="{y + 14}">{ratio:.2f}</text>'
            )
            y += bar
        y += 14
    one = left + unit
    parts.append(
        f'<line x1="{one:.1f}" y1="34" x2="{one:.1f}" y2="{y - 8}" style="stroke: {ORANGE}; '
        'stroke-width: 1.5"/>'
    )
    about = "The line is the better of torch and torch.compile on the same machine, in turn."
    parts.append(f'<text class="small" x="{left}" y="{y + 8}">{about}</text>')
    return _picture("Speed of a training step beside PyTorch", about, y + 20, parts)


# Of a side, where two have one axis: the second is green.
COLOURS = {"jaxformer": BLUE, "pmap": BLUE, "torch_ref": ORANGE, "mesh": GREEN}


def draw_growth(result: dict[str, Any]) -> str:
    """Returns step, compiling and memory along each axis, a curve a side, both scales by powers."""
    rows = result["results"]
    axes = list(dict.fromkeys(row["axis"] for row in rows))
    figures: dict[str, Callable[[Any], float]] = {
        "step, s": lambda row: row["seconds_per_step"]["median"],
        "compiling, s": lambda row: row["compile_seconds"],
        "memory, GiB": lambda row: row["peak_memory"]["process"] / 2**30,
    }
    left, top, gap, height = 58, 34, 22, 150
    width = (WIDTH - left - 12 - gap * (len(axes) - 1)) / len(axes)
    parts = []
    for line, (what, value) in enumerate(figures.items()):
        y0 = top + line * (height + 34)
        values = [value(row) for row in rows]
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        high = max(high, low + 1)
        parts.append(f'<text class="title" x="{left}" y="{y0 - 8}">{what}</text>')
        for power in range(low, high + 1):
            y = y0 + height * (high - power) / (high - low)
            parts.append(
                f'<line x1="{left}" y1="{y:.1f}" x2="{WIDTH - 12}" y2="{y:.1f}"/><text '
                f'class="small end" x="{left - 7}" y="{y + 4:.1f}">{10.0**power:g}</text>'
            )
        for column, axis in enumerate(axes):
            x0 = left + column * (width + gap)
            here = [row for row in rows if row["axis"] == axis]
            sizes = sorted({row["size"] for row in here})
            span = math.log(sizes[-1] / sizes[0]) or 1.0
            places = {s: x0 + width * (0.05 + 0.9 * math.log(s / sizes[0]) / span) for s in sizes}
            for side in dict.fromkeys(row["side"] for row in here):
                colour = COLOURS.get(side, GREEN)
                points = [
                    f"{places[row['size']]:.1f},"
                    f"{y0 + height * (high - math.log10(value(row))) / (high - low):.1f}"
                    for row in here
                    if row["side"] == side
                ]
                parts.append(
                    f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" '
                    'stroke-width="2"/>'
                )
            for size, x in places.items():
                parts.append(
                    f'<text class="small middle" x="{x:.1f}" y="{y0 + height + 14}">{size}</text>'
                )
            if line == len(figures) - 1:
                parts.append(
                    f'<text class="middle" x="{x0 + width / 2:.1f}" y="{y0 + height + 32}">'
                    f"{axis}</text>"
                )
    bottom = top + len(figures) * (height + 34) + 24
    keys = (
        (BLUE, "jaxformer; of devices: pmap"),
        (ORANGE, "torch_ref"),
        (GREEN, "layers in a loop; of devices: mesh"),
    )
    for i, (colour, text) in enumerate(keys):
        parts.append(_key(left + 236 * i, bottom, colour, 2, text))
    about = f"Measured by {result['command']} on {result['machine']['cpu']}."
    return _picture("How the cost of a training step grows", about, bottom + 18, parts)


def _key(x: float, y: float, colour: str, thickness: float, text: str) -> str:
    return (
        f'<line x1="{x}" y1="{y}" x2="{x + 26}" y2="{y}" style="stroke: {colour}; '
        f'stroke-width: {thickness}"/><text x="{x + 34}" y="{y + 4}">{text}</text>'
    )


def _picture(title: str, about: str, height: float, parts: Sequence[str]) -> str:
    body = "\n".join(parts)
    box = f"0 0 {WIDTH} {height:.0f}"
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img">
<title>{escape(title)}</title>
<desc>{escape(about)}</desc>
{STYLE}
<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>
{body}
</svg>
"""


def measure() -> dict[str, Any]:
    """Trains nano on both sides and returns the losses of every ``EVERY``-th step."""
    import dataclasses
    import functools

    import jax
    import numpy as np
    import torch
    from flax import nnx

    import torch_ref.config
    import torch_ref.parameters
    import torch_ref.train_step
    import torch_ref.transformer_lm
    from jaxformer.char_data import CharTokenizer, TokenIdsDataset, batch_at
    from jaxformer.data.corpora import load_corpus
    from jaxformer.parameters import split
    from jaxformer.porting import export_arrays
    from jaxformer.train_step import TrainState, train_step
    from jaxformer.training.presets import nano
    from jaxformer.transformer_lm import TransformerLM

    # Two thread pools that wait for each other's cores take many times as long.
    torch.set_num_threads(1)
    text = load_corpus("tiny-shakespeare").text
    tokenizer = CharTokenizer.train_from_text(text)
    preset = nano()
    config = preset.model.replace(vocab_size=tokenizer.vocabulary_size())
    data = TokenIdsDataset(tokenizer.encode(text), config.context_length)
    optimizer = dataclasses.replace(preset.optimizer, decay_steps=STEPS)
    definition, parameters = split(TransformerLM(config, rngs=nnx.Rngs(preset.seed)))
    twin = torch_ref.transformer_lm.TransformerLM(
        torch_ref.config.TransformerLMConfig(**config.settings())
    )
    torch_ref.parameters.set_parameters(twin, export_arrays(parameters))
    twin_optimizer = torch_ref.config.OptimizerConfig(**dataclasses.asdict(optimizer))
    state = TrainState.create(parameters, optimizer)
    twin_state = torch_ref.train_step.TrainState.create(twin, twin_optimizer)
    step = jax.jit(functools.partial(train_step, definition=definition, optimizer=optimizer))
    losses: dict[str, list[float]] = {"jax": [], "torch": []}
    for number in range(STEPS):
        batch = tuple(a[None] for a in batch_at(data, preset.seed, number, preset.batch_size))
        state, metrics = step(state, batch, None)
        twin_state, twin_metrics = torch_ref.train_step.train_step(
            twin_state,
            tuple(torch.from_numpy(a).long() for a in batch),
            optimizer=twin_optimizer,
        )
        losses["jax"].append(float(metrics["train_loss"]))
        losses["torch"].append(float(twin_metrics["train_loss"]))
    apart = np.abs(np.subtract(losses["jax"], losses["torch"]))
    kept = {side: [round(loss, 4) for loss in found[::EVERY]] for side, found in losses.items()}
    return {
        "command": "python docs/draw_results.py --measure",
        "steps": STEPS,
        "every": EVERY,
        "versions": {"jax": jax.__version__, "torch": torch.__version__},
        "largest_difference": float(apart.max()),
        "last_difference": float(apart[-1]),
        **kept,
    }


def main() -> int:
    """Draws the pictures, or says whether those that are there are up to date."""
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:] == ["--measure"]:
        LOSSES.write_text(json.dumps(measure()) + "\n", encoding="utf-8")
    pictures = {
        IMAGES / "loss.svg": draw_losses(json.loads(LOSSES.read_text("utf-8"))),
        IMAGES / "speed.svg": draw_speeds(),
        **{
            IMAGES / f"{path.stem}.svg": draw_growth(json.loads(path.read_text("utf-8")))
            for path in sorted((ROOT / "benchmarks/results").glob("growth-*.json"))
        },
    }
    if sys.argv[1:] != ["--check"]:
        for path, picture in pictures.items():
            path.write_text(picture, encoding="utf-8")
        return 0
    stale = [
        path.name
        for path, new in pictures.items()
        if not path.exists() or path.read_text("utf-8") != new
    ]
    if stale:
        print(f"{', '.join(stale)}: run python docs/draw_results.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
