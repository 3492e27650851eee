"""What a run needs of each device: bytes, operations, and what devices send each other."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

from jaxformer.hardware.accelerators import ACCELERATORS, Utilization, find_accelerator
from jaxformer.planning.collectives import Collective, read_collectives
from jaxformer.planning.model import Estimate, estimate
from jaxformer.planning.roofline import Roofline, find_roofline
from jaxformer.planning.targets import Target
from jaxformer.training.config import TrainConfig
from jaxformer.training.experiment import Experiment

# Of a GPU's memory JAX takes this share, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
GPU_SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class ResourceEstimate:
    """What a run needs; bytes are those of one device.

    Attributes:
        source: whether the programs were compiled, or all is a model's estimate.
        devices: how many share the work.
        device_kind: what JAX calls them, or the name of a known accelerator.
        mesh: sizes of its axes.
        parameter_count: how many numbers the model learns.
        parameters: bytes of them.
        moments: bytes of AdamW's.
        corpus: bytes of the text's ids, which lie on the device.
        gradients: bytes of what the update takes, part of ``training``; a model's estimate.
        activations: bytes that a micro-batch keeps for its backward pass, likewise.
        training: bytes set aside for the steps: gradients, activations, all else.
        evaluation: likewise for the evaluation; None where it was not compiled.
        tokens_per_step: of all devices together.
        operations_per_step: likewise, as ``costs.count_training_operations`` counts.
        peak: what all devices can do, in operations per second; None where unknown.
        capacity: bytes that a device has for all of it; None where unknown.
        collectives: of a step, from the compiled program where there is one.
        roofline: how fast a step can be at most, a model's estimate; None for unknown devices.
    """

    source: Literal["compiled", "model"]
    devices: int
    device_kind: str
    mesh: dict[str, int]
    parameter_count: int
    parameters: int
    moments: int
    corpus: int
    gradients: int
    activations: int
    training: int
    evaluation: int | None
    tokens_per_step: int
    operations_per_step: int
    peak: float | None
    capacity: int | None
    collectives: tuple[Collective, ...]
    roofline: Roofline | None

    @property
    def total(self) -> int:
        """Bytes at the peak: what stays, and the larger of the two programs."""
        programs = max(self.training, self.evaluation or 0)
        return self.parameters + self.moments + self.corpus + programs

    def fits(self) -> dict[str, bool]:
        """Which known accelerators have room for it, by name."""
        return {a.name: self.total <= _usable(a.memory, a.pattern) for a in ACCELERATORS}

    @property
    def tokens_per_second(self) -> float | None:
        """At most, of all devices together, by the roofline."""
        seconds = None if self.roofline is None else self.roofline.seconds
        return None if seconds is None else self.tokens_per_step / seconds

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, for JSON."""
        return {
            **dataclasses.asdict(self),
            "collectives": [{**dataclasses.asdict(c), "sent": c.sent} for c in self.collectives],
            "roofline": None if self.roofline is None else self.roofline.to_dict(),
            "tokens_per_second": self.tokens_per_second,
            "total": self.total,
            "fits": self.fits(),
        }


def mesh_sizes(config: TrainConfig, devices: int) -> dict[str, int]:
    """Sizes of the mesh's axes; under ``pmap`` all devices share the batch alone."""
    rest = devices // (config.fsdp * config.tensor)
    return {"data": rest, "fsdp": config.fsdp, "tensor": config.tensor}


def find_needs(
    experiment: Experiment,
    devices: Sequence[jax.Device],
    programs: Mapping[str, Any],
    target: Target | None = None,
) -> ResourceEstimate:
    """What a run needs of each of ``devices``, for which its programs were compiled.

    Args:
        experiment: the run.
        devices: all of one kind.
        programs: ``training`` and perhaps ``evaluation``.
        target: what the devices are, where it is known.
    """
    config = experiment.config
    mesh = mesh_sizes(config, len(devices))
    guess = estimate(config, mesh)
    platform = devices[0].platform
    temporary = {name: temporary_bytes(program, platform) for name, program in programs.items()}
    collectives = read_collectives(programs["training"].as_text(), mesh)
    if target is None:
        accelerator = find_accelerator(devices[0].device_kind)
        target = None if accelerator is None else Target(accelerator, (len(devices),))
    return ResourceEstimate(
        source="compiled",
        devices=len(devices),
        device_kind=devices[0].device_kind,
        training=temporary["training"],
        evaluation=temporary.get("evaluation"),
        peak=Utilization.of(guess.model_operations, devices, config.dtype).peak,
        capacity=_capacity(devices),
        collectives=tuple(collectives),
        roofline=None if target is None else _roofline(config, target, mesh, guess, collectives),
        **_common(experiment, mesh, guess),
    )


def guess_needs(experiment: Experiment, target: Target) -> ResourceEstimate:
    """What a run needs of each device of ``target`` by the model alone."""
    config = experiment.config
    mesh = mesh_sizes(config, target.count)
    guess = estimate(config, mesh)
    peak = target.accelerator.peak(config.dtype, _precision())
    return ResourceEstimate(
        source="model",
        devices=target.count,
        device_kind=target.accelerator.name,
        training=guess.gradients + guess.activations + guess.temporary,
        evaluation=None,
        peak=None if peak is None else peak * target.count,
        capacity=_usable(target.accelerator.memory, target.accelerator.pattern),
        collectives=guess.collectives,
        roofline=_roofline(config, target, mesh, guess, guess.collectives),
        **_common(experiment, mesh, guess),
    )


def _common(experiment: Experiment, mesh: dict[str, int], guess: Estimate) -> dict[str, Any]:
    """What is known of both, by counting."""
    config = experiment.config
    return {
        "mesh": mesh,
        "parameter_count": guess.parameter_count,
        "parameters": guess.parameters,
        "moments": guess.moments,
        "gradients": guess.gradients,
        "activations": guess.activations,
        "corpus": experiment.train_ids.nbytes + experiment.validation_ids.nbytes,
        "tokens_per_step": config.batch_size * config.model.context_length,
        "operations_per_step": guess.model_operations,
    }


def _roofline(
    config: TrainConfig,
    target: Target,
    mesh: Mapping[str, int],
    guess: Estimate,
    collectives: Sequence[Collective],
) -> Roofline:
    return find_roofline(
        target,
        mesh,
        dtype=config.dtype,
        model_operations=guess.model_operations,
        operations=guess.operations,
        traffic=guess.traffic,
        collectives=collectives,
        precision=_precision(),
    )


def _precision() -> str | None:
    precision: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return precision


def temporary_bytes(program: Any, platform: str) -> int:
    """What XLA allocates beside a program's arguments: temporaries, and results of their own.

    TPU's ``temp_size_in_bytes`` counts some arguments of loops once more; its peak is what the
    compiler holds against a chip's memory. Elsewhere the peak leaves out the temporaries.
    """
    memory = program.memory_analysis()
    if platform == "tpu":
        return int(memory.peak_memory_in_bytes - memory.argument_size_in_bytes)
    own = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.temp_size_in_bytes + own)


def _capacity(devices: Sequence[jax.Device]) -> int | None:
    accelerator = find_accelerator(devices[0].device_kind)
    if devices[0].platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
    if devices[0] in jax.local_devices():
        stats = devices[0].memory_stats() or {}
        if "bytes_limit" in stats:
            return int(stats["bytes_limit"])
    return None if accelerator is None else _usable(accelerator.memory, accelerator.pattern)


def _usable(memory: float, pattern: str) -> int:
    return int(memory if pattern.startswith("TPU") else GPU_SHARE * memory)
