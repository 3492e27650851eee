"""The step on a mesh of devices that share model and batch, under ``jax.jit``."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxformer.checkpoints import Arrays
from jaxformer.execution.delayed_draws import draw_arrays
from jaxformer.execution.sharding import layout
from jaxformer.train_step import TrainState
from jaxformer.training.parallel.devices import check_batch_size, check_mesh
from jaxformer.training.parallel.mesh_layout import MeshLayout
from jaxformer.training.parallel.sharding_rules import ACTIVATIONS, AXES, check_rules
from jaxformer.training.parallel.step_spec import StepSpec
from jaxformer.training.parallel.strategy import PlannedParameters, Strategy, place_array
from jaxformer.training.state_arrays import to_arrays


class MeshStrategy(Strategy):
    """Parameters, moments and activations lie on a mesh of devices by the sharding rules.

    Its axes are data, fsdp and tensor, and expert where several devices share the experts.

    The axes are Auto: arrays are global, the program is that of one device, and XLA adds what the
    devices have to send each other.

    Args:
        spec: the model and its step.
        devices: those of all processes; default all.
        fsdp: how many devices hold a part of each matrix, and of the batch.
        tensor: how many share heads and widths.
        expert: how many share the experts.

    Raises:
        DeviceError: fsdp, expert and tensor do not divide the devices, or the batch does not divide
            over data, fsdp, expert and micro-batches.
        ValueError: a parameter has no sharding rule.
    """

    def __init__(
        self,
        spec: StepSpec,
        devices: Sequence[jax.Device] | None = None,
        *,
        fsdp: int = 1,
        tensor: int = 1,
        expert: int = 1,
    ):
        devices = list(jax.devices() if devices is None else devices)
        check_mesh(len(devices), fsdp, tensor, expert)
        check_batch_size(spec.batch_size, spec.accumulation, len(devices), tensor)
        check_rules(spec.shapes)
        super().__init__(spec, devices, shards=len(devices) // tensor)
        rest = len(devices) // (fsdp * tensor * expert)
        sizes = dict(zip(AXES, (rest, fsdp, expert, tensor), strict=True))
        if expert == 1:
            del sizes["expert"]
        self.mesh = jax.make_mesh(
            tuple(sizes.values()),
            tuple(sizes),
            axis_types=(AxisType.Auto,) * len(sizes),
            devices=devices,
        )
        self.layout = MeshLayout(self.mesh)
        self._state_shardings = self._shardings_of(spec.state_shapes())
        whole = self._input_sharding(None)
        self._steps = jax.jit(
            self._with_layout(self.loop.run_steps),
            in_shardings=(self._state_shardings, whole, self._input_sharding(2), whole),
            out_shardings=(self._state_shardings, whole, whole),
            donate_argnums=0,
        )
        self._evaluate = jax.jit(
            self._with_layout(self.loop.evaluate_windows),
            in_shardings=(
                self._state_shardings.parameters,
                whole,
                self._input_sharding(1),
                self._input_sharding(1),
            ),
            out_shardings=whole,
        )

    @property
    def description(self) -> str:
        """See ``Strategy``."""
        sizes = ", ".join(f"{axis} {size}" for axis, size in self.mesh.shape.items())
        return f"{len(self.devices)} x mesh of {sizes}"

    def _with_layout(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, traced with this mesh's layout, or with none on a single device."""

        @functools.wraps(function)
        def traced(*arguments: Any) -> Any:
            with layout(self.layout if len(self.devices) > 1 else None):
                return function(*arguments)

        return traced

    def _constrain(self, state: TrainState) -> TrainState:
        if len(self.devices) == 1:
            return state
        return jax.lax.with_sharding_constraint(state, self._state_shardings)

    def place(self, tree: Any) -> Any:
        """Places parameters and moments of their shapes in parts, all else whole on every device.

        What lies there already is returned as it is.
        """
        return jax.tree.map(place_array, tree, self._shardings_of(tree))

    def initial_state(self, planned: PlannedParameters) -> TrainState:
        """See ``Strategy``; every device draws its own parts."""
        shardings = self._state_shardings.parameters
        drawn = draw_arrays(planned, shardings)
        parameters = {name: place_array(drawn[name], shardings[name]) for name in drawn}
        create = jax.jit(
            lambda parameters: TrainState.create(parameters, self.spec.optimizer).optimizer_state,
            out_shardings=self._state_shardings.optimizer_state,
        )
        step = place_array(np.int32(0), self._state_shardings.step)
        return TrainState(parameters, create(parameters), step)

    def place_tokens(self, ids: Int[np.ndarray, "C"]) -> Array:
        """See ``Strategy``."""
        return place_array(ids, self._input_sharding(None))

    def fetch(self, tree: Any) -> Any:
        """Returns global arrays as numpy arrays, on every process."""

        def fetch_array(x: Array) -> np.ndarray:
            if x.is_fully_addressable:
                return np.asarray(x)
            if x.is_fully_replicated:
                return np.asarray(x.addressable_data(0))
            return np.asarray(multihost_utils.process_allgather(x, tiled=True))

        return jax.tree.map(fetch_array, tree)

    def state_arrays(self, state: TrainState) -> Arrays:
        """See ``Strategy``; global arrays, in the parts that they lie in."""
        return to_arrays(state)

    def shardings(self) -> Arrays:
        """See ``Strategy``."""
        return to_arrays(self._state_shardings)

    def abstract(self, tree: Any) -> Any:
        """See ``Strategy``."""

        def add_sharding(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(add_sharding, tree, self._shardings_of(tree))

    def _shardings_of(self, tree: Any) -> Any:
        """The sharding of each leaf, by the parameter's name that stands last in its path."""

        def find_sharding(path: Sequence[Any], leaf: Any) -> NamedSharding:
            last = path[-1] if path else None
            name = last.key if isinstance(last, jax.tree_util.DictKey) else None
            if name is None or leaf.shape != self.spec.shapes[name].shape:
                # A count, ids, or Adafactor's means of rows and columns.
                return self._input_sharding(None)
            return self.layout.parameter_sharding(name, leaf.shape)

        return jax.tree_util.tree_map_with_path(find_sharding, tree)

    def _window_shape(self, count: int) -> tuple[int, ...]:
        return (count,)

    def _input_sharding(self, axis: int | None) -> NamedSharding:
        batch = tuple(name for name in ACTIVATIONS["B"] if name in self.mesh.shape)
        spec = () if axis is None else (*[None] * axis, batch)
        return NamedSharding(self.mesh, PartitionSpec(*spec))
