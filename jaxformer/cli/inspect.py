"""``jaxformer inspect``: options, and what is printed or written.

JAX and matplotlib are imported once the arguments are known to be good.
"""

import dataclasses
import importlib.util
import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from jaxformer.cli.arguments import Switch, is_path, parse
from jaxformer.errors import ResourceError, UsageError, as_flag
from jaxformer.hardware.invocation import install

# Tables of these sizes take a gigabyte or less, and show no more than smaller ones.
MOST_POSITIONS, MOST_MASKED, MOST_HEAD_SIZE, MOST_KEYS = 2**17, 4096, 2**16, 512
# In tokens; a block of that length may need all memory, and of a greater one always does.
MOST_MEASURED = 2**15

USAGE = """\
usage: jaxformer inspect CHECKPOINT [OPTIONS]
       jaxformer inspect WHAT CHECKPOINT [OPTIONS]

The first lists what is in a checkpoint: arrays, sizes, settings, whose model it is.
A checkpoint is a run's folder, or any that jaxformer port reads. WHAT is one of

  attention   who attends to whom in a text: any layer and head, or their mean; of an
              encoder and decoder, the target to the source
  experts     the share of a text's tokens that each expert computes, layer by layer
  gradients   the norm of every parameter's gradient
  init        what three initialisations do to the model's output
  norms       pre-norm and post-norm blocks: the residual stream by depth
  positions   position tables, and chosen dimensions of them
  masks       causal, window, padding and combined masks
  scaling     what 1/sqrt(head size) does to a softmax
  costs       time and memory against text length and width, measured and fitted

Each writes RUN/inspect/WHAT.png (inspect/WHAT.png beside a file), or WHAT-2.png where that is
taken, and prints its path; jaxformer inspect WHAT --help lists options.
"""


@dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """List what is in a checkpoint: arrays, sizes, settings, and whose model it is."""

    path: tyro.conf.Positional[Path]
    """A file or folder."""
    dialect: str | None = None
    """Whose names the arrays have; default what the checkpoint shows."""
    force: Switch = False
    """Take --dialect even where the checkpoint's config is of another model_type."""
    config: Path | None = None
    """Settings as JSON, which go before those in the checkpoint."""
    ignore: tuple[str, ...] = ()
    """Arrays to leave out, by name or pattern ('bert.pooler.*'), and settings without effect."""
    step: int | None = None
    """Which step of a run; default the newest."""
    best: Switch = False
    """The step of a run with the lowest validation loss."""
    json: Switch = False
    """Print JSON."""
    debug: Switch = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if self.step is not None and self.best:
            raise ValueError("--step and --best exclude each other")


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """What every inspection takes."""

    path: tyro.conf.Positional[Path]
    """A run's folder, or any checkpoint that jaxformer port reads."""
    ignore: tuple[str, ...] = ()
    """Arrays to leave out, by name or pattern ('bert.pooler.*'), and settings without effect."""
    step: int | None = None
    """Which checkpoint of a run to use; default the newest."""
    best: Switch = False
    """Use the checkpoint with the lowest validation loss."""
    out: Path | None = None
    """The file to write, .png, .svg or .pdf; .json is the numbers alone. Default in RUN/inspect."""
    json: Switch = False
    """Write the numbers too, beside the picture."""
    debug: Switch = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if self.step is not None and self.best:
            raise ValueError("--step and --best exclude each other")
        if self.out is not None and self.out.suffix not in (".png", ".svg", ".pdf", ".json"):
            raise ValueError(f"--out must end in .png, .svg, .pdf or .json: got {self.out}")


@dataclass(frozen=True, kw_only=True)
class TextOptions(InspectOptions):
    """What every inspection of a text takes."""

    text: str | None = None
    """What the model reads; default 40 characters that it writes itself."""
    unknown: Literal["error", "skip", "replace"] = "error"
    """What to do with a text's characters that the model does not know."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text == "":
            raise ValueError("--text must not be empty")


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(TextOptions):
    """Draw who attends to whom: one map for each layer and head asked for."""

    layer: int | None = None
    """Which layer, from 0; default every one."""
    head: int | Literal["mean", "all"] = "mean"
    """Which head, from 0; their mean; or all, side by side."""
    target: str | None = None
    """What an encoder and decoder has written of --text; default what it does write."""
    kind: Literal["encoder", "decoder", "cross"] | None = None
    """Which attention of an encoder and decoder; default that of the target to the source."""


@dataclass(frozen=True, kw_only=True)
class ExpertsOptions(TextOptions):
    """Draw the share of a text's tokens that each expert computes, layer by layer."""


