"""The step on a mesh of devices that share model and batch, under ``jax.jit``."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxformer.checkpoints import Arrays
from jaxformer.config import OptimizerConfig
from jaxformer.execution.sharding import layout
from jaxformer.parameters import Parameters
from jaxformer.train_step import Definition, TrainState
from jaxformer.training.parallel.device_counts import check_batch_size, check_mesh
from jaxformer.training.parallel.mesh_layout import MeshLayout
from jaxformer.training.parallel.sharding_rules import AXES, check_rules
from jaxformer.training.parallel.strategy import Strategy, put
from jaxformer.training.states import to_arrays


class MeshParallel(Strategy):
    """Parameters, moments and activations lie on a (data, fsdp, tensor) mesh by the sharding rules.

    The axes are Auto: arrays are global, the program is that of one device, and XLA adds what the
    devices have to send each other. Other arguments as in ``Strategy``.

    Args:
        definition: the model without its parameters.
        optimizer: its settings.
        fsdp: how many devices hold a part of each matrix, and of the batch.
        tensor: how many share heads and widths.

    Raises:
        DeviceError: fsdp and tensor do not divide the devices, or batch_size does not divide over
            data, fsdp and micro-batches.
        ValueError: a parameter has no sharding rule.
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
        fsdp: int = 1,
        tensor: int = 1,
    ):
        devices = list(jax.devices() if devices is None else devices)
        check_mesh(len(devices), fsdp, tensor)
        check_batch_size(batch_size, accumulation, len(devices), tensor)
        check_rules(shapes)
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
            parts=len(devices) // tensor,
        )
        self.mesh = jax.make_mesh(
            (len(devices) // (fsdp * tensor), fsdp, tensor),
            AXES,
            axis_types=(AxisType.Auto,) * len(AXES),
            devices=devices,
        )
        self.layout = MeshLayout(self.mesh)
        create = functools.partial(TrainState.create, optimizer=optimizer)
        self._state_shardings = self._shardings_of(jax.eval_shape(create, self.shapes))
        whole = self._split(None)
        self._steps = jax.jit(
            self._traced(self.loop.run_steps),
            in_shardings=(self._state_shardings, whole, self._split(2), whole),
            out_shardings=(self._state_shardings, whole, whole),
            donate_argnums=0,
        )
        self._evaluate = jax.jit(
            self._traced(self.loop.evaluate_windows),
            in_shardings=(
                self._state_shardings.parameters,
                whole,
                self._split(0),
                self._split(0),
            ),
            out_shardings=whole,
        )

    def _traced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """On one device there is nothing to lay out: it is then the program of one device."""

        @functools.wraps(function)
        def traced(*arguments: Any) -> Any:
            with layout(self.layout if len(self.devices) > 1 else None):
                return function(*arguments)

        return traced

    def _settle(self, state: TrainState) -> TrainState:
        if len(self.devices) == 1:
            return state
        settled: TrainState = jax.lax.with_sharding_constraint(state, self._state_shardings)
        return settled

    def place(self, tree: Any) -> Any:
        """Parameters and what goes by their names in parts, all else whole on every device.

        What lies there already is taken as it is.
        """
        return jax.tree.map(put, tree, self._shardings_of(tree))

    def initial_state(self, draw: Callable[[], Parameters]) -> TrainState:
        """See ``Strategy``; every device draws its own parts."""

        def create() -> TrainState:
            return TrainState.create(draw(), self.optimizer)

        state: TrainState = jax.jit(create, out_shardings=self._state_shardings)()
        return state

    def place_tokens(self, ids: Int[np.ndarray, "C"]) -> Array:
        """See ``Strategy``."""
        return put(ids, self._split(None))

    def fetch(self, tree: Any) -> Any:
        """Global arrays as numpy arrays, on every process."""

        def one(x: Array) -> np.ndarray:
            if x.is_fully_addressable:
                return np.asarray(x)
            if x.is_fully_replicated:
                return np.asarray(x.addressable_data(0))
            return np.asarray(multihost_utils.process_allgather(x, tiled=True))

        return jax.tree.map(one, tree)

    def state_arrays(self, state: TrainState) -> Arrays:
        """See ``Strategy``; global arrays, in the parts that they lie in."""
        return to_arrays(state)

    def shardings(self) -> Arrays:
        """See ``Strategy``."""
        return to_arrays(self._state_shardings)

    def abstract(self, tree: Any) -> Any:
        """See ``Strategy``."""

        def one(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(one, tree, self._shardings_of(tree))

    def _shardings_of(self, tree: Any) -> Any:
        """Of each leaf, by the parameter's name that stands last in its path."""

        def one(path: Sequence[Any], leaf: Any) -> NamedSharding:
            name = next((k.key for k in path[::-1] if isinstance(k, jax.tree_util.DictKey)), "step")
            if name == "step":
                return self._split(None)
            return self.layout.parameter_sharding(name, leaf.shape)

        return jax.tree_util.tree_map_with_path(one, tree)

    def _rows(self, count: int) -> tuple[int, ...]:
        return (count,)

    def _split(self, axis: int | None) -> NamedSharding:
        spec = () if axis is None else (*[None] * axis, ("data", "fsdp"))
        return NamedSharding(self.mesh, PartitionSpec(*spec))
