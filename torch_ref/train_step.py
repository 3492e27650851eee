"""One training step and one evaluation step, the way PyTorch users write them."""

import dataclasses
from collections.abc import Callable

import torch

from torch_ref.config import OptimizerConfig
from torch_ref.losses import cross_entropy, token_losses
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
    optimizer_state: torch.optim.AdamW
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
) -> torch.Tensor:
    """Returns the mean cross-entropy of the model in training mode, in nats per token.

    Args:
        model: the module.
        inputs: token ids (B, T).
        targets: the ids that follow them.
        compute_dtype: what parameters are cast to for the forward and backward pass; None leaves
            them. Gradients come back in the parameters' own dtype.
    """
    model.train()
    return cross_entropy(_logits(model, inputs, compute_dtype), targets)


def train_step(
    state: TrainState,
    batch: tuple[torch.Tensor, torch.Tensor],
    *,
    optimizer: OptimizerConfig,
    compute_dtype: torch.dtype | None = None,
    loss_function: Callable[..., torch.Tensor] = language_model_loss,
) -> tuple[TrainState, dict[str, torch.Tensor]]:
    """Makes one AdamW update from the gradients of A micro-batches, averaged.

    Args:
        state: changed in place and returned.
        batch: inputs and targets, each (A, B, T).
        optimizer: its settings.
        compute_dtype: see ``language_model_loss``.
        loss_function: called as that is; ``torch.compile`` of it, for example.

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
    for inputs, targets in zip(*batch, strict=True):
        loss = loss_function(state.model, inputs, targets, compute_dtype) / count
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
    *,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Returns the sum of the losses that ``mask`` keeps, in nats, without dropout."""
    model.eval()
    return torch.sum(token_losses(_logits(model, inputs, compute_dtype), targets) * mask)


def _logits(model: TransformerLM, inputs: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """The logits of the model with its parameters cast to ``dtype``; None leaves them."""
    if dtype is None:
        logits: torch.Tensor = model(inputs)
        return logits
    cast = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
    return torch.func.functional_call(model, cast, (inputs,))
