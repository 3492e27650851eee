"""What all strategies of running the step on several devices share."""

import abc
import concurrent.futures
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.checkpoints import Arrays
from jaxformer.execution.attention_backends import CompilationTarget
from jaxformer.execution.chunked_loss import LOGITS_AT_ONCE
from jaxformer.execution.delayed_draws import DelayedDraw
from jaxformer.execution.seeds import seed_key
from jaxformer.hardware.memory import release_freed, without_collection
from jaxformer.parameters import Parameters
from jaxformer.train_step import TrainState
from jaxformer.training.parallel.device_loop import PARTS_ON_CPU, DeviceLoop
from jaxformer.training.parallel.step_spec import StepSpec

# Options of XLA, by platform; those that ``XLA_FLAGS`` names are left out.
OPTIONS: dict[str, dict[str, str | bool]] = {
    # Lets the loop update moments in place. Without it their old values are copied first, 2 % of a
    # step of ``nano``.
    "cpu": {"xla_cpu_copy_insertion_use_region_analysis": True},
    "cuda": {
        # Products that nothing else is computed with go to cuBLAS, which adds biases.
        "xla_gpu_triton_gemm_any": False,
        # Queries, keys and values are not made by one product, which would be cut up afterwards.
        "xla_gpu_dot_merger_threshold_mb": "0",
    },
}

# In tokens that a round takes on each device; on a CPU, each of its parts. What a layer of nano or
# baby makes of so many stays in a CPU's cache.
CPU_EVALUATION_TOKENS, EVALUATION_TOKENS = 2048, 16384


# Of a model whose arrays are drawn later.
PlannedParameters = Mapping[str, Array | DelayedDraw]


