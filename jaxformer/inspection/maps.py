"""The pictures of tables: attention maps, the load of experts, positions, masks."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, PowerNorm, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import MaxNLocator

from jaxformer.inspection.charts import BLUE, ORANGE, Numbers

FAMILY = "DejaVu Sans Mono"
VISIBLE = {"\n": "↵", " ": "␣", "\t": "⇥", "\r": "␍"}
FIXED_TABLES = ("sinusoidal", "rotary_cos", "rotary_sin")
POSITION_LABELS = {
    "learned": ("learned", "dimension", "position"),
    "sinusoidal": ("sinusoidal", "dimension", "position"),
    "rotary_cos": ("rotary, cosine", "pair", "position"),
    "rotary_sin": ("rotary, sine", "pair", "position"),
    "alibi": ("ALiBi bias", "key position", "query position"),
    "relative": ("relative, first layer", "dimension", "key - query"),
}


def attention(numbers: Numbers) -> Figure:
    """Draws a map for each layer and head, on one colour scale."""
    weights_LNTS, tokens = numbers["weights"], numbers["tokens"]
    keys = numbers.get("keys", tokens)
    layers, heads = weights_LNTS.shape[:2]
    count = layers * heads
    if layers > 1 and heads > 1:
        rows, columns = layers, heads
    else:
        columns = count if count <= 3 else min(4, max(2, round(count**0.5)))
        rows = -(-count // columns)
    # A few maps can be large enough for every token to be read.
    largest = 7.0 if count == 1 else 5.0 if count <= 4 else 3.2 if count <= 16 else 2.2
    side = min(max(0.125 * max(len(tokens), len(keys)), 2.2), largest)
    size = (columns * (side + 0.35) + 1.0, rows * (side + 0.5) + 0.3)
    figure = Figure(figsize=size, layout="compressed")
    grid = figure.subplots(rows, columns, squeeze=False)
    # Queries with few keys have large weights: the colour scale is chosen for all the others.
    high = float(np.quantile(weights_LNTS[weights_LNTS > 0], 0.995))
    norm = PowerNorm(0.5, vmin=0, vmax=high)
    colours = mpl.colormaps["viridis"].with_extremes(bad="#f1f1f1")
    titles = [f"layer {i}, {_head(j)}" for i in numbers["layers"] for j in numbers["heads"]]
    maps = weights_LNTS.reshape(count, len(tokens), -1)
    for axes, map_TS, title in zip(grid.flat, maps, titles, strict=False):
        image = axes.imshow(np.ma.masked_equal(map_TS, 0), cmap=colours, norm=norm)
        axes.set_title(title)
        _label_tokens(axes, tokens, keys, side)
        axes.spines[:].set_visible(False)
    for axes in list(grid.flat)[count:]:
        axes.set_visible(False)
    for axes in grid[:, 0]:
        axes.set_ylabel("query" if numbers.get("kind") != "cross" else "target, query")
    for axes in grid.flat[max(0, count - columns) : count]:
        axes.set_xlabel("key" if numbers.get("kind") != "cross" else "source, key")
    bar = figure.colorbar(
        image, ax=grid, shrink=min(1.0, 3.2 / size[1]), aspect=25, pad=0.02,
        extend="max" if weights_LNTS.max() > high else "neither",
    )  # fmt: skip
    bar.set_label("attention weight (grey: exactly 0)")
    bar.outline.set_visible(False)
    return figure


def experts(numbers: Numbers) -> Figure:
    """Draws the share of tokens that each expert computes, a row for each layer.

    The colour is the share beside that of an even use: white at 1, orange above, blue below.
    """
    load_LE = numbers["load"]
    layers, count = load_LE.shape
    even = load_LE[0].sum() / count
    size = (min(max(0.42 * count, 4.0), 16.0) + 2.4, min(max(0.3 * layers, 1.8), 14.0) + 1.2)
    figure = Figure(figsize=size)
    axes = figure.subplots()
    colours = LinearSegmentedColormap.from_list("load", [BLUE, "white", ORANGE])
    norm = TwoSlopeNorm(1.0, vmin=0.0, vmax=max(2.0, float(load_LE.max()) / even))
    image = axes.imshow(load_LE / even, cmap=colours, norm=norm, aspect="auto")
    if count <= 32:
        for layer, expert in np.ndindex(layers, count):
            share = f"{100 * load_LE[layer, expert]:.0f}"
            axes.text(expert, layer, share, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(layers), [f"layer {layer}" for layer in numbers["layers"]])
    axes.xaxis.set_major_locator(MaxNLocator(min(count, 16), integer=True))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    shown = "numbers: % of the tokens; " if count <= 32 else ""
    title = f"{shown}even: {100 * even:.3g} %, {len(numbers['tokens'])} tokens"
    axes.set(xlabel="expert", title=title)
    balance = [f"{each:.2f}" for each in numbers["balance"]]
    beside = axes.secondary_yaxis("right")
    beside.set_yticks(range(layers), balance)
    beside.tick_params(length=0)
    beside.spines[:].set_visible(False)
    beside.set_ylabel(f"balance, {load_LE[0].sum():g} is even")
    bar = figure.colorbar(image, ax=axes, aspect=25, pad=0.06)
    bar.set_label("load, beside an even one")
    bar.outline.set_visible(False)
    return figure


def positions(numbers: Numbers) -> Figure:
    """Draws a heat map of each table above the curves of its chosen dimensions."""
    tables, chosen = numbers["tables"], numbers["dimensions"]
    figure = Figure(figsize=(3.4 * len(tables) + 0.4, 6.2))
    grid = figure.subplots(2, len(tables), squeeze=False, height_ratios=(1.25, 1))
    for (map_axes, curve_axes), (name, table) in zip(grid.T, tables.items(), strict=True):
        title, column, row = POSITION_LABELS[name]
        at = np.arange(table.shape[-2])
        if name == "alibi":
            head = chosen[name][len(chosen[name]) // 2]
            title, drawn = f"{title}, head {head}", table[head]
            curves, low, high = {n: table[n, -1] for n in chosen[name]}, drawn.min(), 0.0
        else:
            drawn, curves = table, {d: table[:, d] for d in chosen[name]}
            high = 1.0 if name in FIXED_TABLES else float(np.abs(table).max())
            low = -high
        if name == "relative":
            at = at - len(at) // 2
        image = map_axes.imshow(
            drawn, aspect="auto", vmin=low, vmax=high,
            extent=(-0.5, drawn.shape[1] - 0.5, at[-1] + 0.5, at[0] - 0.5),
        )  # fmt: skip
        map_axes.set(title=title, xlabel=column, ylabel=row)
        map_axes.spines[:].set_visible(False)
        figure.colorbar(image, ax=map_axes, aspect=30, pad=0.02).outline.set_visible(False)
        colours = mpl.colormaps["viridis"](np.linspace(0, 0.9, len(curves)))
        for (number, curve), colour in zip(curves.items(), colours, strict=True):
            curve_axes.plot(at, curve, color=colour, linewidth=1.3, label=str(number))
        curve_axes.set(xlabel="key position, for the last query" if name == "alibi" else row)
        curve_axes.set_xlim(at[0], max(at[-1], at[0] + 1))
        curve_axes.legend(
            title="head" if name == "alibi" else column, ncols=len(curves), fontsize=7.5,
            title_fontsize=7.5, loc="lower center", bbox_to_anchor=(0.5, 1.0), handlelength=1,
            columnspacing=0.9, handletextpad=0.4,
        )  # fmt: skip
    return figure


def masks(numbers: Numbers) -> Figure:
    """Draws the masks side by side, a cell for each pair of query and key."""
    figure = Figure(figsize=(11.5, 3.5), layout="compressed")
    row = figure.subplots(1, len(numbers), sharey=True)
    for axes, (name, mask_TS) in zip(row, numbers.items(), strict=True):
        length = len(mask_TS)
        axes.imshow(mask_TS, cmap=ListedColormap(["#e9ebee", BLUE]), vmin=0, vmax=1)
        if length <= 64:
            edges = np.arange(length + 1) - 0.5
            axes.set_xticks(edges, minor=True)
            axes.set_yticks(edges, minor=True)
            axes.grid(which="minor", color="white", linewidth=min(1.0, 24 / length))
        axes.tick_params(which="both", length=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.spines[:].set_visible(False)
        axes.set(title=f"{name}: {mask_TS.mean():.0%} may attend", xlabel="key")
    row[0].set_ylabel("query")
    figure.suptitle("blue: the query may attend to the key", fontsize=9, color=BLUE)
    return figure


def visible(character: str) -> str:
    """Returns a character as an axis shows it: ↵ new line, ␣ space, hex if it has no glyph."""
    shown = VISIBLE.get(character, character)
    return shown if shown.isprintable() and _has_glyph(shown) else f"{ord(character):X}"


def _head(head: int | str) -> str:
    return "mean of heads" if head == "mean" else f"head {head}"


def _label_tokens(axes: Any, tokens: Sequence[str], keys: Sequence[str], side: float) -> None:
    """Labels every token on both axes, or every n-th where labels would overlap.

    ``tokens`` are the rows, ``keys`` the columns; ``side`` is the longer axis, in inches.
    """
    points = 72 * side / max(len(tokens), len(keys))
    stride = max(1, math.ceil(5 / points))
    size = min(9.0, max(4.5, 0.85 * points * stride))
    for axis, names in ((axes.xaxis, keys), (axes.yaxis, tokens)):
        labels = ["".join(map(visible, name)) for name in names]
        axis.set_ticks(
            range(0, len(labels), stride), labels[::stride],
            parse_math=False, family=FAMILY, fontsize=size,
        )  # fmt: skip
        axis.set_tick_params(length=0, pad=1)


@functools.lru_cache(maxsize=4096)
def _has_glyph(character: str) -> bool:
    return bool(_token_font().get_char_index(ord(character)))


@functools.lru_cache(maxsize=1)
def _token_font() -> Any:
    return get_font(findfont(FontProperties(family=FAMILY)))
