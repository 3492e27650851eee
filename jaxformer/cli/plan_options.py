"""The settings of ``jaxformer plan``, free of JAX."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from jaxformer.cli.train_options import Switch
from jaxformer.training.config import TrainConfig
from jaxformer.training.presets import PRESETS


@dataclass(frozen=True)
class PlanOptions:
    """Say what a training run would take, without making it: memory, operations, where it fits.

    The step and the evaluation are compiled, and nothing is computed. Settings are those of
    jaxformer train.
    """

    config: tyro.conf.OmitArgPrefixes[TrainConfig]
    preset: Annotated[str, tyro.conf.arg(metavar="|".join(PRESETS))] = "nano"
    """Where the settings below come from."""
    topology: str | None = None
    """Devices that need not be here: a TPU slice (v5e:2x2, v5p:2x2x1, v6e:4x4), for which the steps
    are compiled (needs the extra tpu), or GPUs (H100:8), which are reckoned with by a model."""
    model_only: Switch = False
    """With --topology: compile nothing, and reckon with a TPU slice by the model too."""
    json: Switch = False
    """Print the numbers as JSON."""
    download: Switch = False
    """Fetch tiny-shakespeare (1.1 MB, its SHA-256 is pinned) if it is not on this machine."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, and use those that are there."""
    debug: Switch = False
    """Show the traceback of an error."""
