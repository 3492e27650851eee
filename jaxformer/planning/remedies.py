"""Settings with which a run that does not fit would fit, found by the model of a step."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

from jaxformer.planning.resources import ResourceEstimate, mesh_sizes
from jaxformer.planning.step_model import estimate_step
from jaxformer.training.config import TrainConfig

Changes = dict[str, Any]


def find_remedy(config: TrainConfig, estimate: ResourceEstimate) -> Changes | None:
    """Returns the fewest settings that make a run fit its devices, or None if none of these do.

    Tried are bfloat16, recomputing activations, more micro-batches, and the model spread over all
    devices; a step stays the same but for rounding. All is an estimate of the model.

    Args:
        config: of the run, with ``model.vocab_size`` set.
        estimate: of the run, whose capacity is known.
    """
    assert estimate.capacity is not None
    for changes in _candidates(config, estimate.devices):
        try:
            changed = dataclasses.replace(config, **changes)
        except ValueError:
            continue
        step = estimate_step(changed, mesh_sizes(changed, estimate.devices))
        if step.total + estimate.corpus <= estimate.capacity:
            return changes
    return None


def _candidates(config: TrainConfig, devices: int) -> Iterator[Changes]:
    """Yields settings to try, those with the fewest changes first."""
    kinds: list[list[Changes]] = []
    if devices > 1 and config.fsdp == config.tensor == 1:
        kinds.append([{"strategy": "mesh", "fsdp": devices}])
    if config.dtype == "float32":
        kinds.append([{"dtype": "bfloat16"}])
    kinds.append([{"remat": way} for way in ("dots", "full") if config.remat in ("none", "dots")])
    shares = devices // config.tensor
    counts = range(config.accumulation + 1, config.batch_size // shares + 1)
    kinds.append([{"accumulation": n} for n in counts if config.batch_size % (n * shares) == 0])
    kinds = [[changes for changes in kind if _differs(config, changes)] for kind in kinds]
    for number in range(1, len(kinds) + 1):
        for chosen in itertools.combinations([kind for kind in kinds if kind], number):
            for changes in itertools.product(*chosen):
                yield {name: value for change in changes for name, value in change.items()}


def _differs(config: TrainConfig, changes: Changes) -> bool:
    return any(getattr(config, name) != value for name, value in changes.items())


def as_flags(changes: Changes) -> str:
    """Returns settings as the command line writes them: ``--remat full --accumulation 4``."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in changes.items())
