"""How a whole model of jaxformer is called, so that it computes all that its reference does."""

from collections.abc import Sequence
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.config_vision import VisionTransformerConfig


def call_candidate(module: Any, inputs: Sequence[Any], **named: Any) -> Any:
    """Calls a model; one that pools by a method of its own pools as well.

    References pool in the same call. What is no model of jaxformer is just called.
    """
    output = module(*inputs, **named)
    if _pools_by_itself(module):
        module.pooled(output)
    return output


def _pools_by_itself(module: Any) -> bool:
    config = getattr(module, "config", None)
    if isinstance(config, TransformerLMConfig):
        return bool(config.head.pooler)
    if isinstance(config, VisionTransformerConfig):
        parts = (module.pooler, module.pooled_norm, module.pooling)
        return module.classifier is None and any(parts)
    return False
