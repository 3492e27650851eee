"""The step on many devices that each hold the whole model, under ``jax.pmap``.

``jax.pmap`` is in maintenance mode upstream, so it is named in this file alone.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxformer.checkpoints import Arrays
from jaxformer.config import OptimizerConfig
from jaxformer.execution.all_reduce import sum_over
from jaxformer.parameters import Parameters
from jaxformer.train_step import Definition, TrainState
from jaxformer.training.parallel.device_counts import check_batch_size
from jaxformer.training.parallel.strategy import Strategy, put
from jaxformer.training.states import to_arrays

AXIS = "data"


class DataParallel(Strategy):
    """Every device holds all parameters and takes its share of each batch.

    What it holds has a leading axis over devices. Arguments as in ``Strategy``.

    Raises:
        DeviceError: batch_size does not divide over the devices and micro-batches.
    """

    def __init__(
        self,
        definition: Definition,
        optimizer: OptimizerConfig,
        *,
        shapes: Mapping[str, Any],
        seed: int,
        batch_size: int,
        accumulation: int = 1,
        context_length: int,
        compute_dtype: jnp.dtype | None = None,
        uses_dropout: bool = True,
        devices: Sequence[jax.Device] | None = None,
    ):
        devices = list(jax.local_devices() if devices is None else devices)
        check_batch_size(batch_size, accumulation, len(devices))
        super().__init__(
            definition,
            optimizer,
            shapes=shapes,
            seed=seed,
            batch_size=batch_size,
            accumulation=accumulation,
            context_length=context_length,
            compute_dtype=compute_dtype,
            uses_dropout=uses_dropout,
            devices=devices,
            parts=len(devices),
            axis_name=AXIS if len(devices) > 1 else None,
        )
        self._mesh = Mesh(np.asarray(devices), (AXIS,))

        def evaluate(*arguments: Any) -> Array:
            total: Array = sum_over(self.loop.evaluate_windows(*arguments), AXIS)
            return total

        mapped = functools.partial(jax.pmap, axis_name=AXIS, devices=self.devices)
        self._steps = mapped(self.loop.run_steps, in_axes=(0, 0, 2, None), donate_argnums=0)
        self._evaluate = mapped(evaluate, in_axes=(0, 0, 0, 0))

    def place(self, tree: Any) -> Any:
        """The same values on every device, with a leading axis over devices."""
        count = len(self.devices)

        def one(x: Any) -> Array:
            x = np.asarray(x)
            return put(np.broadcast_to(x[None], (count, *x.shape)), self._split(0))

        return jax.tree.map(one, tree)

    def initial_state(self, draw: Callable[[], Parameters]) -> TrainState:
        """See ``Strategy``; drawn on one device."""
        placed: TrainState = self.place(TrainState.create(jax.jit(draw)(), self.optimizer))
        return placed

    def place_tokens(self, ids: Int[np.ndarray, "C"]) -> Array:
        """See ``Strategy``."""
        placed: Array = self.place(ids)
        return placed

    def fetch(self, tree: Any) -> Any:
        """One copy of what lies on every device, as numpy arrays."""
        return jax.tree.map(lambda x: np.asarray(x.addressable_shards[0].data)[0], tree)

    def state_arrays(self, state: TrainState) -> Arrays:
        """See ``Strategy``; numpy arrays."""
        for x in jax.tree.leaves(state):
            x.addressable_shards[0].data.copy_to_host_async()
        return to_arrays(self.fetch(state))

    def abstract(self, tree: Any) -> Any:
        """See ``Strategy``."""
        count = len(self.devices)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((count, *x.shape), x.dtype), tree)

    def _rows(self, count: int) -> tuple[int, ...]:
        return (len(self.devices), count // len(self.devices))

    def _split(self, axis: int | None) -> NamedSharding:
        spec = () if axis is None else (*[None] * axis, AXIS)
        return NamedSharding(self._mesh, PartitionSpec(*spec))
