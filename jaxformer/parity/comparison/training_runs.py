"""The two sides of a training comparison: an optimizer with clipping on the training loss."""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxformer.config import OptimizerConfig
from jaxformer.errors import UsageError
from jaxformer.layers import inject_keep_masks
from jaxformer.losses import token_losses
from jaxformer.optimizers import make_optimizer
from jaxformer.parameters import merge, split
from jaxformer.parity.comparison.language_models import Batch
from jaxformer.parity.comparison.mirrored_optimizer import MirroredOptimizer
from jaxformer.parity.comparison.shared_dropout import control_torch_dropout, find_dropout_calls
from jaxformer.parity.recording import torch_values
from jaxformer.parity.recording.torch_values import everything_in_float64, first_float
from jaxformer.parity.tolerance import ROUNDOFF
from jaxformer.porting.mapping.plans import Plan

# Parameters in float64, by the candidate's names.
Weights = dict[str, np.ndarray]


class ReferenceTraining:
    """Trains a copy of the reference, in float64 or float32.

    Args:
        module: the reference; it is not changed.
        plan: how it is ported.
        config: of the optimizer.
        call: how to call it, given it and a tensor of ids.
        in_float64: whether to train in float64; else in float32.
        dropout: whether to train with dropout.

    Attributes:
        idle: after the first step in float64, the parameters whose gradient is zero in exact
            arithmetic.
    """

    def __init__(
        self,
        module: Any,
        plan: Plan,
        config: OptimizerConfig,
        call: Callable[[Any, Any], Any],
        *,
        in_float64: bool,
        dropout: bool,
    ):
        import torch_ref.config

        if in_float64:
            self.module = torch_values.in_float64(module)
        else:
            self.module = copy.deepcopy(module).float()
        self.module.train() if dropout else self.module.eval()
        self.plan, self.call, self.in_float64 = plan, call, in_float64
        self.config = torch_ref.config.OptimizerConfig(**dataclasses.asdict(config))
        self.optimizer = MirroredOptimizer(self.module, plan, self.config)
        self.idle: set[str] = set()

    def step(
        self, number: int, batch: Batch, masks: list[np.ndarray] | None = None
    ) -> tuple[float, list[np.ndarray]]:
        """Updates the parameters once.

        Args:
            number: of the step, from 0; also the seed of dropout.
            batch: inputs and targets.
            masks: of dropout, in the order of calls; default drawn.

        Returns:
            The training loss before the update (nats per token), and the masks of dropout.
        """
        import torch

        import torch_ref.losses
        import torch_ref.optimizers

        inputs, targets, counted = map(
            torch.as_tensor, (batch.inputs, batch.targets, batch.counted)
        )
        in_float64 = self.in_float64
        precision = everything_in_float64() if in_float64 else contextlib.nullcontext()
        with precision, control_torch_dropout(number, masks) as used_masks:
            logits = first_float(self.call(self.module, inputs))
            losses = torch_ref.losses.token_losses(
                logits,
                targets,
                z_loss=self.config.z_loss,
                label_smoothing=self.config.label_smoothing,
            )
            loss = losses[counted].mean()
            self.module.zero_grad(set_to_none=True)
            loss.backward()
        if number == 0 and in_float64:
            self._find_idle()
        if self.config.clip_norm is not None:
            torch_ref.optimizers.clip_by_global_norm(self.module, self.config.clip_norm)
        self.optimizer.step(torch_ref.optimizers.learning_rate(self.config, number))
        return float(loss.detach()), used_masks

    def weights(self) -> Weights:
        """Returns a copy of the parameters in the candidate's layout."""
        return self._convert({n: p.detach() for n, p in self.module.named_parameters()})

    def _find_idle(self) -> None:
        gradients = self._convert(
            {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None}
        )
        largest = max(float(np.abs(g).max()) for g in gradients.values())
        self.idle = {
            name
            for name, gradient in gradients.items()
            if float(np.abs(gradient).max()) <= ROUNDOFF["float32"] * largest
        }

    def _convert(self, tensors: Mapping[str, Any]) -> Weights:
        arrays = {n: t.cpu().double().numpy() for n, t in tensors.items()}
        converted: Weights = {}
        for link in self.plan.links:
            if all(name in arrays for name in link.source):
                target = link.to_target([arrays[name] for name in link.source])
                converted.update({n: a.copy() for n, a in zip(link.target, target, strict=True)})
        return converted


class CandidateTraining:
    """Trains the candidate in float64.

    Args:
        module: the candidate, in float64; it is not changed.
        config: of the optimizer.
        dropout: whether to train with dropout.

    Attributes:
        parameters: by name, after the last step.
    """

    def __init__(self, module: Any, config: OptimizerConfig, *, dropout: bool):
        self.definition, self.parameters = split(module)
        self.config, self.dropout = config, dropout
        self.optimizer = make_optimizer(config)
        self.state = self.optimizer.init(self.parameters)
        self._dropout_calls: list[tuple[str, tuple[int, ...]]] | None = None
        self._step = jax.jit(self._update)

    def step(self, batch: Batch, masks: Sequence[np.ndarray]) -> float:
        """Updates the parameters once and returns the loss before it (nats per token).

        Args:
            batch: inputs and targets.
            masks: those that the reference's dropout used.

        Raises:
            UsageError: the two sides call dropout in other places.
        """
        inputs, targets, counted = map(jnp.asarray, (batch.inputs, batch.targets, batch.counted))
        masks_by_path = self._masks_by_path(inputs, masks)
        loss, self.parameters, self.state = self._step(
            self.parameters, self.state, inputs, targets, counted, masks_by_path
        )
        return float(loss)

    def _update(
        self,
        parameters: Any,
        state: Any,
        inputs: Any,
        targets: Any,
        counted: Any,
        masks: dict[str, Any],
    ) -> Any:
        def compute_loss(parameters: Any) -> Any:
            model = merge(self.definition, parameters)
            model.train() if self.dropout else model.eval()
            inject_keep_masks(model, masks)
            losses = token_losses(
                model(inputs),
                targets,
                z_loss=self.config.z_loss,
                label_smoothing=self.config.label_smoothing,
            )
            return jnp.mean(losses, where=counted)

        loss, gradients = jax.value_and_grad(compute_loss)(parameters)
        updates, state = self.optimizer.update(gradients, state, parameters)
        return loss, jax.tree.map(jnp.add, parameters, updates), state

    def _masks_by_path(self, inputs: Any, masks: Sequence[np.ndarray]) -> dict[str, Any]:
        """Returns the masks by path of a dropout module: both sides call them in one order."""
        if not self.dropout:
            return {}
        if self._dropout_calls is None:
            model = merge(self.definition, self.parameters)
            model.train()
            self._dropout_calls = find_dropout_calls(model, inputs)
        reference = [mask.shape for mask in masks]
        if [shape for _, shape in self._dropout_calls] != reference:
            raise UsageError(
                "the two models call dropout in different places: the candidate at "
                + ", ".join(f"{path} {shape}" for path, shape in self._dropout_calls)
                + f"; the reference on {', '.join(map(str, reference))}"
            )
        return {
            path: jnp.asarray(mask)
            for (path, _), mask in zip(self._dropout_calls, masks, strict=True)
        }
