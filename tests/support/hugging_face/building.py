"""Tiny random models of transformers."""

import json
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from tests.support.hugging_face.case import VOCAB, Case
from tests.support.hugging_face.precision import in_float64


def build(
    kind: str, settings: Mapping[str, Any], *, attention: str = "eager", **arguments: Any
) -> Any:
    """A model of transformers in evaluation mode, from what a config.json holds.

    It is in float32, within ``in_float64`` in float64.
    """
    torch.manual_seed(0)
    cls = getattr(transformers, kind)
    # Through JSON, as from a file.
    config = cls.config_class.from_dict(
        json.loads(json.dumps(settings)), attn_implementation=attention
    )
    # The usual one for experts takes no float64.
    config._experts_implementation = "eager"
    return cls(config, **arguments).eval()


def build_case(case: Case) -> Any:
    """The model of a case with its first weights, in float64, its tables in float32."""
    return exact(_build_case(case).double())


def build_exact(case: Case, weights: Mapping[str, torch.Tensor]) -> Any:
    """The model of a case with these weights, its tables in float64 too."""
    with in_float64():
        model = _build_case(case).double()
    model.load_state_dict(weights)
    return model


def _build_case(case: Case) -> Any:
    settings = {**case.usual, **case.settings}
    return build(case.kind, settings, attention=case.attention, **case.arguments)


def randomize(
    model: Any, std: float = 0.3, embeddings: float = 1.0, copies: Mapping[str, str] | None = None
) -> Any:
    """Every parameter moved away from where it began, those of norms too.

    Args:
        model: of transformers, float64.
        std: how far.
        embeddings: a factor on what has a row or an entry for every token.
        copies: see ``Case``.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        # Marian's sinusoids are parameters that are not trained.
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.add_(torch.randn(parameter.shape, generator=generator).double() * std)
            if parameter.ndim and parameter.shape[0] == VOCAB:
                parameter.mul_(embeddings)
        for buffer in ported_buffers(model).values():
            buffer.add_(torch.randn(buffer.shape, generator=generator).double() * std * embeddings)
        for copy, used in (copies or {}).items():
            model.get_parameter(copy).copy_(model.get_parameter(used))
    return model


def ported_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Buffers by their names that are parameters in jaxformer.

    They are BART's bias of the logits, and what DeepSeek-V3 adds to the scores of experts, which no
    gradient changes on either side.
    """
    names = ("final_logits_bias", "e_score_correction_bias")
    return {name: b for name, b in model.named_buffers() if name.rpartition(".")[2] in names}


def exact(model: Any) -> Any:
    """Gemma's factor of the embeddings in float64, which it keeps as a float32 buffer."""
    for module in model.modules():
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale, dtype=torch.float64)
    return model
