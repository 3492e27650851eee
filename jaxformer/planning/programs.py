"""The programs of a run, compiled from shapes alone: no array is allocated."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import topologies

from jaxformer.char_data import evaluation_windows
from jaxformer.errors import DeviceError
from jaxformer.execution.attention_backends import CompilationTarget, compiled_for
from jaxformer.hardware.invocation import install
from jaxformer.training.experiment import Experiment
from jaxformer.training.parallel import StepSpec, Strategy, make_strategy


def compile_training(experiment: Experiment, devices: Sequence[jax.Device]) -> Any:
    """Returns the compiled loop of training steps, the same that ``train`` runs.

    Raises:
        DeviceError: the mesh or the batch does not divide over the devices.
    """
    return _compile_steps(experiment, _make_strategy(experiment, devices))


def compile_run(experiment: Experiment, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Returns the compiled ``training`` loop and ``evaluation`` of a run on local devices.

    Without a validation set the evaluation is of a full batch.

    Raises:
        DeviceError: the mesh or the batch does not divide over the devices.
    """
    strategy = _make_strategy(experiment, devices)
    batch_size = strategy.evaluation_batch_size
    windows, corpus = len(devices) * batch_size, None
    for first in experiment.validation[:1]:
        if first.rows is None or first.rows.stride > 1:
            windows = len(evaluation_windows(first.tokens, experiment.config.window)[0])
        else:
            windows = len(first.rows)
        corpus = None if first.ids is None else len(first.ids)
    parameters = strategy.spec.state_shapes().parameters
    shapes = strategy.evaluation_shapes(parameters, corpus, windows, batch_size)
    return {
        "training": _compile_steps(experiment, strategy),
        "evaluation": strategy.compile_evaluation(*shapes),
    }


def _make_strategy(experiment: Experiment, devices: Sequence[jax.Device]) -> Strategy:
    config = experiment.config
    return make_strategy(config, StepSpec.from_config(config, experiment.row), devices)


def _compile_steps(experiment: Experiment, strategy: Strategy) -> Any:
    corpus = None if experiment.train_ids is None else len(experiment.train_ids)
    steps = experiment.config.steps_per_call
    shapes = strategy.step_shapes(strategy.spec.state_shapes(), corpus, steps)
    return strategy.compile_steps(*shapes)


def describe_tpu_slice(name: str) -> Any:
    """Returns the TPU slice of a name, as ``jax.experimental.topologies`` describes it.

    Raises:
        DeviceError: libtpu is not installed or knows no such slice.
    """
    # Where there is no TPU, libtpu otherwise asks the network what machine this is.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name)
    except RuntimeError as error:
        if "not installed" in str(error):
            raise DeviceError(f"--topology {name} needs libtpu: {install('tpu')}") from None
        reason = str(error).strip().splitlines()[0]
        raise DeviceError(f"--topology {name}: {reason}; such as v5e:2x2 or v5p:2x2x1") from error


def compile_for_topology(experiment: Experiment, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """Returns the loop of training steps, compiled ahead of time for the devices of a topology.

    ``pmap`` cannot be compiled for devices that are not here. A mesh with the axis ``data`` alone
    replaces it: every device has the same arrays, except that it computes all of its logits at
    once (``chunked_loss``).

    Raises:
        DeviceError: the batch does not divide over the devices.
    """
    config = dataclasses.replace(experiment.config, strategy="mesh")
    experiment = dataclasses.replace(experiment, config=config)
    with compiled_for(CompilationTarget.of(devices[0])):
        return {"training": compile_training(experiment, devices)}