class Strategy(abc.ABC):
    """The step on several devices, of one process or of many that all make the same calls.

    Several steps run in one call: a loop on the devices cuts each step's windows out of the corpus,
    which lies there too. The loop's length is an argument, so one compilation serves every length
    and a run cut anywhere computes the same bits as one that is not. The loop ends early, and
    leaves the state as it was, at a step whose loss or gradient is not finite.

    Args:
        spec: the model and its step.
        devices: those of all processes.
        shards: how many parts a batch is cut into.
        axis_name: of the pmap axis, if there is one; see ``train_step``.
    """

    # (state, tokens, starts, count) and (parameters, tokens, starts, mask), compiled for devices.
    _steps: Any
    _evaluate: Any
    # Into how many parts a CPU cuts a round of an evaluation; see ``DeviceLoop``.
    _parts_on_cpu = 1

    def __init__(
        self,
        spec: StepSpec,
        devices: Sequence[jax.Device],
        *,
        shards: int,
        axis_name: str | None = None,
    ):
        self.spec = spec
        self.devices = list(devices)
        self._shards = shards
        rows = self._window_shape(spec.batch_size // spec.accumulation)
        self._batch_shape = (spec.accumulation, *rows)
        self.loop = DeviceLoop(
            spec,
            key=seed_key(spec.seed) if spec.uses_dropout else None,
            axis_name=axis_name,
            constrain=self._constrain,
        )
        # By the shape of their starts.
        self._programs: dict[tuple[int, ...], jax.stages.Compiled] = {}
        self._compiled_ahead: dict[
            tuple[int, ...], concurrent.futures.Future[jax.stages.Compiled]
        ] = {}

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """How devices share the work, in words, such as ``8 x pmap``.

        The losses of two runs that differ in it differ in their last bits.
        """

    @property
    def gradient_parts(self) -> int:
        """How many gradients a step averages: of micro-batches, under pmap of devices too."""
        devices = 1 if self.loop.axis_name is None else len(self.devices)
        return self.spec.accumulation * devices

    @property
    def evaluation_batch_size(self) -> int:
        """How many windows each device takes at a time in an evaluation."""
        if self.spec.eval_batch_size is not None:
            return self.spec.eval_batch_size
        if self.devices[0].platform != "cpu":
            return max(1, EVALUATION_TOKENS // self.spec.context_length)
        # More logits, in float32, would be made in a loop, which takes longer. A vocabulary that is
        # large enough for that is the largest dimension of all.
        widest = max(max(x.shape, default=1) for x in self.spec.shapes.values())
        tokens = min(CPU_EVALUATION_TOKENS, LOGITS_AT_ONCE // (4 * widest))
        return self._parts_on_cpu * max(1, tokens // self.spec.context_length)

    @abc.abstractmethod
    def place(self, tree: Any) -> Any:
        """Places a state, or parameters, as ``train`` and ``evaluate`` take it.

        Args:
            tree: of numpy or JAX arrays, the same on every process.
        """

    @abc.abstractmethod
    def initial_state(self, planned: PlannedParameters) -> TrainState:
        """Returns the state before the first step, placed, of parameters that are drawn now."""

    @abc.abstractmethod
    def place_tokens(self, ids: Int[np.ndarray, "C"]) -> Array:
        """Places a corpus, as ``train`` and ``evaluate`` take it."""

    def place_windows(
        self, read: Callable[[Int[np.ndarray, "R"]], Int[np.ndarray, "n R _"]], steps: int
    ) -> Array:
        """Places the rows of a call, as ``train`` takes them in place of their starts.

        Args:
            read: returns some rows of the batch, of ``StepSpec.row_length`` numbers, for every
                step; it is asked for those of this process's devices alone.
            steps: n, of one call.
        """
        rows = np.arange(self.spec.batch_size).reshape(self._batch_shape)

        def part(index: Any) -> np.ndarray:
            chosen = rows[index[1:-1]]
            found = read(chosen.ravel())
            found = np.pad(found, ((0, max(0, 2 - steps)), (0, 0), (0, 0)))
            return found.reshape(len(found), *chosen.shape, found.shape[-1])

        shape = (max(2, steps), *rows.shape, self.spec.row_length)
        return jax.make_array_from_callback(shape, self._input_sharding(2), part)

    @abc.abstractmethod
    def fetch(self, tree: Any) -> Any:
        """Returns placed arrays as numpy arrays; all processes call it together."""

    @abc.abstractmethod
    def state_arrays(self, state: TrainState) -> Arrays:
        """Returns what a checkpoint of a placed state takes."""

    def shardings(self) -> Arrays | None:
        """Returns where a checkpoint's arrays are to lie; None: on the host, as numpy arrays."""
        return None

    @abc.abstractmethod
    def abstract(self, tree: Any) -> Any:
        """Returns the shapes that a tree of shapes has once it is placed."""

    @abc.abstractmethod
    def _window_shape(self, count: int) -> tuple[int, ...]:
        """The shape in which ``count`` windows are given to the devices."""

    @abc.abstractmethod
    def _input_sharding(self, axis: int | None) -> jax.sharding.NamedSharding:
        """Where windows lie whose first dimension of ``_window_shape`` is ``axis``; None: whole."""

    def _constrain(self, state: TrainState) -> TrainState:
        """States where a new state lies, while it is traced."""
        return state

    def _place_input(self, x: Any, axis: int | None) -> Any:
        """A program's argument, cut along ``axis``; each process gives its own part."""
        return x if jax.process_count() == 1 else place_array(x, self._input_sharding(axis))

    def train(
        self,
        state: TrainState,
        tokens: Array | None,
        starts: Int[np.ndarray, "n B"] | Array,
        count: int,
    ) -> tuple[TrainState, dict[str, Float[np.ndarray, "n"]]]:
        """Makes ``count`` steps of at most n, each from the windows that begin at its ``starts``.

        The state is donated. Returns the next state and the metrics of each step. If a loss or
        gradient norm is not finite, its step is the last in the metrics and is not in the state.

        Args:
            state: placed.
            tokens: placed; None if ``starts`` are rows.
            starts: where the windows begin, or the rows that ``place_windows`` has placed.
            count: how many steps to make.
        """
        if tokens is None:
            shaped = starts
        else:
            # For a single row XLA makes another program, whose losses differ in the last bit.
            starts = np.pad(starts, ((0, max(0, 2 - len(starts))), (0, 0)))
            shaped = self._place_input(starts.reshape(len(starts), *self._batch_shape), 2)
        arguments = (state, tokens, shaped, self._place_input(np.int32(count), None))
        if shaped.shape not in self._programs:
            ahead = self._compiled_ahead.pop(shaped.shape, None)
            if ahead is None:
                release_freed()
                self._programs[shaped.shape] = self.compile_steps(*arguments)
            else:
                self._programs[shaped.shape] = ahead.result()
            release_freed()
        state, history, made = self._programs[shaped.shape](*arguments)
        history, made = self.fetch((history, made))
        return state, {k: v[:made] for k, v in history.items()}

    def evaluate(
        self,
        parameters: Parameters,
        tokens: Array | None,
        starts: Int[np.ndarray, "W"] | Int[np.ndarray, "W _"],
        mask: Bool[np.ndarray, "W T"],
        batch_size: int,
        stopped: Callable[[], bool] = lambda: False,
    ) -> float | None:
        """Returns the mean loss over the targets that ``mask`` keeps, in nats per token.

        Args:
            parameters: placed.
            tokens: placed; None if ``starts`` are rows.
            starts: where the windows begin, or the rows themselves.
            mask: which of their targets count.
            batch_size: windows per device at a time, such as ``evaluation_batch_size``.
            stopped: called before every call; if it returns True, the result is None.
        """
        rounds, batch = self._evaluation_rounds(len(starts), batch_size)
        pad = -len(starts) % (rounds * batch)
        starts = np.pad(starts, ((0, pad), *[(0, 0)] * (starts.ndim - 1)))
        padded = np.pad(mask, ((0, pad), (0, 0)))
        shape = (rounds, *self._window_shape(batch))
        sums, total = None, 0.0
        for first in range(0, len(starts), rounds * batch):
            if stopped():
                return None
            rows = slice(first, first + rounds * batch)
            chosen = starts[rows].reshape(*shape, *starts.shape[1:])
            of_call = padded[rows].reshape(*shape, mask.shape[1])
            placed = self._place_input(chosen, 1), self._place_input(of_call, 1)
            previous, sums = sums, self._evaluate(parameters, tokens, *placed)
            # Read while the devices compute the next windows.
            total += 0.0 if previous is None else float(self.fetch(previous))
        return (total + float(self.fetch(sums))) / int(mask.sum())

    def _evaluation_rounds(self, windows: int, batch_size: int) -> tuple[int, int]:
        """How many rounds a call has, and how many windows all devices take in each: about as many.

        Windows per device at a time are as in ``evaluate``.
        """
        windows_per_shard = -(-windows // self._shards)
        rounds = -(-windows_per_shard // batch_size)
        calls = -(-rounds // min(rounds, self._most_rounds(batch_size)))
        rounds_per_call = -(-rounds // calls)
        parts = calls * rounds_per_call * PARTS_ON_CPU
        even = -(-windows_per_shard // parts) * PARTS_ON_CPU
        return rounds_per_call, self._shards * min(batch_size, even)

    def _most_rounds(self, batch_size: int) -> int:
        """Into how many rounds of so many windows per device a call of an evaluation is cut."""
        return 1

    def lower_steps(
        self, state: TrainState, tokens: Array | None, starts: Any, count: Any
    ) -> jax.stages.Lowered:
        """Returns the program behind ``train`` before it is compiled."""
        with without_collection():
            lowered: jax.stages.Lowered = self._steps.lower(state, tokens, starts, count)
        return lowered

    def compile_steps(
        self, state: TrainState, tokens: Array | None, starts: Any, count: Any
    ) -> jax.stages.Compiled:
        """Compiles the program behind ``train``; arguments may be ``jax.ShapeDtypeStruct``."""
        return self._compile_lowered(self.lower_steps(state, tokens, starts, count))

    def compile_ahead(self, state: TrainState, corpus: int | None, steps: int) -> None:
        """Begins to compile the program behind ``train``, which waits for it when it is called.

        It is traced now, with the settings of this thread, and compiled in another one.

        Args:
            state: its shapes, not placed.
            corpus: its length, in tokens; None if its ids stay on the disk.
            steps: of one call.
        """
        shapes = self.step_shapes(state, corpus, steps)
        lowered = self.lower_steps(*shapes)
        thread = concurrent.futures.ThreadPoolExecutor(1, "compile")
        self._compiled_ahead[shapes[2].shape] = thread.submit(self._compile_lowered, lowered)
        thread.shutdown(wait=False)

    def _compile_lowered(self, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        options = OPTIONS.get(CompilationTarget.of(self.devices[0]).platform, {})
        flags = os.environ.get("XLA_FLAGS", "")
        chosen = {name: value for name, value in options.items() if name not in flags}
        # Another version of XLA may not know an option, which changes no result.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            return lowered.compile(compiler_options=chosen)
        compiled: jax.stages.Compiled = lowered.compile()
        return compiled

    def compile_evaluation(
        self, parameters: Parameters, tokens: Array | None, starts: Any, mask: Any
    ) -> jax.stages.Compiled:
        """Compiles a batch of ``evaluate``; arguments may be ``jax.ShapeDtypeStruct``."""
        compiled: jax.stages.Compiled = self._evaluate.lower(
            parameters, tokens, starts, mask
        ).compile()
        return compiled

    def step_shapes(self, state: TrainState, corpus: int | None, steps: int) -> tuple[Any, ...]:
        """Returns the shapes for ``compile_steps``.

        Args:
            state: its shapes, not placed.
            corpus: its length, in tokens; None if its ids stay on the disk.
            steps: of one call.
        """
        tokens = None if corpus is None else jax.ShapeDtypeStruct((corpus,), np.int32)
        window = () if corpus is not None else (self.spec.row_length,)
        starts = jax.ShapeDtypeStruct((max(2, steps), *self._batch_shape, *window), np.int32)
        count = jax.ShapeDtypeStruct((), np.int32)
        return self.abstract(state), self.abstract(tokens), starts, count

    def evaluation_shapes(
        self, parameters: Parameters, corpus: int | None, windows: int, batch_size: int
    ) -> tuple[Any, ...]:
        """Returns the shapes for ``compile_evaluation``.

        Args:
            parameters: their shapes, not placed.
            corpus: its length, in tokens; None if rows are given one by one.
            windows: how many there are in all.
            batch_size: windows per device at a time.
        """
        rounds, batch = self._evaluation_rounds(windows, batch_size)
        rows = (rounds, *self._window_shape(batch))
        tokens = None if corpus is None else jax.ShapeDtypeStruct((corpus,), np.int32)
        row = () if corpus is not None else (self.spec.row_length,)
        starts = jax.ShapeDtypeStruct((*rows, *row), np.int32)
        mask = jax.ShapeDtypeStruct((*rows, self.spec.context_length), np.bool_)
        return self.abstract(parameters), self.abstract(tokens), starts, mask


def place_array(x: Any, sharding: jax.sharding.Sharding) -> Array:
    """Places an array of any kind, the same on every process, as ``sharding`` says.

    An array of more than one number that lies there already is returned as it is.
    """
    if isinstance(x, jax.Array) and x.ndim == 0:
        # One scalar often stands in several places of a state, and each is donated.
        x = np.asarray(x.addressable_data(0))
    if isinstance(x, jax.Array):
        if x.sharding == sharding:
            return x
        if not x.is_fully_addressable:
            return jax.device_put(x, sharding)
    # By way of numpy: a part of an array on a device may share its memory, and is donated.
    x = np.asarray(x)
    if not sharding.is_fully_addressable:
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
    placed = jax.device_put(x, sharding)
    if next(iter(placed.devices())).platform != "cpu":
        return placed
    # On a CPU it still lies in numpy's memory, which XLA cannot write over: the first step that
    # it is donated to would copy the whole state.
    return jax.device_put(placed, sharding, may_alias=False)
