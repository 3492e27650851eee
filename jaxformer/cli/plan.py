"""``jaxformer plan``: options, and an estimate printed as a table or as JSON."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from jaxformer.cli.arguments import (
    Preset,
    Switch,
    given_names,
    join_mixture,
    parse,
    read_settings,
)
from jaxformer.cli.starting import read_start
from jaxformer.errors import DoesNotFitError
from jaxformer.training.config import PairTrainConfig, TrainConfig
from jaxformer.training.run_arguments import check_effects, training_effects

if TYPE_CHECKING:
    from jaxformer.planning.resources import ResourceEstimate


@dataclass(frozen=True)
class PlanOptions:
    """Estimate what a training run takes, without training: memory, operations, where it fits.

    The step and the evaluation are compiled, and nothing is computed. Settings are those of
    jaxformer train.
    """

    config: tyro.conf.OmitArgPrefixes[TrainConfig]
    preset: Preset = "nano"
    """Where the settings below come from."""
    config_file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """A TOML file with settings, see jaxformer train."""
    init_from: Path | None = None
    """Plan a run that starts from the model in a checkpoint, see jaxformer train. Its weights are
    not read. An encoder and decoder needs no --data: rows are then as long as --block-size and
    --source-length say, by default the model's context."""
    fresh_optimizer: Switch = False
    """With --init-from: plan a run that begins at step 0."""
    meta: Path | None = None
    """With --init-from: nanoGPT's meta.pkl, or a tokenizer.json; default what lies beside it."""
    ignore: tuple[str, ...] = ()
    """With --init-from: arrays to leave out, by name or pattern, and settings without effect."""
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


@dataclass(frozen=True)
class PairPlanOptions(PlanOptions):
    """Estimate what training an encoder and decoder takes, without training it.

    The step and the evaluation are compiled, and nothing is computed. Settings are those of
    jaxformer train --init-from.
    """

    config: tyro.conf.OmitArgPrefixes[PairTrainConfig]


def run(arguments: Sequence[str]) -> None:
    """Prints the resources that a training run would take.

    Raises:
        DoesNotFitError: after the estimate is printed, if the devices have no room for the run.
        JaxformerError: one of its kinds, for whatever training would reject before its first step.
    """
    arguments = join_mixture(arguments)
    start, config = read_start(arguments, read_settings(arguments), with_arrays=False)
    default = (
        PairPlanOptions(config=config)
        if isinstance(config, PairTrainConfig)
        else PlanOptions(config=config)
    )
    options: PlanOptions = parse(type(default), "jaxformer plan", arguments, default)
    check_effects(given_names(arguments), training_effects(options.config))

    from jaxformer.hardware.compilation_cache import use_compilation_cache
    from jaxformer.planning.plan import find_plan
    from jaxformer.planning.table import print_table

    use_compilation_cache(options.compilation_cache)
    estimate = find_plan(
        options.config,
        start=start,
        topology=options.topology,
        model_only=options.model_only,
        download=options.download,
    )
    if options.json:
        print(json.dumps(estimate.to_dict(), indent=1))
    else:
        print_table(estimate)
    _check_room(estimate)


def _check_room(estimate: "ResourceEstimate") -> None:
    """Rejects a run for which its devices have no room, with the flags that would change that."""
    if estimate.fits_here:
        return
    from jaxformer.hardware.units import format_memory
    from jaxformer.planning.remedies import as_flags

    assert estimate.capacity is not None
    advice = (
        "no --remat, --accumulation, --dtype or --fsdp makes it fit: use more or larger devices, "
        "or a smaller model"
        if estimate.remedy is None
        else f"by a model's estimate it fits with {as_flags(estimate.remedy)}"
    )
    raise DoesNotFitError(
        f"the run does not fit: it needs {format_memory(estimate.total)} of each device, which "
        f"has {format_memory(estimate.capacity)}; {advice}",
        estimate.total,
        estimate.capacity,
    )
