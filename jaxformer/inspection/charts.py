"""The pictures with bars, curves and distributions, and the colours of all pictures."""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from jaxformer.costs import evaluate_fit

Numbers = Mapping[str, Any]
Point = tuple[int, float]

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#8a8f98"
NAMES = {
    "xavier_uniform": "Xavier uniform",
    "kaiming_uniform": "Kaiming uniform",
    "normal": "normal, std 0.02",
}
STEPS = (
    "attention_norm", "attention", "attention_output_norm", "cross_attention_norm",
    "cross_attention", "cross_attention_output_norm", "feed_forward_norm", "feed_forward",
    "feed_forward_output_norm", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "position",
    "o_proj", "gate_proj", "up_proj", "xielu", "down_proj", "kernel", "scale",
    "embedding", "bias", "alpha_p", "alpha_n",
)  # fmt: skip


def gradients(numbers: Numbers) -> Figure:
    """Draws a bar per parameter on a logarithmic axis, in the order of the model."""
    names = sorted(numbers["norms"], key=_model_order)
    norms = np.array([numbers["norms"][name] for name in names])
    # A norm that is zero up to rounding would stretch the axis over many empty decades.
    highest = norms.max() or 1.0
    floor = max(norms[norms > 1e-7 * highest].min(initial=highest) / 3, 1e-7 * highest)
    groups = [_group(name) for name in names]
    starts = list(dict.fromkeys(groups))
    figure = Figure(figsize=(8.5, 0.17 * len(names) + 1.1))
    axes = figure.subplots()
    y = np.arange(len(names))
    colours = mpl.colormaps["viridis"](np.linspace(0.05, 0.85, max(len(starts), 2)))
    axes.barh(
        y, np.maximum(norms, floor), color=[colours[starts.index(g)] for g in groups], height=0.78
    )
    axes.set_xscale("log")
    axes.set_xlim(floor, highest * 3)
    axes.set_yticks(y, names, fontsize=7)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    for place, norm in zip(y, norms, strict=True):
        axes.annotate(
            _short(norm), (max(norm, floor), place), xytext=(3, 0), textcoords="offset points",
            va="center", fontsize=6.5, color="#444444",
        )  # fmt: skip
    for before, place in zip(groups, y[1:], strict=False):
        if groups[place] != before:
            axes.axhline(place - 0.5, color="#dddddd", linewidth=0.6)
    axes.set_xlabel("Euclidean norm of the gradient of sum(logits)")
    axes.xaxis.grid(True, color="#eeeeee", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure


def init(numbers: Numbers) -> Figure:
    """Draws the distribution of the output for each initialization, on one axis."""
    figure = Figure(figsize=(7.5, 5.2))
    grid = figure.subplots(len(numbers), 1, sharex=True)
    for axes, (scheme, what) in zip(grid, numbers.items(), strict=True):
        density, edges = what["density"], what["edges"]
        axes.stairs(density, edges, fill=True, color=BLUE, alpha=0.35, linewidth=0)
        axes.stairs(density, edges, color=BLUE, linewidth=0.8)
        axes.set_ylim(0, density.max() * 1.1)
        axes.plot([what["min"], what["max"]], [0, 0], color=ORANGE, linewidth=3, clip_on=False)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_title(NAMES[scheme], loc="left", fontweight="bold")
        axes.text(
            1, 0.95,
            f"mean {what['mean']:.3f}\nstd {what['std']:.3f}\n"
            f"min {what['min']:.2f}, max {what['max']:.2f}",
            transform=axes.transAxes, ha="right", va="top", linespacing=1.4,
        )  # fmt: skip
    grid[-1].set_xlabel("output of the untrained model (logits, nats); orange: the whole range")
    return figure


def norms(numbers: Numbers) -> Figure:
    """Draws the standard deviation of the residual stream by depth, for both norm orders."""
    figure = Figure(figsize=(6.5, 3.8))
    axes = figure.subplots()
    for (order, statistics), colour in zip(numbers.items(), (BLUE, ORANGE), strict=True):
        std = statistics["std"]
        axes.plot(std, "o-", color=colour, markersize=4)
        axes.annotate(
            f"{order.replace('_', '-')}: {std[-1]:.3f}", (len(std) - 1, std[-1]), xytext=(8, 0),
            textcoords="offset points", color=colour, va="center", fontweight="bold",
            annotation_clip=False,
        )  # fmt: skip
    axes.set_ylim(0, max(s["std"].max() for s in numbers.values()) * 1.08)
    axes.set_xlim(-0.2, len(std) - 1 + 0.2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("blocks passed")
    axes.set_ylabel("std of the residual stream")
    axes.yaxis.grid(True, color="#eeeeee", linewidth=0.6)
    return figure


def scaling(numbers: Numbers) -> Figure:
    """Draws four quantities over the head size, each with and without the scale."""
    sizes, keys = numbers["head_sizes"], numbers["keys"]
    figure = Figure(figsize=(12.5, 3.3))
    row = figure.subplots(1, 4)
    panels = {
        "score_variance": ("variance of the scores", None),
        "max_weight": ("largest weight, mean", 1 / keys),
        "entropy": ("entropy, mean (nats)", np.log(keys)),
        "gradient": ("softmax gradient, mean Σ |∂w/∂s|", 2 - 2 / keys),
    }
    for axes, (name, (title, even)) in zip(row, panels.items(), strict=True):
        for which, colour in (("scaled", BLUE), ("unscaled", ORANGE)):
            axes.plot(sizes, numbers[which][name], "o-", color=colour, markersize=4)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set(title=title, xlabel="head size")
        axes.yaxis.grid(True, color="#eeeeee", linewidth=0.6)
        if even is None:
            axes.set_yscale("log")
            continue
        axes.axhline(even, color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set_ylim(0, max(1.0 if name == "max_weight" else even * 1.1, even))
    row[0].annotate(
        "no scaling", (sizes[-1], numbers["unscaled"]["score_variance"][-1]), xytext=(-8, 0),
        textcoords="offset points", ha="right", va="center", color=ORANGE, fontweight="bold",
    )  # fmt: skip
    row[0].annotate(
        "scores × 1/√size", (sizes[-1], numbers["scaled"]["score_variance"][-1]), xytext=(0, 6),
        textcoords="offset points", ha="right", va="bottom", color=BLUE, fontweight="bold",
    )  # fmt: skip
    row[2].annotate(
        f"even choice among {keys} keys", (sizes[-1], np.log(keys)), xytext=(0, 3), ha="right",
        textcoords="offset points", color=GREY, fontsize=7.5,
    )  # fmt: skip
    return figure


def costs(numbers: Numbers) -> Figure:
    """Draws time and memory over the length on logarithmic axes: measured points, fitted curves."""
    measured, fit = numbers["measured"], numbers["fit"]
    figure = Figure(figsize=(10, 4.3))
    row = figure.subplots(1, 2)
    widths = np.unique(measured["d_model"])
    colours = mpl.colormaps["viridis"](np.linspace(0.1, 0.8, len(widths)))
    panels = {
        "seconds": ("time of one pass (ms)", 1e3),
        "bytes": ("memory of one pass (MiB)", 2**-20),
    }
    for axes, (name, (label, unit)) in zip(row, panels.items(), strict=True):
        for width, colour in zip(widths, colours, strict=True):
            here = {key: column[measured["d_model"] == width] for key, column in measured.items()}
            axes.plot(
                here["length"], here[name] * unit, "o", color=colour, markersize=5,
                label=f"D = {width:.0f}",
            )  # fmt: skip
            between = _between(here)
            fitted = evaluate_fit(fit[name], between) * unit
            axes.plot(between["length"], np.where(fitted > 0, fitted, np.nan), color=colour)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = np.unique(measured["length"]).astype(int)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set(xlabel="text length T (tokens)", ylabel=label)
        axes.grid(True, color="#eeeeee", linewidth=0.6)
    row[0].legend(
        title="points: measured, lines: fit", title_fontsize=8, loc="upper left",
        alignment="left", handlelength=1,
    )  # fmt: skip
    row[0].set_title(_time_formula(fit["seconds"]), fontsize=9)
    row[1].set_title(_memory_formula(fit["bytes"]), fontsize=9)
    return figure


def _short(value: float) -> str:
    """Returns a number with two digits, in powers of ten only where they are needed."""
    return f"{value:.0f}" if 100 <= value < 1e5 else f"{value:.2g}"


def _between(costs: Numbers) -> dict[str, np.ndarray]:
    """Returns the terms of the fit for one width at many lengths; each is a power of the length."""
    lengths = np.geomspace(costs["length"].min(), costs["length"].max(), 100)
    quadratic, linear = (costs["length"][0] ** -power * lengths**power for power in (2, 1))
    return {
        "length": lengths,
        "attention_operations": costs["attention_operations"][0] * quadratic,
        "attention_weights": costs["attention_weights"][0] * quadratic,
        "dense_operations": costs["dense_operations"][0] * linear,
        "activations": costs["activations"][0] * linear,
    }


def _model_order(name: str) -> tuple[Any, ...]:
    """Returns a sort key: embeddings, blocks by number, the rest; in a block as computed."""
    parts = name.split(".")
    if parts[0] != "blocks":
        return 0 if "embedding" in parts[0] else 2, 0, (), name
    steps = tuple(STEPS.index(part) for part in parts[2:] if part in STEPS)
    return 1, int(parts[1]), steps, name


def _group(name: str) -> str:
    parts = name.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else "outside"


def _time_formula(fit: Mapping[str, float]) -> str:
    rates = {
        name: f"{1e-9 / fit[name]:.0f} GFLOP/s" if fit[name] > 0 else "no time"
        for name in ("attention_operations", "dense_operations")
    }
    return (
        f"T²·D term at {rates['attention_operations']}, "
        f"T·D·F term at {rates['dense_operations']}, {1e3 * fit['constant']:.2f} ms constant\n"
        f"median error of the fit {fit['error']:.0%}"
    )


def _memory_formula(fit: Mapping[str, float]) -> str:
    return (
        f"{fit['attention_weights']:.1f} bytes per attention weight (N·T²), "
        f"{fit['activations']:.1f} per activation (T·(D+F))\n"
        f"median error of the fit {fit['error']:.0%}"
    )


def losses_of_runs(runs: Mapping[str, tuple[Sequence[Point], Sequence[Point]]]) -> Figure:
    """Draws training loss (thin) and validation loss (dots) of several runs, in one colour each.

    Args:
        runs: by name the points (step, loss in nats per token) of training and of validation.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    colours = mpl.colormaps["viridis"](np.linspace(0.05, 0.85, max(len(runs), 2)))
    for colour, (name, (trained, evaluated)) in zip(colours, runs.items(), strict=False):
        label = name
        if trained:
            steps, losses = zip(*trained, strict=True)
            axes.plot(steps, losses, color=colour, linewidth=0.6, alpha=0.4)
        steps, losses = zip(*evaluated, strict=True) if evaluated else ((), ())
        if evaluated:
            label = f"{name}: {losses[-1]:.4f}"
        axes.plot(steps, losses, "o-", color=colour, markersize=4, label=label)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure
