"""The resources that a run takes of each device: memory, operations, traffic between devices."""

import dataclasses
import os
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from jaxformer.hardware.accelerators import ACCELERATORS, Utilization, find_accelerator
from jaxformer.planning.collectives import Collective, read_collectives
from jaxformer.planning.roofline import Roofline, find_roofline
from jaxformer.planning.step_model import StepEstimate, estimate_step
from jaxformer.planning.topologies import Topology
from jaxformer.training.config import TrainConfig
from jaxformer.training.experiment import Experiment

# Of a GPU's memory JAX takes this share, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
GPU_SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class ResourceEstimate:
    """The resources that a run takes; bytes are those of one device.

    Attributes:
        source: "compiled" where XLA gave the sizes of programs, "model" where all is estimated.
        devices: how many share the work.
        device_kind: JAX's name for them, or the name of a known accelerator.
        mesh: sizes of its axes.
        parameter_count: how many numbers the model learns.
        active_count: those of them that compute a token: of experts, the chosen ones.
        parameters: bytes of the parameters.
        optimizer: the optimizer's name, for people.
        moments: bytes of what it keeps.
        corpus: bytes of the text's ids, which are kept on the device.
        gradients: bytes of the gradients, part of ``training``; always a model's estimate.
        activations: bytes that a micro-batch keeps for its backward pass, part of ``training``;
            always a model's estimate.
        training: temporary bytes of the training program: gradients, activations and the rest.
        evaluation: temporary bytes of the evaluation; None where it was not compiled.
        tokens_per_step: over all devices; of pairs those of sources too.
        operations_per_step: over all devices, as ``costs.count_training_operations`` counts.
        peak: of all devices together, in operations per second; None where unknown.
        capacity: bytes that a device has to offer; None where unknown.
        collectives: of a step, from the compiled program where there is one.
        roofline: the shortest time of a step, a model's estimate; None for unknown devices.
        process: bytes of a CPU that this process took for Python, JAX and compiling, as one that
            trains does beside its devices' arrays; None where devices have memory of their own, or
            it is unknown.
        remedy: of a run that does not fit, settings with which it would; None if none were found.
    """

    source: Literal["compiled", "model"]
    devices: int
    device_kind: str
    mesh: dict[str, int]
    parameter_count: int
    active_count: int
    parameters: int
    optimizer: str
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
    process: int | None = None
    remedy: dict[str, Any] | None = None

    @property
    def total(self) -> int:
        """Bytes at the peak: what stays, and the temporary bytes of the larger program."""
        programs = max(self.training, self.evaluation or 0)
        return self.parameters + self.moments + self.corpus + programs

    @property
    def fits_here(self) -> bool:
        """Whether the devices of the run have room for it; True where that is unknown."""
        return self.capacity is None or self.total <= self.capacity

    def fits(self) -> dict[str, bool]:
        """Returns whether each known accelerator has room for the run, by name."""
        return {a.name: self.total <= _usable(a.memory, a.pattern) for a in ACCELERATORS}

    @property
    def tokens_per_second(self) -> float | None:
        """The highest rate of all devices together, by the roofline; None where unknown."""
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
    """Returns the sizes of the mesh's axes; under ``pmap`` all devices lie along ``data``."""
    rest = devices // (config.fsdp * config.tensor * config.expert)
    experts = {"expert": config.expert} if config.expert > 1 else {}
    return {"data": rest, "fsdp": config.fsdp, **experts, "tensor": config.tensor}


def estimate_from_programs(
    experiment: Experiment,
    devices: Sequence[jax.Device],
    programs: Mapping[str, Any],
    topology: Topology | None = None,
) -> ResourceEstimate:
    """Returns the resources of a run whose programs were compiled for ``devices``.

    Args:
        experiment: the run.
        devices: all of one kind.
        programs: ``training`` and perhaps ``evaluation``.
        topology: of the devices; by default it is found by their kind, if that is known.
    """
    config = experiment.config
    mesh = mesh_sizes(config, len(devices))
    step = estimate_step(config, mesh)
    platform = devices[0].platform
    temporary = {name: temporary_bytes(program, platform) for name, program in programs.items()}
    collectives = read_collectives(programs["training"].as_text(), mesh)
    if topology is None:
        accelerator = find_accelerator(devices[0].device_kind)
        topology = None if accelerator is None else Topology(accelerator, (len(devices),))
    return ResourceEstimate(
        source="compiled",
        devices=len(devices),
        device_kind=devices[0].device_kind,
        training=temporary["training"],
        evaluation=temporary.get("evaluation"),
        peak=Utilization.of(step.model_operations, devices, config.dtype).peak,
        capacity=_capacity(devices),
        collectives=tuple(collectives),
        roofline=None if topology is None else _roofline(config, topology, mesh, step, collectives),
        process=_resident_bytes() if platform == "cpu" else None,
        **_counted(experiment, mesh, step),
    )


def estimate_from_model(experiment: Experiment, topology: Topology) -> ResourceEstimate:
    """Returns the resources of a run on a topology, estimated without compiling anything."""
    config = experiment.config
    mesh = mesh_sizes(config, topology.count)
    step = estimate_step(config, mesh)
    peak = topology.accelerator.peak(config.dtype, _precision())
    return ResourceEstimate(
        source="model",
        devices=topology.count,
        device_kind=topology.accelerator.name,
        training=step.gradients + step.activations + step.temporary,
        evaluation=None,
        peak=None if peak is None else peak * topology.count,
        capacity=_usable(topology.accelerator.memory, topology.accelerator.pattern),
        collectives=step.collectives,
        roofline=_roofline(config, topology, mesh, step, step.collectives),
        **_counted(experiment, mesh, step),
    )


def _counted(experiment: Experiment, mesh: dict[str, int], step: StepEstimate) -> dict[str, Any]:
    """Returns the fields that are counted, whether or not programs were compiled."""
    config = experiment.config
    return {
        "mesh": mesh,
        "parameter_count": step.parameter_count,
        "active_count": step.active_count,
        "parameters": step.parameters,
        "optimizer": config.optimizer.kind.title,
        "moments": step.moments,
        "gradients": step.gradients,
        "activations": step.activations,
        "corpus": getattr(experiment.train_ids, "nbytes", 0)
        + sum(getattr(one.ids, "nbytes", 0) for one in experiment.validation),
        "tokens_per_step": config.batch_size * config.tokens_per_row,
        "operations_per_step": step.model_operations,
    }


def _roofline(
    config: TrainConfig,
    topology: Topology,
    mesh: Mapping[str, int],
    step: StepEstimate,
    collectives: Sequence[Collective],
) -> Roofline:
    return find_roofline(
        topology,
        mesh,
        dtype=config.dtype,
        model_operations=step.model_operations,
        operations=step.operations,
        traffic=step.traffic,
        collectives=collectives,
        precision=_precision(),
    )


def _precision() -> str | None:
    precision: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return precision


def temporary_bytes(program: Any, platform: str) -> int:
    """Returns the bytes that XLA allocates beside a program's arguments: temporaries and results.

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


def _resident_bytes() -> int | None:
    """Returns the bytes of this process that are in memory; None where there is no Linux to ask."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return None
    return int(pages) * resource.getpagesize()


def _usable(memory: float, pattern: str) -> int:
    return int(memory if pattern.startswith("TPU") else GPU_SHARE * memory)
