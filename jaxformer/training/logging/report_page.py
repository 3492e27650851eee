"""``report.html`` in a run's folder: curves, samples, settings and environment in one file."""

import io
import platform
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from jaxformer.checkpoints.manifest import versions
from jaxformer.hardware.invocation import command
from jaxformer.training.config import TrainConfig

# By metric: what its curve shows, and whether its axis is logarithmic.
CURVES = {
    "train_loss": ("training loss (nats per token)", False),
    "val_loss": ("validation loss (nats per token)", False),
    "grad_norm": ("norm of the gradient before clipping", True),
    "learning_rate": ("learning rate", False),
    "tokens_per_second": ("tokens per second", False),
}
# A curve has about so many points at most.
MOST_POINTS = 1000
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #1c2430; background: #fff; }
h1, h2 { line-height: 1.2; } svg { max-width: 100%; height: auto; background: #fff; }
table { border-collapse: collapse; } td { padding: .1rem 1.2rem .1rem 0; vertical-align: top; }
td:first-child { color: #5b6673; } pre { white-space: pre-wrap; overflow-wrap: anywhere;
  background: #f4f6f8; padding: .6rem .8rem; border-radius: .3rem; }
@media (prefers-color-scheme: dark) { body { color: #e6e9ee; background: #14181d; }
  pre { background: #1f252c; } td:first-child { color: #9aa5b1; } }
"""


def make_report(
    folder: Path,
    config: TrainConfig,
    records: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, Any]],
    devices: str,
) -> str:
    """Returns the page of a run as HTML that needs no other file.

    Args:
        folder: of the run.
        config: its settings.
        records: those of ``metrics.jsonl``.
        samples: those of ``samples.jsonl``.
        devices: what it was trained on, in words.
    """
    curves = _draw(records)
    parts = [
        f"<h1>{escape(folder.name)}</h1>",
        _table(_results(config, records)),
        "<h2>Curves</h2>",
        curves or "<p>There are no curves: matplotlib is missing.</p>",
        "<h2>Samples</h2>",
        *(f"<h3>step {one['step']}</h3><pre>{escape(str(one['text']))}</pre>" for one in samples),
        *([] if samples else ["<p>No samples were written.</p>"]),
        "<h2>Continue</h2>",
        f"<p>Write text:</p><pre>{escape(command('sample', folder))}</pre>",
        *_continue(folder, config, records),
        "<h2>Settings</h2>",
        _table(_settings(config)),
        "<h2>Environment</h2>",
        _table({**versions(), "system": platform.platform(), "devices": devices}),
    ]
    title = escape(f"{folder.name} · jaxformer")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _continue(
    folder: Path, config: TrainConfig, records: Sequence[Mapping[str, Any]]
) -> tuple[str, str]:
    """Returns how to train further, as paragraphs."""
    resume = ("train", "--resume", "--out", folder)
    if _last_step(records) < config.steps:
        return "<p>Resume where it stopped:</p>", f"<pre>{escape(command(*resume))}</pre>"
    more = command(*resume, "--steps", 2 * config.steps)
    return "<p>Train further, to a larger number of steps:</p>", f"<pre>{escape(more)}</pre>"


def _last_step(records: Sequence[Mapping[str, Any]]) -> int:
    return max((record["step"] for record in records), default=0)


def _results(config: TrainConfig, records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    found = {"steps": f"{_last_step(records):,} of {config.steps:,}"}
    for name, words in (("train_loss", "training loss"), ("val_loss", "validation loss")):
        losses = [(r[name], r["step"]) for r in records if r.get(name) is not None]
        if losses:
            loss, step = losses[-1]
            found[words] = f"{loss:.4f} nats per token, at step {step:,}"
    if losses:
        loss, step = min(losses)
        found["best validation loss"] = f"{loss:.4f} nats per token, at step {step:,}"
    return found


def _settings(config: TrainConfig) -> dict[str, Any]:
    settings = config.to_dict()
    own = {name: value for name, value in settings.items() if not isinstance(value, dict)}
    tables = {n: value for n, value in settings.items() if isinstance(value, dict)}
    return own | {f"{t}.{n}": value for t, table in tables.items() for n, value in table.items()}


def _table(rows: Mapping[str, Any]) -> str:
    shown = {name: "none" if value is None else str(value) for name, value in rows.items()}
    cells = (f"<tr><td>{escape(n)}</td><td>{escape(v)}</td></tr>" for n, v in shown.items())
    return f"<table>{''.join(cells)}</table>"


def _draw(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns a curve for each metric that was measured, as one SVG; empty without matplotlib."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.ticker import NullFormatter, StrMethodFormatter
    except ImportError:
        return ""
    points = {
        name: [(r["step"], r[name]) for r in records if r.get(name) is not None] for name in CURVES
    }
    measured = {name: values for name, values in points.items() if values}
    if not measured:
        return ""
    # The same run gives the same file.
    with mpl.rc_context({"svg.hashsalt": "jaxformer", "svg.fonttype": "none"}):
        # Fixed margins, in inches: a layout that measures its texts draws all of it three times.
        width, height = 8, 2.2 * len(measured)
        figure = Figure(figsize=(width, height))
        margins = {
            "left": 0.9 / width, "right": 1 - 0.1 / width,
            "top": 1 - 0.3 / height, "bottom": 0.5 / height, "hspace": 0.3,
        }  # fmt: skip
        rows = figure.subplots(len(measured), 1, sharex=True, squeeze=False, gridspec_kw=margins)
        grid = rows[:, 0]
        for axes, (name, values) in zip(grid, measured.items(), strict=True):
            title, is_logarithmic = CURVES[name]
            every = -(-len(values) // MOST_POINTS)
            steps, numbers = zip(*[*values[::every], values[-1]], strict=True)
            marker = "o-" if len(values) <= 50 else "-"
            axes.plot(steps, numbers, marker, color="#0072B2", linewidth=1, markersize=3)
            axes.set_title(title, loc="left", fontsize=10)
            if is_logarithmic and min(numbers) > 0:
                axes.set_yscale("log")
                # Plain numbers: the usual powers are set as formulas, which takes longer than all
                # else. Between powers of ten there are numbers only where these are too few.
                few = max(numbers) < 10 * min(numbers)
                axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axes.yaxis.set_minor_formatter(
                    StrMethodFormatter("{x:g}") if few else NullFormatter()
                )
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        grid[-1].set_xlabel("optimizer step")
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    # What stands before the tag belongs to a file of its own.
    return text.getvalue()[text.getvalue().index("<svg") :]
