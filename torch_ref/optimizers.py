"""Optimizers with clipping, decay groups and schedule, by PyTorch's own pieces where it has them.

Each has a setting's name in ``config_optimizers.OPTIMIZERS``.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_ref.adapters import trained_parameters
from torch_ref.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Returns the rate of a step: linear warm-up, then ``schedule``.

    At step s (from 0) of ``warmup_steps`` W the rate is learning_rate · (s + 1) / (W + 1); from W
    on it falls to ``min_learning_rate`` at ``decay_steps``: along half a cosine (arXiv 1608.03983,
    eq. 5), along a line, or along a line over the last ``decay_share`` of these steps (wsd, arXiv
    2405.18392, section 3). With ``decay_steps`` None, or constant, it stays.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.decay_steps is None or config.schedule == "constant":
        return config.learning_rate
    span = max(config.decay_steps - config.warmup_steps, 1)
    share = min(max((step - config.warmup_steps) / span, 0), 1)
    if config.schedule == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * share))
    elif config.schedule == "linear":
        height = 1 - share
    else:
        height = min((1 - share) / config.decay_share, 1)
    return config.min_learning_rate + height * (config.learning_rate - config.min_learning_rate)


def decay_mask(module: torch.nn.Module) -> dict[str, bool]:
    """Returns which parameters decay: those of two or more dimensions, but norms and biases."""
    # A norm's weight has two dimensions where it has a row a head, a bias with a row an expert.
    norms = {path for path, owner in module.named_modules() if hasattr(owner, "eps")}
    return {
        name: parameter.ndim >= 2
        and name.rpartition(".")[0] not in norms
        and not name.endswith("bias")
        for name, parameter in module.named_parameters()
    }


def hidden_matrices(module: torch.nn.Module) -> dict[str, bool]:
    """Returns which parameters Muon updates: the weights of the linear layers inside blocks.

    Embeddings, heads, norms and biases are not among them (Jordan et al., "Muon: An optimizer for
    hidden layers in neural networks", kellerjordan.github.io/posts/muon, 2024).
    """
    linear = {
        f"{path}.weight"
        for path, owner in module.named_modules()
        if isinstance(owner, torch.nn.Linear) and "blocks" in path.split(".")
    }
    return {name: name in linear for name, _ in module.named_parameters()}


def global_norm(module: torch.nn.Module) -> torch.Tensor:
    """Returns sqrt(Σ g²) over every element of every gradient."""
    return torch.nn.utils.get_total_norm(
        [p.grad for p in module.parameters() if p.grad is not None]
    )


def clip_by_global_norm(module: torch.nn.Module, max_norm: float) -> torch.Tensor:
    """Scales gradients by min(1, max_norm / (norm + 1e-6)) in place; returns the norm before."""
    return torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)


def orthogonalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns about U Vᵀ of x = U S Vᵀ: five Newton-Schulz steps, whose factors are Jordan's.

    The singular values of the result lie between 0.7 and 1.2, but for those that were tiny. The
    steps are computed in the dtype of x, where ``torch.optim.Muon`` rounds to bfloat16.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / (torch.linalg.norm(x) + eps)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


class _Muon(torch.optim.Optimizer):
    """Muon for the groups that are ``hidden``, AdamW for the others (Jordan et al., 2024).

    Nesterov momentum, corrected for its beginning at zero as in optax; the orthogonal matrix is
    scaled by 0.2 · sqrt(max(I, O)), so that AdamW's learning rate serves (arXiv 2502.16982, eq. 4).
    """

    def __init__(self, params: Any, config: OptimizerConfig):
        settings = {
            "lr": config.learning_rate,
            "betas": (config.beta1, config.beta2),
            "momentum": config.momentum_rate,
            "eps": config.eps,
        }
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one update of every parameter that has a gradient."""
        for group, parameter, state in _with_gradients(self):
            state["step"] = state.get("step", torch.zeros(())) + 1
            move = (_move_hidden if group["hidden"] else _move_rest)(group, parameter, state)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(move, alpha=-group["lr"])


def _with_gradients(optimizer: torch.optim.Optimizer) -> list[tuple[Any, Any, Any]]:
    """Returns group, parameter and state of every parameter that has a gradient."""
    return [
        (group, parameter, optimizer.state[parameter])
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]


def _update_mean(state: Any, name: str, value: torch.Tensor, rate: float) -> torch.Tensor:
    """Returns the decayed mean of that name, which ``value`` was added to."""
    if name not in state:
        state[name] = torch.zeros_like(value)
    mean: torch.Tensor = state[name].mul_(rate).add_(value, alpha=1 - rate)
    return mean


def _move_hidden(group: Any, parameter: torch.Tensor, state: Any) -> torch.Tensor:
    gradient, rate, step = parameter.grad, group["momentum"], float(state["step"])
    assert gradient is not None
    mean = _update_mean(state, "exp_avg", gradient, rate)
    ahead = rate / (1 - rate ** (step + 1)) * mean + (1 - rate) / (1 - rate**step) * gradient
    return 0.2 * math.sqrt(max(gradient.shape)) * orthogonalize(ahead, group["eps"])


def _move_rest(group: Any, parameter: torch.Tensor, state: Any) -> torch.Tensor:
    gradient, (beta1, beta2), step = parameter.grad, group["betas"], float(state["step"])
    assert gradient is not None
    first = _update_mean(state, "exp_avg", gradient, beta1) / (1 - beta1**step)
    second = _update_mean(state, "exp_avg_sq", gradient.square(), beta2) / (1 - beta2**step)
    return first / (second.sqrt() + group["eps"])


class _Lion(torch.optim.Optimizer):
    """Moves by the sign of a moment and the gradient (arXiv 2302.06675, algorithm 2)."""

    def __init__(self, params: Any, config: OptimizerConfig):
        settings = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2)}
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one update of every parameter that has a gradient."""
        for group, parameter, state in _with_gradients(self):
            beta1, beta2 = group["betas"]
            gradient = parameter.grad
            before = state.get("exp_avg", torch.zeros_like(gradient))
            move = torch.sign((1 - beta1) * gradient + beta1 * before)
            state["step"] = state.get("step", torch.zeros(())) + 1
            _update_mean(state, "exp_avg", gradient, beta2)
            parameter.add_(move + group["weight_decay"] * parameter, alpha=-group["lr"])


class _Adafactor(torch.optim.Optimizer):
    """Adafactor without momentum (arXiv 1804.04235, algorithms 4 and 5), as optax has it.

    A step's size is the learning rate times the root mean square of the parameter, at least 1e-3.
    A matrix whose two dimensions are 128 or more keeps the means of its rows and of its columns.
    ``torch.optim.Adafactor`` bounds the rate by 1/sqrt(step), and the root elsewhere.
    """

    def __init__(self, params: Any, config: OptimizerConfig):
        super().__init__(params, {"lr": config.learning_rate})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one update of every parameter that has a gradient."""
        for group, parameter, state in _with_gradients(self):
            gradient = parameter.grad
            state["step"] = state.get("step", torch.zeros(())) + 1
            rate = 1 - float(state["step"]) ** -0.8
            square = gradient.square() + 1e-30
            if gradient.ndim == 2 and min(gradient.shape) >= 128:
                rows = _update_mean(state, "row_var", square.mean(1, keepdim=True), rate)
                columns = _update_mean(state, "col_var", square.mean(0, keepdim=True), rate)
                move = gradient * (rows / rows.mean()).pow(-0.5) * columns.pow(-0.5)
            else:
                move = gradient * _update_mean(state, "variance", square, rate).pow(-0.5)
            move = move / move.square().mean().sqrt().clamp(min=1.0)
            move = move * parameter.square().mean().sqrt().clamp(min=1e-3)
            parameter.add_(move + group["weight_decay"] * parameter, alpha=-group["lr"])


