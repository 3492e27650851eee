"""What a run needs of each device: bytes and operations."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jaxformer.costs import count_training_operations
from jaxformer.planning.programs import abstract_state
from jaxformer.training.devices import ACCELERATORS, Utilization, find_accelerator
from jaxformer.training.experiment import Experiment
from jaxformer.transformer_lm import TransformerLM

# Of a GPU's memory JAX takes this share, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
GPU_SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a data-parallel run needs; bytes are those of one device.

    Attributes:
        devices: how many share the batch.
        device_kind: what JAX calls them; the programs were compiled for these.
        parameter_count: how many numbers the model learns.
        parameters: bytes of them.
        moments: bytes of AdamW's.
        corpus: bytes of the text's ids, which lie on the device; 0 for a TPU slice, where the step
            alone is compiled.
        gradients: bytes of one gradient for each parameter, which are part of ``training``.
        training: bytes that XLA sets aside for the steps: gradients, activations, all else.
        evaluation: likewise for the evaluation; None where it was not compiled.
        tokens_per_step: of all devices together.
        operations_per_step: likewise, as ``costs.count_training_operations`` counts.
        peak: what all devices can do, in operations per second; None where unknown.
        capacity: bytes that a device has for all of it; None where unknown.
    """

    devices: int
    device_kind: str
    parameter_count: int
    parameters: int
    moments: int
    corpus: int
    gradients: int
    training: int
    evaluation: int | None
    tokens_per_step: int
    operations_per_step: int
    peak: float | None
    capacity: int | None

    @property
    def total(self) -> int:
        """Bytes at the peak: what stays, and the larger of the two programs."""
        programs = max(self.training, self.evaluation or 0)
        return self.parameters + self.moments + self.corpus + programs

    def fits(self) -> dict[str, bool]:
        """Which known accelerators have room for it, by name."""
        return {a.name: self.total <= _usable(a.memory, a.pattern) for a in ACCELERATORS}

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, for JSON."""
        return {**dataclasses.asdict(self), "total": self.total, "fits": self.fits()}


def find_needs(
    experiment: Experiment, devices: Sequence[jax.Device], programs: Mapping[str, Any]
) -> Needs:
    """What a run needs of each of ``devices``.

    Args:
        experiment: the run.
        devices: all of one kind.
        programs: compiled for them: ``training`` and perhaps ``evaluation``.
    """
    config = experiment.config
    _, state = abstract_state(experiment)
    parameters = _bytes(state.parameters)
    temporary = {name: _temporary_bytes(program) for name, program in programs.items()}
    model = nnx.eval_shape(lambda: TransformerLM(config.model, rngs=nnx.Rngs(0)))
    tokens = config.batch_size * config.model.context_length
    operations = count_training_operations(model, config.model.context_length)
    has_corpus = "evaluation" in programs
    return Needs(
        devices=len(devices),
        device_kind=devices[0].device_kind,
        parameter_count=sum(p.size for p in state.parameters.values()),
        parameters=parameters,
        moments=_bytes(state.optimizer_state),
        corpus=_bytes((experiment.train_ids, experiment.validation_ids)) if has_corpus else 0,
        gradients=parameters,
        training=temporary["training"],
        evaluation=temporary.get("evaluation"),
        tokens_per_step=tokens,
        operations_per_step=tokens * operations,
        peak=Utilization.of(operations, devices, config.dtype).peak,
        capacity=_capacity(devices),
    )


def _bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _temporary_bytes(program: Any) -> int:
    """What XLA allocates beside a program's arguments: temporaries, and results of their own."""
    memory = program.memory_analysis()
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