@dataclass(frozen=True, kw_only=True)
class GradientsOptions(TextOptions):
    """Draw the norm of the gradient of sum(logits) by every parameter."""


@dataclass(frozen=True, kw_only=True)
class InitOptions(InspectOptions):
    """Draw the output of the run's model, untrained, for three initialisations."""

    seed: int = 0
    """The seed of weights and tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(0 <= self.seed < 2**63, "seed", "in [0, 2^63)", self.seed)


@dataclass(frozen=True, kw_only=True)
class NormsOptions(InitOptions):
    """Draw the residual stream by depth for the run's blocks, untrained, in both orders."""

    layers: int = 12
    """How many blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(1 <= self.layers <= 1000, "layers", "in [1, 1000]", self.layers)


@dataclass(frozen=True, kw_only=True)
class PositionsOptions(InspectOptions):
    """Draw position tables in the run's sizes; learned ones as they are trained."""

    length: int | None = None
    """How many positions; default the run's context."""
    dimensions: tuple[int, ...] = ()
    """Which dimensions to draw as curves, of the tables that have them; default five over each."""

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.length is None or 1 <= self.length <= MOST_POSITIONS
        _check(good, "length", f"in [1, {MOST_POSITIONS}]", self.length)


@dataclass(frozen=True, kw_only=True)
class MasksOptions(InspectOptions):
    """Draw masks: which key (column) each query (row) may attend to."""

    length: int = 24
    """How many tokens."""
    window: int | None = None
    """How many tokens a query sees on a side, itself included; default the run's, or a third."""
    padded: int | None = None
    """How many of the tokens, at the end, are padding; default a quarter."""

    def __post_init__(self) -> None:
        super().__post_init__()
        good = 1 <= self.length <= MOST_MASKED
        _check(good, "length", f"in [1, {MOST_MASKED}]", self.length)
        _check(self.window is None or self.window >= 1, "window", "at least 1", self.window)
        good = self.padded is None or 0 <= self.padded <= self.length
        _check(good, "padded", f"in [0, {self.length}]", self.padded)


