"""The programs of a run, compiled from shapes alone."""

import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jaxformer.char_data import evaluation_windows
from jaxformer.errors import DeviceError
from jaxformer.parameters import abstract
from jaxformer.train_step import Definition, TrainState, train_step
from jaxformer.training.experiment import Experiment, compute_dtype, data_parallel, uses_dropout
from jaxformer.training.strategies import check_batch_size
from jaxformer.transformer_lm import TransformerLM


def abstract_state(experiment: Experiment) -> tuple[Definition, TrainState]:
    """A model's definition, and the shapes of its training state."""
    model = experiment.config.model
    definition, parameters = abstract(lambda: TransformerLM(model, rngs=nnx.Rngs(0)))
    create = functools.partial(TrainState.create, optimizer=experiment.optimizer)
    return definition, jax.eval_shape(create, parameters)


def compile_run(experiment: Experiment, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """The compiled loop of training steps and evaluation of a run on local devices, by name.

    Raises:
        DeviceError: the batch does not divide over the devices.
    """
    config, count = experiment.config, len(devices)
    definition, state = abstract_state(experiment)
    parallel = data_parallel(experiment, definition, devices)

    def replicated(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), tree)

    share = config.batch_size // config.accumulation // count
    starts = (max(2, config.steps_per_call), config.accumulation, count, share)
    training = parallel.compile_steps(
        replicated(state),
        replicated(experiment.train_ids),
        jax.ShapeDtypeStruct(starts, np.int32),
        jax.ShapeDtypeStruct((), np.int32),
    )
    windows, mask = evaluation_windows(len(experiment.validation_ids), config.model.context_length)
    batch = min(config.eval_batch_size, -(-len(windows) // count))
    evaluation = parallel.compile_evaluation(
        replicated(state.parameters),
        replicated(experiment.validation_ids),
        jax.ShapeDtypeStruct((count, batch), np.int32),
        jax.ShapeDtypeStruct((count, batch, mask.shape[1]), np.bool_),
    )
    return {"training": training, "evaluation": evaluation}


def describe_topology(name: str) -> Any:
    """The TPU slice of that name, as ``jax.experimental.topologies`` describes it.

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
            raise DeviceError(
                f"--topology {name} needs libtpu: pip install 'jaxformer[tpu]'"
            ) from None
        reason = str(error).strip().splitlines()[0]
        raise DeviceError(f"--topology {name}: {reason}; such as v5e:2x2 or v5p:2x2x1") from error


def compile_for_topology(experiment: Experiment, topology: Any) -> dict[str, Any]:
    """The training step, data-parallel over the devices of a topology, compiled ahead of time.

    Raises:
        DeviceError: the batch does not divide over the devices.
    """
    config = experiment.config
    check_batch_size(config.batch_size, config.accumulation, len(topology.devices))
    definition, state = abstract_state(experiment)
    mesh = topologies.make_mesh(topology, (len(topology.devices),), ("data",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec(None, "data"))
    step = functools.partial(
        train_step,
        definition=definition,
        optimizer=experiment.optimizer,
        compute_dtype=compute_dtype(config),
    )
    shape = (config.accumulation, config.batch_size // config.accumulation)
    tokens = jax.ShapeDtypeStruct((*shape, config.model.context_length), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0)) if uses_dropout(config.model) else None
    compiled = jax.jit(
        step,
        in_shardings=(everywhere, split, everywhere),
        out_shardings=everywhere,
        donate_argnums=0,
    )
    return {"training": compiled.lower(state, (tokens, tokens), key).compile()}
