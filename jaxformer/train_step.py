"""One training step and one evaluation step, as pure functions."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxformer.adapters import trained_parameters
from jaxformer.config import OptimizerConfig
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.execution.all_reduce import mean_over
from jaxformer.execution.batch_parts import count_parts
from jaxformer.execution.chunked_loss import TokenLosses, average_losses
from jaxformer.execution.sharding import gather_outside_blocks
from jaxformer.experts import balance_loss
from jaxformer.layers import seed_dropout
from jaxformer.losses import token_losses
from jaxformer.masks import document_mask, document_positions
from jaxformer.optimizers import global_norm, learning_rate, make_optimizer, update_parameters
from jaxformer.parameters import Parameters, cast_parameters, merge
from jaxformer.transformer_lm import TransformerLM

Definition = nnx.GraphDef[Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class TrainState:
    """Everything that a step changes: parameters, moments and the count of steps.

    Attributes:
        parameters: by path, in the dtype they are kept in.
        optimizer_state: optax's, with moments in the same dict shape; where there are adapters,
            of these alone.
        step: how many updates were made, int32 scalar.
    """

    parameters: Parameters
    optimizer_state: optax.OptState
    step: Int[Array, ""]

    @classmethod
    def create(cls, parameters: Parameters, optimizer: OptimizerConfig) -> "TrainState":
        """Returns the state before the first step."""
        trained = trained_parameters(parameters)
        return cls(parameters, make_optimizer(optimizer).init(trained), jnp.int32(0))


def language_model_loss(
    definition: Definition,
    parameters: Parameters,
    inputs: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    key: Array | None,
    compute_dtype: jnp.dtype | None = None,
    first_row: Int[Array, ""] | None = None,
    *,
    beside: Int[Array, "B _"] | None = None,
    divisor: Float[Array, ""] | None = None,
    losses: TokenLosses = token_losses,
    axis_name: str | None = None,
) -> Float[Array, ""]:
    """Returns the mean cross-entropy of the model in training mode, in nats per token.

    With what the config's ``balance_loss`` makes of how its experts are used, by all tokens of the
    batch, those that do not count included.

    Args:
        definition: the model without its parameters, a ``TransformerLM`` or an ``EncoderDecoder``.
        parameters: by path.
        inputs: token ids, which a decoder reads.
        targets: the ids that follow them.
        key: of this batch's dropout; None where every rate is 0.
        compute_dtype: what parameters are cast to for the forward and backward pass; None leaves
            them. The gradient comes back in the parameters' own dtype.
        first_row: see ``seed_dropout``.
        beside: of a language model, which document each token is of, (B, T), or None. Attention
            then stays inside documents, and positions begin anew in each. Of an encoder and
            decoder, the ids of the sources, (B, S), below 0 on padding, which nothing attends to.
        divisor: where given, targets below 0 do not count, and the sum of the others' losses is
            divided by this number.
        losses: from logits and targets to the loss of each token.
        axis_name: of the pmap axis over which the use of experts is averaged.
    """
    model = merge(definition, gather_outside_blocks(cast_parameters(parameters, compute_dtype)))
    model.train()
    seed_dropout(model, key, first_row)
    weight = model.config.feed_forward.experts.router.balance_loss
    hidden, routings = _run(model, inputs, beside, return_routing=bool(weight))
    shares = None if divisor is None else (targets >= 0) / divisor
    loss = average_losses(losses, model.logits, hidden, targets, shares)
    return loss + weight * balance_loss(routings, axis_name=axis_name) if routings else loss


def train_step(
    state: TrainState,
    batch: tuple[Int[Array, "A B T"], ...],
    key: Array | None,
    *,
    optimizer: OptimizerConfig,
    **settings: Any,
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
    """Makes one update from the gradients of A micro-batches, averaged.

    Arguments are those of ``average_gradients``. Returns the state after the step, and the metrics.
    """
    gradients, metrics = average_gradients(state, batch, key, optimizer=optimizer, **settings)
    return update_state(state, gradients, metrics["grad_norm"], optimizer), metrics


def update_state(
    state: TrainState,
    gradients: Parameters,
    norm: Float[Array, ""],
    optimizer: OptimizerConfig,
    is_wanted: Bool[Array, ""] | None = None,
) -> TrainState:
    """Returns the state after an update with these gradients, of which ``norm`` is that of all.

    Where ``is_wanted`` is False the state stays as it was; None is True.
    """
    changed, optimizer_state = update_parameters(
        optimizer,
        trained_parameters(state.parameters),
        gradients,
        state.optimizer_state,
        norm=norm,
        is_wanted=is_wanted,
    )
    made = 1 if is_wanted is None else is_wanted.astype(jnp.int32)
    return TrainState({**state.parameters, **changed}, optimizer_state, state.step + made)


def average_gradients(
    state: TrainState,
    batch: tuple[Int[Array, "A B T"], ...],
    key: Array | None,
    *,
    definition: Definition,
    optimizer: OptimizerConfig,
    compute_dtype: jnp.dtype | None = None,
    axis_name: str | None = None,
    masked: bool = False,
    narrow: Parameters | None = None,
) -> tuple[Parameters, dict[str, Float[Array, ""]]]:
    """Returns the gradients of A micro-batches, averaged, of the parameters that are trained.

    Args:
        state: before the step.
        batch: inputs and targets of this device; also what rows have ``beside`` them, see
            ``language_model_loss``.
        key: of this step's dropout, the same on every device: each draws the masks of its own rows.
        definition: the model without its parameters.
        optimizer: its settings.
        compute_dtype: what parameters are cast to for the forward and backward pass; None leaves
            them. Gradients are cast back.
        axis_name: of the pmap axis over which losses and gradients are averaged.
        masked: targets below 0 do not count; the loss is the mean over those of all micro-batches
            and devices that do.
        narrow: the parameters cast to ``compute_dtype``, from whoever has them already.

    Returns:
        The gradients, and ``train_loss`` (nats per token, with what z-loss, label
        smoothing and balance loss make of it), ``grad_norm`` (before clipping) and
        ``learning_rate``; with ``noise_scale`` also ``part_grad_norm``, the root of the mean square
        of the norms of the gradients of each micro-batch on each device.
    """
    count, rows = batch[0].shape[:2]
    first_row = None if axis_name is None else jax.lax.axis_index(axis_name) * rows

    trained = trained_parameters(state.parameters)
    if narrow is None:
        narrow = cast_parameters(state.parameters, compute_dtype)

    def loss(
        trained: Parameters, micro: Any, index: Any, first_row: Array | None
    ) -> Float[Array, ""]:
        micro_key = None if key is None else jax.random.fold_in(key, index)
        inputs, targets, *beside = micro
        return language_model_loss(
            definition,
            {**narrow, **trained},
            inputs,
            targets,
            micro_key,
            first_row=first_row,
            beside=beside[0] if beside else None,
            divisor=divisor,
            losses=losses,
            axis_name=axis_name,
        )

    def differentiate_part(micro: Any, index: Any, first_row: Any) -> tuple[Any, Any]:
        at = {name: narrow[name] for name in trained}
        value, gradients = jax.value_and_grad(loss)(at, micro, index, first_row)
        return value, {name: g.astype(trained[name].dtype) for name, g in gradients.items()}

    def differentiate(micro: Any, index: Any) -> tuple[Any, Any, Any]:
        parts = count_parts(rows, batch[0].shape[2]) if can_be_cut else 1
        if parts == 1:
            value, gradients = differentiate_part(micro, index, first_row)
        else:
            before = 0 if first_row is None else first_row
            value, gradients = _add_parts(
                lambda part, row: differentiate_part(part, index, before + row),
                micro,
                parts,
                trained,
            )
            if not masked:
                value, gradients = jax.tree.map(lambda x: x / parts, (value, gradients))
        square = jnp.square(global_norm(gradients)) if optimizer.noise_scale else None
        return value, gradients, square

    losses = functools.partial(
        token_losses, z_loss=optimizer.z_loss, label_smoothing=optimizer.label_smoothing
    )

    divisor = _mean_counted(batch[1], axis_name) if masked else None
    # How experts are used is a matter of the whole batch.
    can_be_cut = not merge(definition, narrow).config.feed_forward.experts.router.balance_loss
    first_micro = tuple(x[0] for x in batch)
    if count == 1:
        value, gradients, square = differentiate(first_micro, 0)
    else:

        def accumulate(total: Any, micro: Any) -> tuple[Any, None]:
            micro_batch, index = micro
            return jax.tree.map(jnp.add, total, differentiate(micro_batch, index)), None

        first = differentiate(first_micro, 0)
        rest = (tuple(x[1:] for x in batch), jnp.arange(1, count))
        total, _ = jax.lax.scan(accumulate, first, rest)
        value, gradients, square = jax.tree.map(lambda x: x / count, total)
    if axis_name is not None:
        parts = (value, _compute_wide(gradients), square)
        value, gradients, square = mean_over(parts, axis_name)

    metrics = {
        "train_loss": value,
        "grad_norm": global_norm(gradients),
        "learning_rate": learning_rate(optimizer, state.step).astype(value.dtype),
    }
    if square is not None:
        metrics["part_grad_norm"] = jnp.sqrt(square)
    return gradients, metrics


def _add_parts(
    differentiate: Callable[[Any, Array], tuple[Array, Parameters]],
    micro: Sequence[Array],
    parts: int,
    trained: Parameters,
) -> tuple[Array, Parameters]:
    """Returns the sums of losses and gradients of the equal parts of a micro-batch.

    Args:
        differentiate: from a part and the number of its first row to its loss and gradients.
        micro: arrays whose first dimension is cut.
        parts: how many.
        trained: what the gradients are like.
    """
    rows = len(micro[0]) // parts
    cut = tuple(x.reshape(parts, rows, *x.shape[1:]) for x in micro)
    dtype = jnp.promote_types(next(iter(trained.values())).dtype, jnp.float32)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        value, gradients = differentiate(*part)
        return jax.tree.map(jnp.add, total, (value.astype(dtype), gradients)), None

    start = jnp.zeros((), dtype), jax.tree.map(jnp.zeros_like, dict(trained))
    total, _ = jax.lax.scan(add, start, (cut, rows * jnp.arange(parts)))
    value, gradients = total
    return value, gradients


def evaluation_step(
    parameters: Parameters,
    inputs: Int[Array, "B T"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    beside: Int[Array, "B _"] | None = None,
    *,
    definition: Definition,
    compute_dtype: jnp.dtype | None = None,
) -> Float[Array, ""]:
    """Returns the sum of the losses that ``mask`` keeps, in nats, without dropout.

    ``beside`` is that of ``language_model_loss``.
    """
    model = merge(definition, gather_outside_blocks(cast_parameters(parameters, compute_dtype)))
    model.eval()
    logits = model.logits(_run(model, inputs, beside)[0])
    return jnp.sum(token_losses(logits, targets) * mask)


def _run(
    model: TransformerLM | EncoderDecoder,
    inputs: Int[Array, "B T"],
    beside: Int[Array, "B _"] | None,
    *,
    return_routing: bool = False,
) -> tuple[Float[Array, "B T D"], list[Any]]:
    """Returns the states before the head, and what routers of experts chose if that is wanted.

    Arguments as in ``language_model_loss``.
    """
    if isinstance(model, EncoderDecoder):
        assert beside is not None
        is_token = (beside >= 0)[:, None, None, :]
        memory = model.encode(jnp.maximum(beside, 0), is_token)
        return model.decode(inputs, memory, memory_mask=is_token), []
    inside: dict[str, Any] = {}
    if beside is not None:
        inside = {"mask": document_mask(beside), "positions": document_positions(beside)}
    found = model.hidden(inputs, **inside, return_routing=return_routing)
    return found if return_routing else (found, [])


def _mean_counted(targets: Int[Array, "A B T"], axis_name: str | None) -> Float[Array, ""]:
    """How many targets of a micro-batch on one device count, on average; more than 0."""
    counted = jnp.sum(targets >= 0).astype(jnp.result_type(float))
    if axis_name is not None:
        counted = mean_over(counted, axis_name)
    return jnp.maximum(counted, 1e-9) / len(targets)


def _compute_wide(gradients: Parameters) -> Parameters:
    """Returns the same gradients, computed so that those of narrowing layers are fast on CPUs.

    Where the result has more rows than columns, XLA's product xᵀ g takes up to 1.7 times as long
    there as (gᵀ x)ᵀ, and only a barrier keeps XLA from making the second into the first. It pays
    where the result is copied anyway, as before a sum over devices.
    """

    def compute_wide(gradient: Array) -> Array:
        return jax.lax.optimization_barrier(gradient.T).T

    return {
        name: jax.lax.platform_dependent(gradient, cpu=compute_wide, default=lambda same: same)
        if name.endswith(".kernel") and gradient.shape[0] > gradient.shape[-1]
        else gradient
        for name, gradient in gradients.items()
    }
