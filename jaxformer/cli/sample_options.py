"""The options of ``jaxformer sample``."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from jaxformer.checks import FLOAT32_MAX, check_integers
from jaxformer.cli.arguments import Switch
from jaxformer.errors import Setting
from jaxformer.training.run_arguments import Effect

# Below this, float32 has no room for a logit over the temperature, nor for a share of all tokens.
MIN_VALUE = 1e-6


@dataclass(frozen=True)
class SampleOptions:
    """Write text with a model; standard output holds the text alone."""

    path: tyro.conf.Positional[Path]
    """A run's folder, or any checkpoint that jaxformer port reads."""
    prompt: str = ""
    """What the text begins with; default a new line, or the model's own first token. Of an encoder
    and decoder, the source of which it writes the target."""
    prompt_ids: str = ""
    """What the text begins with, as ids (1,2,3), for a model without a tokenizer."""
    prompts: Path | None = None
    """A file with a prompt on each line: a text is written after each, many at a time, and shown
    with the number of its line as soon as it is whole."""
    rows: int = 8
    """With --prompts, how many texts are written at the same time."""
    chat: Switch = False
    """Give --prompt as a message, in the model's chat template; standard output is the answer."""
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
    draft: Path | None = None
    """A smaller model with the same tokens, which proposes what the model then checks: faster."""
    draft_tokens: int = 4
    """How many tokens the draft proposes at a time."""
    weights_dtype: Literal["bfloat16", "int8"] | None = None
    """Store the weights of linear layers narrower, those of a draft too: less memory, and int8 is
    faster; the text can be another."""
    weights_check: Path | None = None
    """With --weights-dtype, a text on which narrow weights are compared with the model's own; what
    they cost is written to standard error."""
    step: int | None = None
    """Which checkpoint to use; default the newest."""
    best: Switch = False
    """Use the checkpoint with the lowest validation loss."""
    unknown: Literal["error", "skip", "replace"] = "error"
    """What to do with a prompt's characters that the model does not know."""
    dialect: str | None = None
    """Whose names the checkpoint's arrays have; default what it shows."""
    force: Switch = False
    """Take --dialect even where the checkpoint's config is of another model_type."""
    config: Path | None = None
    """The model's settings as JSON, which go before those in the checkpoint."""
    meta: Path | None = None
    """nanoGPT's meta.pkl, or a tokenizer.json; default what lies beside the checkpoint."""
    ignore: tuple[str, ...] = ()
    """Arrays to leave out, by name or pattern ('bert.pooler.*'), and settings without effect."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, and use those that are there."""
    debug: Switch = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature):
            raise ValueError(f"--temperature must be finite: got {self.temperature}")
        if self.temperature > FLOAT32_MAX:
            raise ValueError(f"--temperature must be finite in float32: got {self.temperature}")
        if self.temperature < MIN_VALUE:
            raise ValueError(
                f"--temperature must be at least {MIN_VALUE}: got {self.temperature}; the most "
                "probable token is what --greedy takes"
            )
        counts = ("tokens", "samples", "top_k", "draft_tokens", "rows")
        check_integers(self, *counts)
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1: got {value}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p must be in (0, 1]: got {self.top_p}")
        if self.top_p is not None and self.top_p < MIN_VALUE:
            raise ValueError(f"--top-p must be at least {MIN_VALUE}: got {self.top_p}")
        if not 0 <= self.seed <= 2**63 - self.samples:
            raise ValueError(
                f"--seed must be in [0, 2^63), with one more for each sample: got {self.seed}"
            )
        if self.step is not None and self.best:
            raise ValueError("--step and --best exclude each other")
        if self.prompt and self.prompt_ids:
            raise ValueError("--prompt and --prompt-ids exclude each other")
        others = ("prompt", "prompt_ids", "chat", "draft")
        given = [name for name in others if getattr(self, name)]
        given += ["samples"] if self.samples > 1 else []
        if self.prompts is not None and given:
            raise ValueError(f"--prompts and --{given[0].replace('_', '-')} exclude each other")
        if self.weights_check is not None and self.weights_dtype is None:
            raise ValueError("--weights-check needs --weights-dtype")
        if self.chat and not self.prompt:
            raise ValueError("--chat needs --prompt: the message to the model")
        parse_ids(self.prompt_ids)


def effects(options: SampleOptions) -> list[Effect]:
    """Returns which options have an effect only beside others."""
    chance = ("temperature", "top_k", "top_p")
    return [
        Effect(["rows"], options.prompts is not None, ("without ", Setting("prompts"))),
        Effect(["draft_tokens"], options.draft is not None, ("without ", Setting("draft"))),
        Effect(chance, not options.greedy, ("with ", Setting("greedy"))),
    ]


def parse_ids(text: str) -> list[int]:
    """Returns the ids of ``--prompt-ids 1,2,3``.

    Raises:
        ValueError: they are not numbers, or one is out of its range.
    """
    try:
        ids = [int(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ValueError(f"--prompt-ids must be numbers with commas between: got {text}") from None
    if any(not 0 <= i < 2**31 for i in ids):
        raise ValueError(f"--prompt-ids must be in [0, 2^31): got {text}")
    return ids
