"""The part of training that runs on the devices: steps in a loop, and an evaluation's sums."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.config import OptimizerConfig
from jaxformer.parameters import Parameters
from jaxformer.train_step import Definition, TrainState, evaluation_step, train_step


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceLoop:
    """The functions that a strategy compiles, as one device sees them.

    Attributes:
        definition: the model without its parameters.
        optimizer: its settings.
        key: of all dropout; None where every rate is 0.
        context_length: T, in tokens.
        compute_dtype: see ``language_model_loss``.
        axis_name: see ``train_step``.
        settle: puts the state where it should lie, after every step.
    """

    definition: Definition
    optimizer: OptimizerConfig
    key: Array | None
    context_length: int
    compute_dtype: jnp.dtype | None
    axis_name: str | None
    settle: Callable[[TrainState], TrainState]

    def run_steps(
        self, state: TrainState, tokens: Int[Array, "C"], starts: Int[Array, "n A b"], count: Array
    ) -> tuple[TrainState, dict[str, Float[Array, "n"]], Int[Array, ""]]:
        """Makes ``count`` steps, or fewer if one is not finite, which it leaves out of the state.

        Returns:
            The next state, the metrics of each step, and how many were made, that one included.
        """
        step = functools.partial(
            train_step,
            definition=self.definition,
            optimizer=self.optimizer,
            compute_dtype=self.compute_dtype,
            axis_name=self.axis_name,
        )

        def goes_on(carry: Any) -> Bool[Array, ""]:
            _, _, index, finite = carry
            return (index < count) & finite

        def one(carry: Any) -> Any:
            state, history, index, _ = carry
            key = None if self.key is None else jax.random.fold_in(self.key, state.step)
            batch = cut_windows(tokens, starts[index], self.context_length)
            after, metrics = step(state, batch, key)
            finite = jnp.isfinite(metrics["train_loss"]) & jnp.isfinite(metrics["grad_norm"])
            # A choice element by element fuses with the update; ``lax.cond`` copies the state.
            state = jax.tree.map(functools.partial(jnp.where, finite), after, state)
            history = {k: v.at[index].set(metrics[k]) for k, v in history.items()}
            return self.settle(state), history, index + 1, finite

        dtype = next(iter(state.parameters.values())).dtype
        empty = jnp.zeros(starts.shape[0], dtype)
        history = dict.fromkeys(("train_loss", "grad_norm", "learning_rate"), empty)
        start = (state, history, jnp.int32(0), jnp.bool_(True))
        state, history, made, _ = jax.lax.while_loop(goes_on, one, start)
        return state, history, made

    def evaluate_windows(
        self,
        parameters: Parameters,
        tokens: Int[Array, "C"],
        starts: Int[Array, "b"],
        mask: Bool[Array, "b T"],
    ) -> Float[Array, ""]:
        """The sum of the losses of the targets that ``mask`` keeps, in nats."""
        inputs, targets = cut_windows(tokens, starts, self.context_length)
        return evaluation_step(
            parameters,
            inputs,
            targets,
            mask,
            definition=self.definition,
            compute_dtype=self.compute_dtype,
        )


def cut_windows(
    tokens: Int[Array, "C"], starts: Int[Array, "*batch"], length: int
) -> tuple[Int[Array, "*batch T"], Int[Array, "*batch T"]]:
    """Inputs and targets of the windows that begin at ``starts``."""
    offsets = jnp.arange(length + 1).reshape((1,) * starts.ndim + (-1,))
    windows = tokens[starts[..., None] + offsets].astype(jnp.int32)
    return windows[..., :-1], windows[..., 1:]
