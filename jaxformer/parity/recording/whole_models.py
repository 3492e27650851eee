"""How whole models are called, so that both sides compute all that they have in common."""

import inspect
from collections.abc import Sequence
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.config_vision import VisionTransformerConfig


def gives_last_logits(module: Any) -> bool:
    """Returns whether a model is called as nanoGPT's, ``forward(idx, targets=None)``.

    Without targets it gives the logits of the last position alone, and it has no cache.
    """
    return list(inspect.signature(module.forward).parameters) == ["idx", "targets"]


def call_module(module: Any, *inputs: Any) -> Any:
    """Calls a model whose user has not said how, so that it gives the logits of all positions."""
    if len(inputs) == 1 and gives_last_logits(module):
        # Any targets will do, as the loss is left out; it wants them in one piece.
        return module(inputs[0], inputs[0].contiguous())[0]
    return module(*inputs)


def call_candidate(module: Any, inputs: Sequence[Any], **named: Any) -> Any:
    """Calls a model; one that pools by a method of its own pools as well, for a second result.

    References pool in the same call. What is no model of jaxformer is just called.
    """
    output = module(*inputs, **named)
    return (output, module.pooled(output)) if _pools_by_itself(module) else output


def _pools_by_itself(module: Any) -> bool:
    config = getattr(module, "config", None)
    if isinstance(config, TransformerLMConfig):
        return bool(config.head.pooler)
    if isinstance(config, VisionTransformerConfig):
        parts = (module.pooler, module.pooled_norm, module.pooling)
        return module.classifier is None and any(parts)
    return False
