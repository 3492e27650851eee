"""One training step and one evaluation step, the way PyTorch users write them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from torch_ref.adapters import trained_parameters
from torch_ref.config import OptimizerConfig
from torch_ref.encoder_decoder import EncoderDecoder
from torch_ref.experts import balance_loss
from torch_ref.losses import token_losses
from torch_ref.masks import document_mask, document_positions
from torch_ref.optimizers import clip_by_global_norm, global_norm, learning_rate, make_optimizer
from torch_ref.transformer_lm import TransformerLM

Model = TransformerLM | EncoderDecoder


@dataclasses.dataclass
class TrainState:
    """Everything that a step changes, in place.

    Attributes:
        model: with its parameters.
        optimizer_state: torch's optimizer.
        step: how many updates were made.
        ema: the moving average of the parameters by name; None keeps none.
    """

    model: Model
    optimizer_state: torch.optim.Optimizer
    step: int
    ema: dict[str, torch.Tensor] | None = None

    @classmethod
    def create(cls, model: Model, optimizer: OptimizerConfig) -> "TrainState":
        """Returns the state before the first step; what is not trained gets no gradients."""
        trained = trained_parameters(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        first = {name: p.detach().clone() for name, p in trained.items()}
        average = None if optimizer.ema is None else first
        return cls(model, make_optimizer(model, optimizer), 0, average)


def language_model_loss(
    model: Model,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    compute_dtype: torch.dtype | None = None,
    *,
    beside: torch.Tensor | None = None,
    divisor: torch.Tensor | None = None,
    losses: Callable[..., torch.Tensor] = token_losses,
) -> torch.Tensor:
    """Returns the mean cross-entropy of the model in training mode, in nats per token.

    With what the config's ``balance_loss`` makes of how its experts are used, by all tokens of the
    batch, those that do not count included.

    Args:
        model: the module.
        inputs: token ids (B, T), which a decoder reads.
        targets: the ids that follow them.
        compute_dtype: what parameters are cast to for the forward and backward pass; None leaves
            them. Gradients come back in the parameters' own dtype.
        beside: of a language model, which document each token is of, (B, T), or None. Attention
            then stays inside documents, and positions begin anew in each. Of an encoder and
            decoder, the ids of the sources, (B, S), below 0 on padding, which nothing attends to.
        divisor: where given, targets below 0 do not count, and the sum of the others' losses is
            divided by this number.
        losses: from logits and targets to the loss of each token.
    """
    model.train()
    weight = model.config.feed_forward.experts.router.balance_loss
    logits, routings = _run(model, inputs, compute_dtype, beside, return_routing=bool(weight))
    if divisor is None:
        loss = losses(logits, targets).mean()
    else:
        loss = torch.sum(losses(logits, targets) * (targets >= 0)) / divisor
    return loss + weight * balance_loss(routings) if routings else loss


def train_step(
    state: TrainState,
    batch: tuple[torch.Tensor, ...],
    *,
    optimizer: OptimizerConfig,
    compute_dtype: torch.dtype | None = None,
    loss_function: Callable[..., torch.Tensor] = language_model_loss,
    masked: bool = False,
) -> tuple[TrainState, dict[str, torch.Tensor]]:
    """Makes one update from the gradients of A micro-batches, averaged.

    Args:
        state: changed in place and returned.
        batch: inputs and targets, each (A, B, T); also what rows have ``beside`` them, see
            ``language_model_loss``.
        optimizer: its settings.
        compute_dtype: see ``language_model_loss``.
        loss_function: called as that is; ``torch.compile`` of it, for example.
        masked: targets below 0 do not count; the loss is the mean over those of all micro-batches
            that do.

    Returns:
        The state, and ``train_loss`` (nats per token, with what z-loss and label smoothing make of
        it), ``grad_norm`` (before clipping) and ``learning_rate``; with ``noise_scale`` also
        ``part_grad_norm``, the root of the mean square of the norms of the micro-batches'
        gradients.
    """
    rate = learning_rate(optimizer, state.step)
    for group in state.optimizer_state.param_groups:
        group["lr"] = rate
    state.optimizer_state.zero_grad(set_to_none=True)
    count = batch[0].shape[0]
    total, squares = torch.zeros(()), torch.zeros((), dtype=torch.float64)
    before: list[Any] = []
    more: dict[str, Any] = {}
    if optimizer.z_loss or optimizer.label_smoothing:
        more["losses"] = functools.partial(
            token_losses, z_loss=optimizer.z_loss, label_smoothing=optimizer.label_smoothing
        )
    if masked:
        more["divisor"] = torch.sum(batch[1] >= 0).double().clamp(min=1e-9) / count
    for inputs, targets, *beside in zip(*batch, strict=True):
        if beside:
            more["beside"] = beside[0]
        loss = loss_function(state.model, inputs, targets, compute_dtype, **more) / count
        loss.backward()
        total = total + loss.detach()
        if optimizer.noise_scale:
            sums = [p.grad.clone() for p in state.model.parameters() if p.grad is not None]
            for now, then in zip(sums, before or [0] * len(sums), strict=True):
                squares += torch.sum((count * (now - then)).square()) / count
            before = sums
    if optimizer.clip_norm is None:
        norm = global_norm(state.model)
    else:
        norm = clip_by_global_norm(state.model, optimizer.clip_norm)
    state.optimizer_state.step()
    state.step += 1
    if state.ema is not None and optimizer.ema is not None:
        for name, parameter in trained_parameters(state.model).items():
            state.ema[name].mul_(optimizer.ema).add_(parameter.detach(), alpha=1 - optimizer.ema)
    metrics = {
        "train_loss": total,
        "grad_norm": norm,
        "learning_rate": torch.tensor(rate, dtype=torch.float64),
    }
    return state, metrics | ({"part_grad_norm": squares.sqrt()} if optimizer.noise_scale else {})


@torch.no_grad()
def evaluation_step(
    model: Model,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor,
    beside: torch.Tensor | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns the sum of the losses that ``mask`` keeps, in nats, without dropout.

    ``beside`` is that of ``language_model_loss``.
    """
    model.eval()
    logits, _ = _run(model, inputs, compute_dtype, beside)
    return torch.sum(token_losses(logits, targets) * mask)


def _run(
    model: Model,
    inputs: torch.Tensor,
    dtype: torch.dtype | None,
    beside: torch.Tensor | None,
    *,
    return_routing: bool = False,
) -> tuple[torch.Tensor, list[Any]]:
    """Returns the logits, and what routers of experts chose if that is wanted.

    The model has its parameters cast to ``dtype``; None leaves them.
    """
    arguments: tuple[torch.Tensor, ...] = (inputs,)
    more: dict[str, Any] = {}
    if isinstance(model, EncoderDecoder):
        assert beside is not None
        is_token = (beside >= 0)[:, None, None, :]
        arguments = (beside.clamp(min=0), inputs)
        more = {"source_mask": is_token, "memory_mask": is_token}
        return_routing = False
    else:
        more = {"return_routing": return_routing}
        if beside is not None:
            more |= {"mask": document_mask(beside), "positions": document_positions(beside)}
    if dtype is None:
        found = model(*arguments, **more)
    else:
        cast = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
        found = torch.func.functional_call(model, cast, arguments, more)
    return found if return_routing else (found, [])
