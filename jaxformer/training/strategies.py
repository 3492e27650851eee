"""How the one step is run over several devices.

``jax.pmap`` is in maintenance mode upstream, so it is named in this file alone.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.config import OptimizerConfig
from jaxformer.errors import DeviceError
from jaxformer.parameters import Parameters
from jaxformer.train_step import Definition, TrainState, evaluation_step, train_step

AXIS = "data"

# For XLA on CPU: lets the loop update moments in place. Without it their old values are copied
# first, 2 % of a step of ``nano``.
CPU_OPTIONS = {"xla_cpu_copy_insertion_use_region_analysis": True}


class DataParallel:
    """Every device holds all parameters and takes its share of each batch, under ``jax.pmap``.

    Several steps run in one call: a loop on the device cuts each step's windows out of the corpus,
    which lies there too. The loop's length is an argument, so one compilation serves every length
    and a run cut anywhere computes the same bits as one that is not. The loop ends early, and
    leaves the state as it was, at a step whose loss or gradient is not finite.

    Args:
        definition: the model without its parameters.
        optimizer: its settings.
        seed: of dropout.
        batch_size: windows per step, over all devices and micro-batches.
        accumulation: micro-batches per step.
        context_length: T, in tokens.
        compute_dtype: see ``language_model_loss``.
        uses_dropout: whether any rate is above zero.
        devices: the devices to use.

    Raises:
        DeviceError: batch_size does not divide over the devices and micro-batches.
    """

    def __init__(
        self,
        definition: Definition,
        optimizer: OptimizerConfig,
        *,
        seed: int,
        batch_size: int,
        accumulation: int = 1,
        context_length: int,
        compute_dtype: jnp.dtype | None = None,
        uses_dropout: bool = True,
        devices: Sequence[jax.Device] | None = None,
    ):
        self.devices = list(jax.local_devices() if devices is None else devices)
        check_batch_size(batch_size, accumulation, len(self.devices))
        self._batch_shape = (accumulation, len(self.devices), -1)
        step = functools.partial(
            train_step,
            definition=definition,
            optimizer=optimizer,
            compute_dtype=compute_dtype,
            axis_name=AXIS if len(self.devices) > 1 else None,
        )
        key = jax.random.key(seed) if uses_dropout else None

        def steps(
            state: TrainState, tokens: Int[Array, "C"], starts: Int[Array, "n A b"], count: Array
        ) -> tuple[TrainState, dict[str, Float[Array, "n"]], Int[Array, ""]]:
            def goes_on(carry: Any) -> Bool[Array, ""]:
                _, _, index, finite = carry
                return (index < count) & finite

            def one(carry: Any) -> Any:
                state, history, index, _ = carry
                step_key = None
                if key is not None:
                    step_key = jax.random.fold_in(key, state.step)
                batch = cut_windows(tokens, starts[index], context_length)
                after, metrics = step(state, batch, step_key)
                finite = jnp.isfinite(metrics["train_loss"]) & jnp.isfinite(metrics["grad_norm"])
                # A choice element by element fuses with the update; ``lax.cond`` copies the state.
                state = jax.tree.map(functools.partial(jnp.where, finite), after, state)
                history = {k: v.at[index].set(metrics[k]) for k, v in history.items()}
                return state, history, index + 1, finite

            dtype = next(iter(state.parameters.values())).dtype
            empty = jnp.zeros(starts.shape[0], dtype)
            history = dict.fromkeys(("train_loss", "grad_norm", "learning_rate"), empty)
            start = (state, history, jnp.int32(0), jnp.bool_(True))
            state, history, made, _ = jax.lax.while_loop(goes_on, one, start)
            return state, history, made

        def evaluate(
            parameters: Parameters,
            tokens: Int[Array, "C"],
            starts: Int[Array, "b"],
            mask: Bool[Array, "b T"],
        ) -> Float[Array, ""]:
            inputs, targets = cut_windows(tokens, starts, context_length)
            loss = evaluation_step(
                parameters,
                inputs,
                targets,
                mask,
                definition=definition,
                compute_dtype=compute_dtype,
            )
            return jax.lax.psum(loss, AXIS)

        self._programs: dict[tuple[int, ...], Any] = {}
        self._steps = jax.pmap(
            steps,
            axis_name=AXIS,
            in_axes=(0, 0, 2, None),
            donate_argnums=0,
            devices=self.devices,
        )
        self._evaluate = jax.pmap(
            evaluate, axis_name=AXIS, in_axes=(0, 0, 0, 0), devices=self.devices
        )

    def place(self, tree: Any) -> Any:
        """The same values on every device, with a leading axis over devices."""
        count = len(self.devices)
        mesh = jax.sharding.Mesh(np.asarray(self.devices), (AXIS,))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))

        def put(x: Any) -> Array:
            x = np.asarray(x)
            return jax.device_put(np.broadcast_to(x[None], (count, *x.shape)), sharding)

        return jax.tree.map(put, tree)

    def place_tokens(self, ids: Int[np.ndarray, "C"]) -> Array:
        """A corpus, as ``train`` and ``evaluate`` take it."""
        placed: Array = self.place(ids)
        return placed

    replicate = place

    def fetch(self, tree: Any) -> Any:
        """One copy of replicated values, as numpy arrays."""
        return jax.tree.map(lambda x: np.asarray(x.addressable_shards[0].data)[0], tree)

    def train(
        self, state: TrainState, tokens: Array, starts: Int[np.ndarray, "n B"], count: int
    ) -> tuple[TrainState, dict[str, Float[np.ndarray, "n"]]]:
        """Makes ``count`` steps of at most n, each from the windows that begin at its ``starts``.

        The state is donated. Returns the next state and the metrics of each step. If a loss or
        gradient norm is not finite, its step is the last in the metrics and is not in the state.
        """
        # For a single row XLA makes another program, whose losses differ in the last bit.
        starts = np.pad(starts, ((0, max(0, 2 - len(starts))), (0, 0)))
        shaped = starts.reshape(len(starts), *self._batch_shape)
        arguments = (state, tokens, shaped, np.int32(count))
        if shaped.shape not in self._programs:
            self._programs[shaped.shape] = self.compile_steps(*arguments)
        state, history, made = self._programs[shaped.shape](*arguments)
        history, made = self.fetch((history, made))
        return state, {k: v[:made] for k, v in history.items()}

    def compile_steps(
        self, state: TrainState, tokens: Array, starts: Any, count: Any
    ) -> jax.stages.Compiled:
        """The program behind ``train``; shapes (``jax.ShapeDtypeStruct``) do for arguments."""
        lowered = self._steps.lower(state, tokens, starts, count)
        if self.devices[0].platform == "cpu":
            # Another version of XLA may not know an option, which changes no result.
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                return lowered.compile(compiler_options=CPU_OPTIONS)
        return lowered.compile()

    def compile_evaluation(
        self, parameters: Parameters, tokens: Array, starts: Any, mask: Any
    ) -> jax.stages.Compiled:
        """The program behind a batch of ``evaluate``; shapes do for arguments."""
        return self._evaluate.lower(parameters, tokens, starts, mask).compile()

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
            parameters: replicated.
            tokens: replicated.
            starts: where the windows begin.
            mask: which of their targets count.
            batch_size: windows per device at a time.
            stopped: asked before every batch; where it says True the result is None.
        """
        devices = len(self.devices)
        batch_size = min(batch_size, -(-len(starts) // devices))
        pad = -len(starts) % (devices * batch_size)
        starts = np.pad(starts, (0, pad)).reshape(-1, devices, batch_size)
        padded = np.pad(mask, ((0, pad), (0, 0)))
        padded = padded.reshape(-1, devices, batch_size, mask.shape[1])
        total = 0.0
        for batch_starts, batch_mask in zip(starts, padded, strict=True):
            if stopped():
                return None
            total += float(self.fetch(self._evaluate(parameters, tokens, batch_starts, batch_mask)))
        return total / int(mask.sum())


def cut_windows(
    tokens: Int[Array, "C"], starts: Int[Array, "*batch"], length: int
) -> tuple[Int[Array, "*batch T"], Int[Array, "*batch T"]]:
    """Inputs and targets of the windows that begin at ``starts``."""
    offsets = jnp.arange(length + 1).reshape((1,) * starts.ndim + (-1,))
    windows = tokens[starts[..., None] + offsets].astype(jnp.int32)
    return windows[..., :-1], windows[..., 1:]


def check_batch_size(batch_size: int, accumulation: int, devices: int) -> None:
    """Checks that a batch divides over devices and micro-batches.

    Raises:
        DeviceError: it does not; the message names the nearest sizes that do.
    """
    unit = devices * accumulation
    if batch_size % unit:
        below = batch_size // unit * unit
        choices = [str(size) for size in (below, below + unit) if size]
        raise DeviceError(
            f"--batch-size {batch_size} does not divide over {devices} devices and "
            f"{accumulation} micro-batches: use {' or '.join(choices)}, or --devices"
        )