@dataclass(frozen=True, kw_only=True)
class ScalingOptions(InspectOptions):
    """Draw a softmax over random scores with and without the factor 1/sqrt(head size)."""

    head_sizes: tuple[int, ...] = (16, 64, 256, 1024)
    """Which head sizes; the run's own is added."""
    keys: int | None = None
    """How many keys each query chooses among; default the run's context, at most 256."""
    seed: int = 0
    """The seed of queries and keys."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in self.head_sizes:
            good = 1 <= size <= MOST_HEAD_SIZE
            _check(good, "head-sizes", f"in [1, {MOST_HEAD_SIZE}]", size)
        good = self.keys is None or 2 <= self.keys <= MOST_KEYS
        _check(good, "keys", f"in [2, {MOST_KEYS}]", self.keys)
        _check(0 <= self.seed < 2**63, "seed", "in [0, 2^63)", self.seed)


@dataclass(frozen=True, kw_only=True)
class CostsOptions(InspectOptions):
    """Measure one block of the run, forward and backward, and fit O(T² D) + O(T D F)."""

    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024)
    """Text lengths T, in tokens."""
    widths: tuple[int, ...] = (1, 2, 4)
    """Widths, as multiples of the run's: heads and feed-forward grow with them."""
    rounds: int = 7
    """How many times each is timed; the median counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("lengths", "widths"):
            for value in getattr(self, name):
                good = 1 <= value <= MOST_MEASURED
                _check(good, name, f"in [1, {MOST_MEASURED}]", value)
        _check(self.rounds >= 1, "rounds", "at least 1", self.rounds)
        points = len(set(self.lengths)) * len(set(self.widths))
        _check(points >= 3, "lengths and --widths", "at least 3 points together", points)


def _check(good: bool, name: str, constraint: str, value: object) -> None:
    if not good:
        raise ValueError(f"--{name} must be {constraint}: got {value}")


OPTIONS: dict[str, type[InspectOptions]] = {
    "attention": AttentionOptions,
    "experts": ExpertsOptions,
    "gradients": GradientsOptions,
    "init": InitOptions,
    "norms": NormsOptions,
    "positions": PositionsOptions,
    "masks": MasksOptions,
    "scaling": ScalingOptions,
    "costs": CostsOptions,
}


def run(arguments: Sequence[str]) -> None:
    """Lists what is in a checkpoint, or writes one inspection of a model.

    Raises:
        UsageError: there is no such inspection, a setting does not fit, or matplotlib is missing.
        CheckpointError: the run has no such checkpoint, or it is damaged.
        TextError: the text has a character that the model does not know.
        ResourceError: a file cannot be written.
    """
    what, *rest = arguments or ["nothing"]
    if what in ("-h", "--help"):
        print(USAGE, end="")
    elif what in OPTIONS:
        _inspect(what, parse(OPTIONS[what], f"jaxformer inspect {what}", rest))
    elif is_path(what):
        _list(parse(TreeOptions, "jaxformer inspect", arguments))
    else:
        raise UsageError(
            f"{what} is not to be inspected: use {', '.join(OPTIONS)}, or a checkpoint's path"
        )


def _list(options: TreeOptions) -> None:
    from jaxformer.inspection.checkpoint_tree import describe, print_tree
    from jaxformer.porting.checkpoint import open_checkpoint
    from jaxformer.porting.source_checks import check_patterns

    checkpoint = open_checkpoint(
        options.path,
        dialect=options.dialect,
        config=options.config,
        step=options.step,
        best=options.best,
        ignore=options.ignore,
        force=options.force,
    )
    check_patterns(checkpoint)
    facts = describe(checkpoint, as_flag)
    if options.json:
        print(json.dumps(facts, indent=1, ensure_ascii=False))
    else:
        print_tree(str(options.path), facts)


def _inspect(what: str, options: InspectOptions) -> None:
    """Writes the picture or numbers of one inspection and prints the path of each file."""
    home = options.path if options.path.is_dir() else options.path.parent
    picture = options.out or _free_name(home / "inspect", what)
    is_drawn = picture.suffix != ".json"
    if is_drawn and importlib.util.find_spec("matplotlib") is None:
        raise UsageError(
            f"a picture needs matplotlib: {install('plot')}, or write the numbers "
            "alone with --out FILE.json"
        )

    from jaxformer.inspection.inspected_model import InspectedModel
    from jaxformer.inspection.inspections import INSPECTIONS
    from jaxformer.porting.checkpoint import open_checkpoint
    from jaxformer.porting.source_checks import check_patterns

    checkpoint = open_checkpoint(
        options.path, step=options.step, best=options.best, ignore=options.ignore
    )
    check_patterns(checkpoint)
    for warning in checkpoint.raw.warnings:
        print(f"jaxformer: warning: {warning}", file=sys.stderr)
    numbers = INSPECTIONS[what](InspectedModel.load(checkpoint), **_own_settings(options))
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
        if is_drawn:
            from jaxformer.inspection.pictures import save_picture

            save_picture(what, numbers, picture)
            print(picture)
        if options.json or not is_drawn:
            path = picture.with_suffix(".json")
            path.write_text(json.dumps(_to_json(numbers), ensure_ascii=False, indent=1) + "\n")
            print(path)
    except OSError as error:
        raise ResourceError(f"cannot write {picture}: {error.strerror}") from error


def _free_name(folder: Path, what: str) -> Path:
    """Returns where a picture is written by default: no earlier picture or numbers are replaced."""
    numbered = (f"{what}-{number}" for number in itertools.count(2))
    names = itertools.chain([what], numbered)
    free = (name for name in names if not any(folder.glob(f"{name}.*")))
    return folder / f"{next(free)}.png"


def _own_settings(options: InspectOptions) -> dict[str, Any]:
    """Returns the options of one inspection, without those that every inspection has."""
    common = {field.name for field in dataclasses.fields(InspectOptions)}
    return {name: value for name, value in vars(options).items() if name not in common}


def _to_json(value: Any) -> Any:
    """Returns numbers as JSON knows them: arrays become lists."""
    if isinstance(value, dict):
        return {key: _to_json(inner) for key, inner in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
