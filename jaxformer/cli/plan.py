"""``jaxformer plan``: options, and an estimate printed as a table or as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from jaxformer.cli.arguments import Preset, Switch, parse, preset_name
from jaxformer.training.config import TrainConfig
from jaxformer.training.presets import PRESETS


@dataclass(frozen=True)
class PlanOptions:
    """Estimate what a training run takes, without training: memory, operations, where it fits.

    The step and the evaluation are compiled, and nothing is computed. Settings are those of
    jaxformer train.
    """

    config: tyro.conf.OmitArgPrefixes[TrainConfig]
    preset: Preset = "nano"
    """Where the settings below come from."""
    topology: str | None = None
    """Devices that need not be here: a TPU slice (v5e:2x2, v5p:2x2x1, v6e:4x4), for which the steps
    are compiled (needs the extra tpu), or GPUs (H100:8), which are estimated by a model."""
    model_only: Switch = False
    """With --topology: compile nothing, and estimate a TPU slice by the model too."""
    json: Switch = False
    """Print the numbers as JSON."""
    download: Switch = False
    """Fetch tiny-shakespeare (1.1 MB, its SHA-256 is pinned) if it is not on this machine."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, and use those that are there."""
    debug: Switch = False
    """Show the traceback of an error."""


def run(arguments: Sequence[str]) -> None:
    """Prints the resources that a training run would take.

    Raises:
        JaxformerError: one of its kinds, for whatever training would reject before its first step.
    """
    default = PlanOptions(config=PRESETS[preset_name(arguments)]())
    options: PlanOptions = parse(PlanOptions, "jaxformer plan", arguments, default)

    from jaxformer.hardware.compilation_cache import use_compilation_cache
    from jaxformer.planning.plan import find_plan
    from jaxformer.planning.table import print_table

    use_compilation_cache(options.compilation_cache)
    estimate = find_plan(
        options.config,
        topology=options.topology,
        model_only=options.model_only,
        download=options.download,
    )
    if options.json:
        print(json.dumps(estimate.to_dict(), indent=1))
    else:
        print_table(estimate)
