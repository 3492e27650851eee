"""One training step on several devices: compiled, fed and evaluated.

In go a ``StepSpec`` (what a step computes) and devices; out comes a ``Strategy``, whose ``train``
makes steps and whose ``evaluate`` gives a mean loss. The numbers do not depend on the strategy,
but for the order of sums.

- ``step_spec``: the model and the settings of its step, built once from a ``TrainConfig``.
- ``devices``: which devices a run uses, and whether its mesh and batch divide over them.
- ``device_loop``: what runs on the devices: a loop of steps, and an evaluation's sums.
- ``strategy``: what all strategies share.
- ``pmap``: every device holds the whole model, under ``jax.pmap``.
- ``mesh``: devices share model and batch, under ``jax.jit``.
- ``mesh_layout``: a model's arrays on a mesh, while it is traced.
- ``sharding_rules``: which dimension of which parameter lies along which axis of the mesh.
"""

from collections.abc import Sequence

import jax

from jaxformer.training.config import TrainConfig
from jaxformer.training.parallel.mesh import MeshStrategy
from jaxformer.training.parallel.pmap import PmapStrategy
from jaxformer.training.parallel.step_spec import StepSpec
from jaxformer.training.parallel.strategy import Strategy

__all__ = ["MeshStrategy", "PmapStrategy", "StepSpec", "Strategy", "make_strategy"]


def make_strategy(config: TrainConfig, spec: StepSpec, devices: Sequence[jax.Device]) -> Strategy:
    """Returns the strategy that ``config.strategy`` names, on ``devices`` of all processes.

    Raises:
        DeviceError: the mesh or the batch does not divide over the devices.
    """
    if config.strategy == "pmap":
        return PmapStrategy(spec, devices)
    return MeshStrategy(spec, devices, fsdp=config.fsdp, tensor=config.tensor, expert=config.expert)
