"""The part of training that runs on the devices: steps in a loop, and an evaluation's sums."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.execution.attention_backends import CompilationTarget
from jaxformer.execution.called_attention import without_gradients
from jaxformer.execution.called_products import products_of
from jaxformer.execution.sharding import current_layout
from jaxformer.parameters import Parameters, cast_parameters
from jaxformer.train_step import TrainState, average_gradients, evaluation_step, update_state
from jaxformer.training.parallel.step_spec import StepSpec

# Of an evaluation's windows. With 4 it was another 2 to 3 % faster, and compiled for half a second
# longer.
PARTS_ON_CPU = 2


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceLoop:
    """The functions that a strategy compiles, as one device sees them.

    Attributes:
        spec: the model and its step.
        key: of all dropout; None where every rate is 0.
        axis_name: of the pmap axis over which gradients are averaged; see ``train_step``.
        constrain: states where a state lies, after every step.
    """

    spec: StepSpec
    key: Array | None
    axis_name: str | None
    constrain: Callable[[TrainState], TrainState]

    def run_steps(
        self,
        state: TrainState,
        tokens: Int[Array, "C"] | None,
        starts: Int[Array, "n A b"] | Int[Array, "n A b _"],
        count: Array,
    ) -> tuple[TrainState, dict[str, Float[Array, "n"]], Int[Array, ""]]:
        """Makes ``count`` steps, or fewer if one is not finite, which it leaves out of the state.

        Args:
            state: before the steps.
            tokens: the corpus; None if ``starts`` are the rows themselves.
            starts: where the windows of each step begin.
            count: how many steps to make.

        Returns:
            The next state, the metrics of each step, and how many were made, that one included.
        """
        optimizer = self.spec.optimizer
        differentiate = functools.partial(
            average_gradients,
            definition=self.spec.definition,
            optimizer=optimizer,
            compute_dtype=self.spec.compute_dtype,
            axis_name=self.axis_name,
            masked=self.spec.row != "ids",
        )

        def cast(parameters: Parameters) -> Parameters | None:
            """The parameters as the next step wants them: cast where they are updated anyway."""
            dtype = self.spec.compute_dtype
            return None if dtype is None else cast_parameters(parameters, dtype)

        def continues(carry: Any) -> Bool[Array, ""]:
            _, _, _, index, finite = carry
            return (index < count) & finite

        def make_step(carry: Any) -> Any:
            state, narrow, history, index, _ = carry
            key = None if self.key is None else jax.random.fold_in(self.key, state.step)
            batch = self._batch(tokens, starts[index])
            with products_of(self.spec.products):
                gradients, metrics = differentiate(state, batch, key, narrow=narrow)
                norm = metrics["grad_norm"]
                finite = jnp.isfinite(metrics["train_loss"]) & jnp.isfinite(norm)
                state = update_state(state, gradients, norm, optimizer, is_wanted=finite)
            history = {k: v.at[index].set(metrics[k]) for k, v in history.items()}
            state = self.constrain(state)
            return state, cast(state.parameters), history, index + 1, finite

        dtype = next(iter(state.parameters.values())).dtype
        empty = jnp.zeros(starts.shape[0], dtype)
        names = ["train_loss", "grad_norm", "learning_rate"]
        names += ["part_grad_norm"] * self.spec.optimizer.noise_scale
        history = dict.fromkeys(names, empty)
        start = (state, cast(state.parameters), history, jnp.int32(0), jnp.bool_(True))
        state, _, history, made, _ = jax.lax.while_loop(continues, make_step, start)
        return state, history, made

    def evaluate_windows(
        self,
        parameters: Parameters,
        tokens: Int[Array, "C"] | None,
        starts: Int[Array, "n b"] | Int[Array, "n b _"],
        mask: Bool[Array, "n b T"],
    ) -> Float[Array, ""]:
        """Returns the sum of the losses of the targets that ``mask`` keeps, in nats.

        It is made in n rounds, each of which takes b windows.
        """
        evaluate = functools.partial(self._evaluate_round, parameters, tokens)
        if len(starts) == 1:
            return evaluate(starts[0], mask[0])
        return jnp.sum(jax.lax.map(lambda windows: evaluate(*windows), (starts, mask)))

    def _evaluate_round(
        self,
        parameters: Parameters,
        tokens: Int[Array, "C"] | None,
        starts: Int[Array, "b"] | Int[Array, "b _"],
        mask: Bool[Array, "b T"],
    ) -> Float[Array, ""]:
        inputs, targets, *beside = self._batch(tokens, starts)
        batch = inputs, targets, mask, *beside
        parts = zip(*(jnp.split(x, _parts_of(len(mask))) for x in batch), strict=True)
        with products_of(self.spec.products), without_gradients():
            sums = [
                evaluation_step(
                    parameters,
                    *part,
                    definition=self.spec.definition,
                    compute_dtype=self.spec.compute_dtype,
                )
                for part in parts
            ]
        return functools.reduce(jnp.add, sums)

    def _batch(self, tokens: Array | None, starts: Array) -> tuple[Array, ...]:
        """Inputs and targets, each (*batch, T), and what rows have beside them."""
        if self.spec.row == "ids":
            return cut_windows(tokens, starts, self.spec.context_length)
        ends = tuple(itertools.accumulate(self.spec.row_parts))
        return tuple(jnp.split(starts, ends[:-1], axis=-1))


def _parts_of(windows: int) -> int:
    """Returns into how many parts the windows of an evaluation are cut.

    On a CPU the program computes two parts, which do not depend on each other, at the same time:
    one uses the cores while the other waits for its last thread. Windows that are spread over the
    devices of a mesh would have to be moved.
    """
    can_be_cut = windows % PARTS_ON_CPU == 0 and current_layout() is None
    return PARTS_ON_CPU if can_be_cut and CompilationTarget.here().platform == "cpu" else 1


def cut_windows(
    tokens: Int[Array, "C"] | None, starts: Int[Array, "*batch"], length: int
) -> tuple[Int[Array, "*batch T"], Int[Array, "*batch T"]]:
    """Returns inputs and targets of the windows that begin at ``starts``, int32.

    Without ``tokens`` the starts are the windows, (*batch, T+1).
    """
    if tokens is None:
        return starts[..., :-1], starts[..., 1:]
    offsets = jnp.arange(length + 1).reshape((1,) * starts.ndim + (-1,))
    windows = tokens[starts[..., None] + offsets].astype(jnp.int32)
    return windows[..., :-1], windows[..., 1:]
