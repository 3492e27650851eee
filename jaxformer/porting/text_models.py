"""Checkpoints that must hold a whole model of texts, for what writes text or looks inside."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.errors import UsageError
from jaxformer.porting.checkpoint import Checkpoint, open_checkpoint
from jaxformer.porting.mapping.casts import cast
from jaxformer.porting.mapping.plans import Plan


def load_model(
    path: str | Path, **options: Any
) -> tuple[TransformerLMConfig, dict[str, np.ndarray], str | None]:
    """Reads the language model in a checkpoint.

    Args:
        path: see ``open_checkpoint``.
        options: of ``open_checkpoint``.

    Returns:
        Its config, its arrays by their paths in ``TransformerLM``, and its vocabulary, if known.

    Raises:
        UsageError: it holds something other than a ``TransformerLM``.
        JaxformerError: what ``open_checkpoint`` and ``Checkpoint.plan`` raise.
    """
    checkpoint = open_checkpoint(path, **options)
    plan = plan_language_model(checkpoint)
    arrays = {name: tensor.read() for name, tensor in plan.tensors.items()}
    return plan.module.config, arrays, checkpoint.vocabulary


def plan_language_model(checkpoint: Checkpoint) -> Plan:
    """Returns the import plan of a checkpoint that must hold a ``TransformerLM``.

    Raises:
        UsageError: it holds something else.
    """
    plan = checkpoint.plan()
    _check_language_model(checkpoint, plan)
    return plan


def plan_text_model(checkpoint: Checkpoint) -> Plan:
    """Returns the import plan of a checkpoint that must hold a whole model of tokens.

    Raises:
        UsageError: it holds neither a ``TransformerLM`` nor an ``EncoderDecoder``.
    """
    plan = checkpoint.plan()
    config = getattr(plan.module, "config", None)
    if isinstance(config, EncoderDecoderConfig) and config.reads_features:
        raise UsageError(
            f"{checkpoint.path} holds a {plan.origin.kind}, which reads features and no tokens: "
            "give them to jaxformer.generate_target"
        )
    if not isinstance(config, EncoderDecoderConfig):
        _check_language_model(checkpoint, plan)
    return plan


def _check_language_model(checkpoint: Checkpoint, plan: Plan) -> None:
    if not isinstance(getattr(plan.module, "config", None), TransformerLMConfig):
        raise UsageError(
            f"{checkpoint.path} holds a {plan.origin.kind}, which is no language model"
        )


def in_float32(plan: Plan) -> Plan:
    """Returns a plan whose float64 weights are rounded to float32, in which JAX computes."""
    wide = {name: t for name, t in plan.tensors.items() if t.dtype == np.float64}
    narrow, _ = cast(wide, np.dtype(np.float32))
    return dataclasses.replace(plan, tensors={**plan.tensors, **narrow})
