"""The settings of ``jaxformer train`` and ``jaxformer sample``, free of JAX."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxformer.training.config import PRESETS, TrainConfig

# A flag without its --no- twin, which only settings that a preset may switch on need.
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True)
class TrainOptions:
    """Train a character language model.

    Settings come from the preset; every one of them can be given here. A resumed run takes its
    settings from its own folder.
    """

    config: tyro.conf.OmitArgPrefixes[TrainConfig]
    preset: Annotated[str, tyro.conf.arg(metavar="|".join(PRESETS))] = "nano"
    """Where the settings below come from."""
    out: Path | None = None
    """The run's folder; default runs/PRESET."""
    resume: Switch = False
    """Go on with the run in that folder, from its newest checkpoint."""
    init_from: Path | None = None
    """Start from the model in a checkpoint that jaxformer port reads, and from its optimizer's
    state where it has one; its settings then stand in place of the preset's model."""
    fresh_optimizer: Switch = False
    """With --init-from: take the weights alone, and begin at step 0."""
    download: Switch = False
    """Fetch tiny-shakespeare (1.1 MB, its SHA-256 is pinned) if it is not on this machine."""
    tracker: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Metrics services to write to, beside metrics.jsonl."""
    profile: int | None = None
    """Write a trace of this many steps, after warm-up, into the run's folder."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, and use those that are there."""
    debug: Switch = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if self.profile is not None and self.profile < 1:
            raise ValueError(f"--profile must be at least 1 step: got {self.profile}")


@dataclass(frozen=True)
class SampleOptions:
    """Write text with a model; standard output holds the text alone."""

    path: tyro.conf.Positional[Path]
    """A run's folder, or any checkpoint that jaxformer port reads."""
    prompt: str = ""
    """What the text begins with; default a new line, or the model's own first token."""
    prompt_ids: str = ""
    """The same as ids (1,2,3), for a model without a tokenizer."""
    tokens: int = 500
    """How many tokens to write: characters, where the model was trained on such."""
    temperature: float = 0.8
    """Below 1 plays safe, above 1 takes chances."""
    top_k: int | None = None
    """Choose among the k most probable tokens."""
    top_p: float | None = None
    """Choose among the most probable tokens that together reach this probability."""
    seed: int = 0
    """The same seed writes the same text."""
    greedy: Switch = False
    """Always take the most probable token."""
    samples: int = 1
    """How many texts to write."""
    step: int | None = None
    """Which checkpoint to use; default the newest."""
    best: Switch = False
    """Use the checkpoint with the lowest validation loss."""
    unknown: Literal["error", "skip", "replace"] = "error"
    """What to do with a prompt's characters that the model does not know."""
    dialect: str | None = None
    """Whose names the checkpoint's arrays have; default what it shows."""
    config: Path | None = None
    """The model's settings as JSON, which go before those in the checkpoint."""
    meta: Path | None = None
    """nanoGPT's meta.pkl, or a tokenizer.json; default what lies beside the checkpoint."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, and use those that are there."""
    debug: Switch = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        from jaxformer.training.sampling import check

        check(self)
