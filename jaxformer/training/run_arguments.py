"""What starts a run: rules that the command line and the Python API share, free of JAX."""

import os
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from jaxformer.errors import Setting, UsageError
from jaxformer.training.config import TrainConfig


class Effect(NamedTuple):
    """When some settings have an effect.

    Attributes:
        settings: their names.
        is_there: whether the other settings give them one.
        lack: parts of a message: what else they have none, such as "without --lora-rank".
    """

    settings: Sequence[str]
    is_there: bool
    lack: Sequence[str | Setting]


def check_effects(given: Collection[str], effects: Iterable[Effect]) -> None:
    """Rejects settings that are given and have no effect.

    Args:
        given: their names.
        effects: when they have one.

    Raises:
        UsageError: one has none.
    """
    for settings, is_there, lack in effects:
        for name in settings:
            if name in given and not is_there:
                raise UsageError(Setting(name), " has no effect ", *lack)


def training_effects(config: TrainConfig) -> list[Effect]:
    """Returns which settings of a run have an effect only beside others."""
    from jaxformer.data.corpora import NAMES

    adapters = ("lora_alpha", "lora_targets", "lora_dropout")
    is_adapted = config.model.lora.lora_rank is not None
    is_file = not config.data_is_tokens and config.data not in NAMES
    schedule, optimizer = config.optimizer.schedule, config.optimizer.optimizer
    ends = ("min_learning_rate", "decay_steps")
    constant = Setting("schedule", value="constant")
    averages = Setting("optimizer", value="adamw, muon or lion")
    return [
        Effect(adapters, is_adapted, ("without ", Setting("lora_rank"))),
        Effect(["decay_share"], schedule == "wsd", ("but with ", Setting("schedule", value="wsd"))),
        Effect(ends, schedule != "constant", ("with ", constant)),
        Effect(["beta1", "beta2"], optimizer in ("adamw", "muon", "lion"), ("but with ", averages)),
        Effect(
            ["eps"],
            optimizer in ("adamw", "muon"),
            ("but with ", Setting("optimizer", value="adamw or muon")),
        ),
        Effect(["encoding"], is_file, ["but on a text file"]),
    ]


def check_companions(
    *,
    is_warm: bool,
    resume: bool,
    fresh_optimizer: bool = False,
    meta: object = None,
    ignore: object = (),
    cast: bool = False,
) -> None:
    """Rejects what goes with a checkpoint to start from, where there is none.

    Args:
        is_warm: whether there is one.
        resume: whether a run is continued.
        fresh_optimizer: see ``jaxformer.train``.
        meta: see there.
        ignore: see there.
        cast: see there.

    Raises:
        UsageError: one of them is given in vain.
    """
    start = Setting("init_from")
    if is_warm:
        return
    if meta is not None:
        raise UsageError(
            Setting("meta"), " goes with ", start, ": a new run has ", Setting("tokenizer")
        )
    for name, value in (("fresh_optimizer", fresh_optimizer), ("ignore", ignore)):
        if value:
            raise UsageError(Setting(name), " goes with ", start)
    if cast and not resume:
        raise UsageError(
            Setting("cast"), " goes with ", start, " or ", Setting("resume"),
            ": a new run has no arrays",
        )  # fmt: skip


def check_out(name: str) -> None:
    """Checks the name of a run's folder, which its files and reports repeat.

    Raises:
        UsageError: it is empty, or no UTF-8.
    """
    if not name:
        raise UsageError(Setting("out"), " must name a folder: got ''")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UsageError(
            Setting("out"), f" must be a name in UTF-8: got {os.fsencode(name)!r}"
        ) from None
