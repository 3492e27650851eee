"""The settings of ``jaxformer train`` and ``jaxformer sample``, free of JAX."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxformer.training.config import TrainConfig
from jaxformer.training.presets import PRESETS

# A flag without its --no- twin, which only settings that a preset may switch on need.
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True)
class ProcessOptions:
    """Which process of how many this is; see docs/hosts.md."""

    coordinator: str | None = None
    """HOST:PORT at which process 0 awaits the others; the same for all of them."""
    num_processes: int | None = None
    """How many processes train together, each with its own devices."""
    process_id: int | None = None
    """Which of them this is, from 0."""
    distributed: Switch = False
    """Let JAX find the three settings above: SLURM, Open MPI, Kubernetes, Cloud TPU."""
    connect_timeout: int = 300
    """Seconds to wait for all processes at the start."""
    peer_timeout: int = 100
    """Seconds after which a process that does not answer is lost: all others then end."""

    def __post_init__(self) -> None:
        given = {
            "--coordinator": self.coordinator,
            "--num-processes": self.num_processes,
            "--process-id": self.process_id,
        }
        missing = [flag for flag, value in given.items() if value is None]
        if self.distributed and len(missing) < 3:
            raise ValueError(
                f"--distributed finds {', '.join(given)} by itself: leave out one or the others"
            )
        if 0 < len(missing) < 3:
            raise ValueError(
                f"{' and '.join(given)} go together: {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} missing"
            )
        for flag, seconds in (
            ("--connect-timeout", self.connect_timeout),
            ("--peer-timeout", self.peer_timeout),
        ):
            if not 1 <= seconds <= 86400:
                raise ValueError(f"{flag} must be in [1, 86400] s: got {seconds}")
        if self.coordinator is None or self.num_processes is None or self.process_id is None:
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"--coordinator must be HOST:PORT: got {self.coordinator}")
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"--process-id must be in [0, {self.num_processes}), the number of processes: got "
                f"{self.process_id}"
            )

    @property
    def several(self) -> bool:
        """Whether this process is told of others."""
        return self.distributed or self.coordinator is not None


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
    cast: Switch = False
    """Change a checkpoint's arrays to the dtypes that training keeps; says what that rounds."""
    download: Switch = False
    """Fetch tiny-shakespeare (1.1 MB, its SHA-256 is pinned) if it is not on this machine."""
    tracker: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Metrics services to write to, beside metrics.jsonl."""
    profile: int | None = None
    """Write a trace of this many steps, after warm-up, into the run's folder."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, and use those that are there."""
    processes: tyro.conf.OmitArgPrefixes[ProcessOptions] = ProcessOptions()
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
        from jaxformer.cli.sample import check

        check(self)
