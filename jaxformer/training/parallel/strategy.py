"""What all ways to run the one step on several devices share."""

import abc
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.checkpoints import Arrays
from jaxformer.config import OptimizerConfig
from jaxformer.parameters import Parameters
from jaxformer.train_step import Definition, TrainState
from jaxformer.training.device_loop import DeviceLoop

# For XLA on CPU: lets the loop update moments in place. Without it their old values are copied
# first, 2 % of a step of ``nano``.
CPU_OPTIONS: dict[str, str | bool] = {"xla_cpu_copy_insertion_use_region_analysis": True}


class Strategy(abc.ABC):
    """The step on several devices, of one process or of many that all make the same calls.

    Several steps run in one call: a loop on the devices cuts each step's windows out of the corpus,
    which lies there too. The loop's length is an argument, so one compilation serves every length
    and a run cut anywhere computes the same bits as one that is not. The loop ends early, and
    leaves the state as it was, at a step whose loss or gradient is not finite.

    Args:
        definition: the model without its parameters.
        optimizer: its settings.
        shapes: of the parameters, by path.
        seed: of dropout.
        batch_size: windows per step, over all devices and micro-batches.
        accumulation: micro-batches per step.
        context_length: T, in tokens.
        compute_dtype: see ``language_model_loss``.
        uses_dropout: whether any rate is above zero.
        devices: those of all processes.
        parts: how many devices take different windows.
        axis_name: see ``train_step``.
    """

    # (state, tokens, starts, count) and (parameters, tokens, starts, mask), compiled for devices.
    _steps: Any
    _evaluate: Any

    def __init__(
        self,
        definition: Definition,
        optimizer: OptimizerConfig,
        *,
        shapes: Mapping[str, Any],
        seed: int,
        batch_size: int,
        accumulation: int,
        context_length: int,
        compute_dtype: jnp.dtype | None,
        uses_dropout: bool,
        devices: Sequence[jax.Device],
        parts: int,
        axis_name: str | None = None,
    ):
        self.definition, self.optimizer = definition, optimizer
        self.shapes = dict(shapes)
        self.devices = list(devices)
        self._parts = parts
        self._batch = (accumulation, *self._rows(batch_size // accumulation))
        self.loop = DeviceLoop(
            definition,
            optimizer,
            key=jax.random.key(seed) if uses_dropout else None,
            context_length=context_length,
            compute_dtype=compute_dtype,
            axis_name=axis_name,
            settle=self._settle,
        )
        self._programs: dict[tuple[int, ...], jax.stages.Compiled] = {}

    @abc.abstractmethod
    def place(self, tree: Any) -> Any:
        """A state, or parameters, as ``train`` and ``evaluate`` take it.

        Args:
            tree: of numpy or JAX arrays, the same on every process.
        """

    @abc.abstractmethod
    def initial_state(self, draw: Callable[[], Parameters]) -> TrainState:
        """The state before the first step, placed; ``draw`` is traced."""

    @abc.abstractmethod
    def place_tokens(self, ids: Int[np.ndarray, "C"]) -> Array:
        """A corpus, as ``train`` and ``evaluate`` take it."""

    @abc.abstractmethod
    def fetch(self, tree: Any) -> Any:
        """What is placed, as numpy arrays on every process; all of them call it together."""

    @abc.abstractmethod
    def state_arrays(self, state: TrainState) -> Arrays:
        """What a checkpoint of a placed state takes."""

    def shardings(self) -> Arrays | None:
        """Where a checkpoint's arrays are to lie; None is on the host, as numpy arrays."""
        return None

    @abc.abstractmethod
    def abstract(self, tree: Any) -> Any:
        """Of a tree of shapes, those that it has once it is placed."""

    @abc.abstractmethod
    def _rows(self, count: int) -> tuple[int, ...]:
        """The shape in which ``count`` windows are given to the devices."""

    @abc.abstractmethod
    def _split(self, axis: int | None) -> jax.sharding.NamedSharding:
        """That of windows whose first dimension of ``_rows`` is ``axis``; None is whole."""

    def _settle(self, state: TrainState) -> TrainState:
        """A new state where it should lie."""
        return state

    def _give(self, x: Any, axis: int | None) -> Any:
        """What a program is called with, split along ``axis``; each process gives its own part."""
        return x if jax.process_count() == 1 else put(x, self._split(axis))

    def train(
        self, state: TrainState, tokens: Array, starts: Int[np.ndarray, "n B"], count: int
    ) -> tuple[TrainState, dict[str, Float[np.ndarray, "n"]]]:
        """Makes ``count`` steps of at most n, each from the windows that begin at its ``starts``.

        The state is donated. Returns the next state and the metrics of each step. If a loss or
        gradient norm is not finite, its step is the last in the metrics and is not in the state.
        """
        # For a single row XLA makes another program, whose losses differ in the last bit.
        starts = np.pad(starts, ((0, max(0, 2 - len(starts))), (0, 0)))
        shaped = self._give(starts.reshape(len(starts), *self._batch), 2)
        arguments = (state, tokens, shaped, self._give(np.int32(count), None))
        if shaped.shape not in self._programs:
            self._programs[shaped.shape] = self.compile_steps(*arguments)
        state, history, made = self._programs[shaped.shape](*arguments)
        history, made = self.fetch((history, made))
        return state, {k: v[:made] for k, v in history.items()}

    def evaluate(
        self,
        parameters: Parameters,
        tokens: Array,
        starts: Int[np.ndarray, "W"],
        mask: Bool[np.ndarray, "W T"],
        batch_size: int,
        stopped: Callable[[], bool] = lambda: False,
    ) -> float | None:
        """Mean loss over the targets that ``mask`` keeps, in nats per token.

        Args:
            parameters: placed.
            tokens: placed.
            starts: where the windows begin.
            mask: which of their targets count.
            batch_size: windows per device at a time.
            stopped: asked before every batch; where it says True the result is None.
        """
        batch = self._evaluation_batch(len(starts), batch_size)
        pad = -len(starts) % batch
        starts = np.pad(starts, (0, pad))
        padded = np.pad(mask, ((0, pad), (0, 0)))
        total = 0.0
        for first in range(0, len(starts), batch):
            if stopped():
                return None
            rows = slice(first, first + batch)
            batch_starts = starts[rows].reshape(self._rows(batch))
            batch_mask = padded[rows].reshape(*self._rows(batch), mask.shape[1])
            given = self._give(batch_starts, 0), self._give(batch_mask, 0)
            total += float(self.fetch(self._evaluate(parameters, tokens, *given)))
        return total / int(mask.sum())

    def _evaluation_batch(self, windows: int, batch_size: int) -> int:
        """How many windows all devices take at a time."""
        return self._parts * min(batch_size, -(-windows // self._parts))

    def lower_steps(
        self, state: TrainState, tokens: Array, starts: Any, count: Any
    ) -> jax.stages.Lowered:
        """The same program before it is compiled."""
        lowered: jax.stages.Lowered = self._steps.lower(state, tokens, starts, count)
        return lowered

    def compile_steps(
        self, state: TrainState, tokens: Array, starts: Any, count: Any
    ) -> jax.stages.Compiled:
        """The program behind ``train``; shapes (``jax.ShapeDtypeStruct``) do for arguments."""
        lowered = self.lower_steps(state, tokens, starts, count)
        if self.devices[0].platform == "cpu":
            # Another version of XLA may not know an option, which changes no result.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                return lowered.compile(compiler_options=CPU_OPTIONS)
        compiled: jax.stages.Compiled = lowered.compile()
        return compiled

    def compile_evaluation(
        self, parameters: Parameters, tokens: Array, starts: Any, mask: Any
    ) -> jax.stages.Compiled:
        """The program behind a batch of ``evaluate``; shapes do for arguments."""
        compiled: jax.stages.Compiled = self._evaluate.lower(
            parameters, tokens, starts, mask
        ).compile()
        return compiled

    def step_shapes(self, state: TrainState, corpus: int, steps: int) -> tuple[Any, ...]:
        """The shapes for ``compile_steps``.

        Args:
            state: its shapes, not placed.
            corpus: its length, in tokens.
            steps: of one call.
        """
        tokens = jax.ShapeDtypeStruct((corpus,), np.int32)
        starts = jax.ShapeDtypeStruct((max(2, steps), *self._batch), np.int32)
        count = jax.ShapeDtypeStruct((), np.int32)
        return self.abstract(state), self.abstract(tokens), starts, count

    def evaluation_shapes(
        self, parameters: Parameters, corpus: int, windows: int, batch_size: int
    ) -> tuple[Any, ...]:
        """The shapes for ``compile_evaluation``.

        Args:
            parameters: their shapes, not placed.
            corpus: its length, in tokens.
            windows: how many there are in all.
            batch_size: windows per device at a time.
        """
        rows = self._rows(self._evaluation_batch(windows, batch_size))
        tokens = jax.ShapeDtypeStruct((corpus,), np.int32)
        starts = jax.ShapeDtypeStruct(rows, np.int32)
        mask = jax.ShapeDtypeStruct((*rows, self.loop.context_length), np.bool_)
        return self.abstract(parameters), self.abstract(tokens), starts, mask


def put(x: Any, sharding: jax.sharding.Sharding) -> Array:
    """An array of any kind, the same on every process, where it should lie.

    An array of more than one number that lies there already is taken as it is.
    """
    if isinstance(x, jax.Array) and x.ndim == 0:
        # One scalar often stands in several places of a state, and each is donated.
        x = np.asarray(x.addressable_data(0))
    if isinstance(x, jax.Array):
        if x.sharding == sharding:
            return x
        if not x.is_fully_addressable:
            return jax.device_put(x, sharding)
        # Not by ``device_put``: a part may then share its memory with ``x``, and is donated.
        x = np.array(x)
    x = np.asarray(x)
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding, may_alias=False)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