def make_optimizer(module: torch.nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Returns the optimizer that the settings name; one group of parameters decays, one does not.

    AdamW (arXiv 1711.05101) and SGD are ``torch.optim``'s own; AdamW takes the fused kernel where
    torch has one for the parameters' device and dtype. Muon has three groups.
    """
    decays, hidden = decay_mask(module), hidden_matrices(module)
    return optimizer_of(trained_parameters(module), decays, hidden, config)


def optimizer_of(
    parameters: Mapping[str, torch.nn.Parameter],
    decays: Mapping[str, bool],
    hidden: Mapping[str, bool],
    config: OptimizerConfig,
) -> torch.optim.Optimizer:
    """Returns the optimizer that the settings name, of parameters that no module need hold.

    Args:
        parameters: by name.
        decays: which of them decay.
        hidden: which of them Muon updates.
        config: the settings.
    """
    is_muon = config.optimizer == "muon"
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for of_hidden, decay in ((True, True), (False, True), (False, False)):
        group = {"params": [], "weight_decay": config.weight_decay if decay else 0.0}
        groups[of_hidden, decay] = group | ({"hidden": of_hidden} if is_muon else {})
    for name, parameter in parameters.items():
        groups[is_muon and hidden[name], decays[name]]["params"].append(parameter)
    return _MAKERS[config.optimizer]([g for g in groups.values() if g["params"]], config)


def _adamw(groups: Any, config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def _sgd(groups: Any, config: OptimizerConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum_rate)


_MAKERS: dict[str, Callable[[Any, OptimizerConfig], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "muon": _Muon,
    "lion": _Lion,
    "adafactor": _Adafactor,
    "sgd": _sgd,
}
