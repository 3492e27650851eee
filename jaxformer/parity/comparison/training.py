"""Compares training step by step: the first step, and parameter, at which two models diverge."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np

from jaxformer.config import OptimizerConfig
from jaxformer.errors import UsageError
from jaxformer.parity.comparison.language_models import (
    check_batch,
    check_models,
    check_parameters,
    check_suitable,
    padding_ids,
)
from jaxformer.parity.comparison.training_runs import (
    CandidateTraining,
    ReferenceTraining,
    Weights,
)
from jaxformer.parity.findings import Difference, Step
from jaxformer.parity.matching.positions import match_alibi_slopes, share_tables_of_length
from jaxformer.parity.recording import jax_modules
from jaxformer.parity.recording.torch_values import everything_in_float64, experts_one_by_one
from jaxformer.parity.recording.whole_models import call_module
from jaxformer.parity.report.report import Report
from jaxformer.parity.tolerance import allowed_error
from jaxformer.porting.api import build, import_plan

# Inputs and targets (B, T), integers.
Pair = tuple[np.ndarray, np.ndarray]


def compare_training(
    torch_module: Any,
    jax_module: Any = None,
    batches: Callable[[int], Pair] | None = None,
    *,
    steps: int = 20,
    optimizer: OptimizerConfig | None = None,
    dialect: str | None = None,
    force: bool = False,
    dropout: bool = False,
    torch_call: Callable[[Any, Any], Any] | None = None,
    about: Mapping[str, Any] | None = None,
) -> Report:
    """Trains two language models from their weights on the same batches, in float64.

    Each step is an update of ``optimizer`` on the mean cross-entropy, with z-loss and label
    smoothing where it has them; its average of the weights is not compared. Both sides update the
    candidate's parameters: a fused matrix of the reference as the matrices that it is made of.

    How far float64's rounding may move a trajectory is measured: the reference is trained a second
    time in float32, and the line is drawn as in ``judge``. Parameters whose gradient is zero in
    exact arithmetic (key biases) are moved by rounding alone, which Adam scales up to whole steps;
    they are not judged.

    Args:
        torch_module: the reference: token ids (B, T) to logits (B, T, V); it is not changed.
        jax_module: the candidate; default: what ``from_torch`` makes of the reference.
        batches: returns inputs and targets (B, T) of a step, given its number; default random ones
            of 2 · 16 tokens, or as many as fit, without padding, which PyTorch does not train.
            Targets of -100 do not count, as in PyTorch.
        steps: the number of steps, at least 1.
        optimizer: its settings; default AdamW at 1e-3, with clipping and no warm-up.
        dialect: the name of the reference's dialect; default found by its class.
        force: whether the dialect may contradict the reference's config.
        dropout: whether to train with dropout, both sides dropping the same units.
        torch_call: how to call the reference, given it and a tensor of ids.
        about: notes for the report.

    Raises:
        UsageError: torch is missing, ``steps`` is less than 1, the models are no language models or
            do not fit one another, a batch is not made of their tokens, or with ``dropout``, they
            call dropout in different places.
    """
    check_models(torch_module, jax_module, "batches")
    if not (batches is None or callable(batches)):
        raise UsageError(
            f"batches must be a function of a step's number: got {type(batches).__name__}"
        )
    if steps < 1:
        raise UsageError(f"steps must be at least 1: got {steps}")
    call = torch_call or call_module
    config = optimizer or OptimizerConfig(warmup_steps=0, learning_rate=1e-3)
    with (
        jax.enable_x64(True),
        match_alibi_slopes(torch_module),
        experts_one_by_one(torch_module),
    ):
        plan = import_plan(torch_module, dialect, force=force)
        module = build(plan) if jax_module is None else jax_module
        settings: Any = getattr(module, "config", None)
        check_suitable("train", settings)
        check_parameters(plan.module, module)
        draw = batches or _random_batches(settings, padding_ids(torch_module))
        batch = check_batch(draw(0), 0, settings)
        reference, reference_low = (
            ReferenceTraining(
                torch_module, plan, config, call, in_float64=in_float64, dropout=dropout
            )
            for in_float64 in (True, False)
        )
        exact = jax_modules.in_dtype(module, "float64")
        with everything_in_float64():
            share_tables_of_length(exact, reference.module, call, batch.inputs.shape[1])
        candidate = CandidateTraining(exact, config, dropout=dropout)
        compared = []
        for number in range(steps):
            batch = check_batch(draw(number), number, settings) if number else batch
            loss, masks = reference.step(number, batch)
            low_loss, _ = reference_low.step(number, batch, masks)
            candidate_loss = candidate.step(batch, masks)
            difference = _judge_loss(candidate_loss, loss, low_loss)
            name, parameter = _worst_parameter(
                {n: np.asarray(a) for n, a in candidate.parameters.items()},
                {n: a for n, a in reference.weights().items() if n not in reference.idle},
                reference_low.weights(),
            )
            of_loss = difference.is_bug or not parameter.is_bug
            difference = difference if of_loss else parameter
            worst = name if difference.is_bug else ""
            compared.append(
                Step(
                    number, candidate_loss, loss, difference, worst=worst, of_parameter=not of_loss
                )
            )
    return Report("train", "float64", (), (), tuple(compared), dict(about or {}))


def _judge_loss(candidate: float, reference: float, reference_low: float) -> Difference:
    """Judges a loss; ``reference_low`` is that of the reference trained in float32."""
    scale, noise = abs(reference), abs(reference_low - reference)
    return Difference(abs(candidate - reference), scale, allowed_error(scale, noise))


def _worst_parameter(
    candidate: Weights, reference: Weights, reference_low: Weights
) -> tuple[str, Difference]:
    """Returns the parameter that differs most, relative to what is allowed; "" if none differs."""
    worst, worst_difference, worst_excess = "", Difference(0.0, 0.0, 0.0), 0.0
    for name, value in reference.items():
        scale = float(np.max(np.abs(value)))
        noise = float(np.max(np.abs(reference_low[name] - value)))
        error = float(np.max(np.abs(candidate[name] - value)))
        allowed = allowed_error(scale, noise)
        if error / allowed > worst_excess:
            worst, worst_excess = name, error / allowed
            worst_difference = Difference(error, scale, allowed)
    return worst, worst_difference


def _random_batches(config: Any, avoided: Collection[int]) -> Callable[[int], Pair]:
    known = np.array([one for one in range(config.vocab_size) if one not in avoided])
    length = min(16, config.context_length)

    def draw(number: int) -> Pair:
        ids = known[np.random.default_rng(number).integers(0, len(known), (2, length + 1))]
        return ids[:, :-1], ids[:, 1:]

    return draw
