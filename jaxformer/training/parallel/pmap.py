"""The step on many devices that each hold the whole model, under ``jax.pmap``.

``jax.pmap`` is in maintenance mode upstream, so it is named in this file alone.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxformer.checkpoints import Arrays
from jaxformer.execution.all_reduce import sum_over
from jaxformer.execution.delayed_draws import draw_arrays
from jaxformer.train_step import TrainState
from jaxformer.training.parallel.device_loop import PARTS_ON_CPU
from jaxformer.training.parallel.devices import check_batch_size
from jaxformer.training.parallel.step_spec import StepSpec
from jaxformer.training.parallel.strategy import PlannedParameters, Strategy, place_array
from jaxformer.training.state_arrays import to_arrays

AXIS = "data"
# Of one call and device on a CPU, a second or two; and rounds of a large model. After a call the
# devices wait for each other, and the next one gets fresh memory, which takes time to clear.
OPERATIONS_OF_EVALUATION, FEWEST_ROUNDS = 4 * 10**11, 2


class PmapStrategy(Strategy):
    """Every device holds all parameters and takes its share of each batch.

    What it places has a leading axis over devices.

    Args:
        spec: the model and its step.
        devices: those of all processes; default all of this process.

    Raises:
        DeviceError: the batch does not divide over the devices and micro-batches.
    """

    _parts_on_cpu = PARTS_ON_CPU

    def __init__(self, spec: StepSpec, devices: Sequence[jax.Device] | None = None):
        devices = list(jax.local_devices() if devices is None else devices)
        check_batch_size(spec.batch_size, spec.accumulation, len(devices))
        axis_name = AXIS if len(devices) > 1 else None
        super().__init__(spec, devices, shards=len(devices), axis_name=axis_name)
        self._mesh = Mesh(np.asarray(devices), (AXIS,))

        def evaluate(*arguments: Any) -> Array:
            total: Array = sum_over(self.loop.evaluate_windows(*arguments), AXIS)
            return total

        mapped = functools.partial(jax.pmap, axis_name=AXIS, devices=self.devices)
        self._steps = mapped(self.loop.run_steps, in_axes=(0, 0, 2, None), donate_argnums=0)
        self._evaluate = mapped(evaluate, in_axes=(0, 0, 1, 1))

    @property
    def description(self) -> str:
        """See ``Strategy``."""
        return f"{len(self.devices)} x pmap"

    def place(self, tree: Any) -> Any:
        """Places the same values on every device, with a leading axis over devices."""
        count = len(self.devices)

        def replicate(x: Any) -> Array:
            x = np.asarray(x)
            copies = np.broadcast_to(x[None], (count, *x.shape))
            return place_array(copies, self._input_sharding(0))

        return jax.tree.map(replicate, tree)

    def initial_state(self, planned: PlannedParameters) -> TrainState:
        """See ``Strategy``; parameters are drawn on one device."""
        parameters = draw_arrays(planned)
        # In one program: each shape of a moment would be one.
        create = jax.jit(
            lambda parameters: TrainState.create(parameters, self.spec.optimizer).optimizer_state
        )
        placed: TrainState = self.place(TrainState(parameters, create(parameters), jnp.int32(0)))
        return placed

    def place_tokens(self, ids: Int[np.ndarray, "C"]) -> Array:
        """See ``Strategy``."""
        placed: Array = self.place(ids)
        return placed

    def fetch(self, tree: Any) -> Any:
        """Returns one copy of what lies on every device, as numpy arrays."""
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

    def _most_rounds(self, batch_size: int) -> int:
        if self.devices[0].platform != "cpu":
            return 1
        numbers = sum(math.prod(shape.shape) for shape in self.spec.shapes.values())
        operations = 2 * numbers * batch_size * self.spec.context_length
        return max(FEWEST_ROUNDS, OPERATIONS_OF_EVALUATION // operations)

    def _window_shape(self, count: int) -> tuple[int, ...]:
        return (len(self.devices), count // len(self.devices))

    def _input_sharding(self, axis: int | None) -> NamedSharding:
        spec = () if axis is None else (*[None] * axis, AXIS)
        return NamedSharding(self._mesh, PartitionSpec(*spec))
