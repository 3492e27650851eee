"""One training step and one evaluation step, the way PyTorch users write them."""

import dataclasses
from collections.abc import Callable

import torch

from torch_ref.config import OptimizerConfig
from torch_ref.losses import cross_entropy, token_losses
from torch_ref.masks import document_mask, document_positions
from torch_ref.optimizers import clip_by_global_norm, global_norm, learning_rate, make_optimizer
from torch_ref.transformer_lm import TransformerLM


@dataclasses.dataclass
class TrainState:
    """Everything that a step changes, in place.

    Attributes:
        model: with its parameters.
        optimizer_state: torch's optimizer.
        step: how many updates were made.
    """

    model: TransformerLM
    optimizer_state: torch.optim.Optimizer
    step: int

    @classmethod
    def create(cls, model: TransformerLM, optimizer: OptimizerConfig) -> "TrainState":
        """Returns the state before the first step."""
        return cls(model, make_optimizer(model, optimizer), 0)


def language_model_loss(
    model: TransformerLM,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    compute_dtype: torch.dtype | None = None,
    *,
    segments: torch.Tensor | None = None,
    divisor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the mean cross-entropy of the model in training mode, in nats per token.

    Args:
        model: the module.
        inputs: token ids (B, T).
        targets: the ids that follow them.
        compute_dtype: what parameters are cast to for the forward and backward pass; None leaves
            them. Gradients come back in the parameters' own dtype.
        segments: which document each token is of, (B, T). Attention then stays inside documents,
            and positions begin anew in each.
        divisor: where given, targets below 0 do not count, and the sum of the others' losses is
            divided by this number.
    """
    model.train()
    logits = _logits(model, inputs, compute_dtype, segments)
    if divisor is None:
        return cross_entropy(logits, targets)
    return torch.sum(token_losses(logits, targets) * (targets >= 0)) / divisor


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
        batch: inputs and targets, each (A, B, T); also segments, where rows hold documents.
        optimizer: its settings.
        compute_dtype: see ``language_model_loss``.
        loss_function: called as that is; ``torch.compile`` of it, for example.
        masked: targets below 0 do not count; the loss is the mean over those of all micro-batches
            that do.

    Returns:
        The state, and ``train_loss`` (nats per token), ``grad_norm`` (before clipping) and
        ``learning_rate``.
    """
    rate = learning_rate(optimizer, state.step)
    for group in state.optimizer_state.param_groups:
        group["lr"] = rate
    state.optimizer_state.zero_grad(set_to_none=True)
    count = batch[0].shape[0]
    total = torch.zeros(())
    more: dict[str, torch.Tensor] = {}
    if masked:
        more["divisor"] = torch.sum(batch[1] >= 0).double().clamp(min=1e-9) / count
    for inputs, targets, *segments in zip(*batch, strict=True):
        if segments:
            more["segments"] = segments[0]
        loss = loss_function(state.model, inputs, targets, compute_dtype, **more) / count
        loss.backward()
        total = total + loss.detach()
    if optimizer.clip_norm is None:
        norm = global_norm(state.model)
    else:
        norm = clip_by_global_norm(state.model, optimizer.clip_norm)
    state.optimizer_state.step()
    state.step += 1
    return state, {
        "train_loss": total,
        "grad_norm": norm,
        "learning_rate": torch.tensor(rate, dtype=torch.float64),
    }


@torch.no_grad()
def evaluation_step(
    model: TransformerLM,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    mask: torch.Tensor,
    segments: torch.Tensor | None = None,
    *,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns the sum of the losses that ``mask`` keeps, in nats, without dropout.

    ``segments`` are those of ``language_model_loss``.
    """
    model.eval()
    logits = _logits(model, inputs, compute_dtype, segments)
    return torch.sum(token_losses(logits, targets) * mask)


def _logits(
    model: TransformerLM,
    inputs: torch.Tensor,
    dtype: torch.dtype | None,
    segments: torch.Tensor | None,
) -> torch.Tensor:
    """The logits of the model with its parameters cast to ``dtype``; None leaves them."""
    inside: dict[str, torch.Tensor] = {}
    if segments is not None:
        inside = {"mask": document_mask(segments), "positions": document_positions(segments)}
    if dtype is None:
        logits: torch.Tensor = model(inputs, **inside)
        return logits
    cast = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, cast, (inputs,), inside)
