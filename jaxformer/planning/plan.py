"""The plan of a run: its programs compiled for some devices, or estimated, never run."""

import dataclasses
from typing import Any

from jaxformer.data.corpora import Corpus
from jaxformer.data.tokenizers import TokenNumbers
from jaxformer.planning.gpu_topologies import describe_gpus
from jaxformer.planning.programs import compile_for_topology, compile_run, describe_tpu_slice
from jaxformer.planning.remedies import find_remedy
from jaxformer.planning.resources import (
    ResourceEstimate,
    estimate_from_model,
    estimate_from_programs,
)
from jaxformer.planning.topologies import Topology
from jaxformer.porting.data import load_data
from jaxformer.training.config import PairTrainConfig, TrainConfig
from jaxformer.training.experiment import Experiment, WarmStart
from jaxformer.training.memory import check_countable
from jaxformer.training.parallel.devices import check_devices, choose_devices
from jaxformer.training.products import choose_products


def find_plan(
    config: TrainConfig,
    *,
    start: WarmStart | None = None,
    topology: str | None = None,
    model_only: bool = False,
    download: bool = False,
) -> ResourceEstimate:
    """Returns the resources that a training run would take.

    Its programs are compiled for the devices of this machine, or for a TPU slice or GPUs that need
    not be here. Where JAX has no compiler for those, and on request, a model of a step is used.

    Args:
        config: of the run. An encoder and decoder needs no ``data``, see ``_of_pairs``.
        start: what it starts from; its arrays are not used.
        topology: such as ``v5e:2x2`` or ``H100:8``; None stands for this machine.
        model_only: compile nothing for the topology.
        download: see ``load_data``.

    Raises:
        JaxformerError: one of its kinds, for whatever training would reject before its first step.
    """
    wanted = None if topology is None else Topology.parse(topology)
    if topology is None or wanted is None:
        devices: list[Any] = list(choose_devices(config))
    else:
        check_devices(config, wanted.count)
        devices = [] if model_only else _abstract_devices(topology, wanted)
    if isinstance(config, PairTrainConfig) and config.data == TrainConfig.data:
        experiment = _of_pairs(config)
    else:
        corpus = load_data(config, download=download)
        experiment = Experiment.prepare(config, corpus, start=start)
    check_countable(experiment.config)
    if wanted is not None and not devices:
        estimate = estimate_from_model(experiment, wanted)
    else:
        config, _ = choose_products(experiment.config, devices)
        experiment = dataclasses.replace(experiment, config=config)
        with experiment.execution_settings():
            compiled = compile_run if wanted is None else compile_for_topology
            programs = compiled(experiment, devices)
        estimate = estimate_from_programs(experiment, devices, programs, wanted)
    if estimate.fits_here:
        return estimate
    return dataclasses.replace(estimate, remedy=find_remedy(experiment.config, estimate))


def _abstract_devices(name: str, topology: Topology) -> list[Any]:
    """Returns devices that can be compiled for; none where JAX has no compiler for them here."""
    described = describe_tpu_slice(name) if topology.is_tpu else describe_gpus(topology)
    return [] if described is None else list(described.devices)


def _of_pairs(config: PairTrainConfig) -> Experiment:
    """A run of pairs of which the lengths alone are known: those of the settings.

    Rows are read from the disk, and so none lies on a device.
    """
    tokenizer = TokenNumbers(config.model.target_vocab_size)
    return Experiment(config, Corpus("pairs", "", ""), tokenizer, None, None, (), "pairs")
