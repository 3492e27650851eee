"""The mappings of encoders and decoders of Hugging Face that have a class of their own."""

from collections.abc import Callable
from typing import Any

from jaxformer.config import TransformerClassifierConfig, TransformerLMConfig
from jaxformer.errors import Setting, UsageError
from jaxformer.porting.dialects.common.hugging_face import (
    EMBEDDED,
    HEAD,
    NO_SPECIAL_TOKENS,
    read_fields,
)
from jaxformer.porting.dialects.common.known_settings import SHARED
from jaxformer.porting.dialects.common.task_heads import TaskHead
from jaxformer.porting.dialects.common.transformers_types import TRANSFORMERS_TYPES
from jaxformer.porting.mapping.adapter import Buffer, ConfigReader, ModuleMapping
from jaxformer.porting.mapping.rules import Rules, under
from jaxformer.porting.mapping.settings import Row, write_settings
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.transformer_classifier import TransformerClassifier
from jaxformer.transformer_lm import TransformerLM


def encoder_mapping(
    name: str,
    kind: str,
    settings: tuple[Row, ...],
    body: Callable[[Any], Rules],
    head: TaskHead | None = None,
) -> ModuleMapping:
    """Returns the mapping of the encoder of an encoder and decoder, as a class of its own.

    Args:
        name: the dialect's.
        kind: the class.
        settings: the rows of all settings.
        body: rules of the encoder with its embedding, for a target module.
        head: what stands behind it; default nothing.
    """
    known = TRANSFORMERS_TYPES[name]
    start = "" if head is None or head.prefix is None else head.prefix
    own = (*settings, *(() if head is None else head.settings))

    def read_config(source_model: SourceModel) -> Any:
        fields = read_fields(name, (*own, *SHARED), source_model)
        return (TransformerLMConfig if head is None else TransformerClassifierConfig)(**fields)

    def rules(module: Any) -> Rules:
        behind = () if head is None else head.rules
        return (*under("", start.rstrip("."), body(module)), *behind)

    def write(module: Any) -> dict[str, Any]:
        about = {"model_type": name, "architectures": [kind], "is_encoder_decoder": False}
        return {**about, **NO_SPECIAL_TOKENS, **write_settings(own, module.config)}

    return ModuleMapping(
        (kind,),
        TransformerLM if head is None else TransformerClassifier,
        ConfigReader(read_config),
        rules,
        aliases={f"{start}encoder.{EMBEDDED}": f"{start}{known.embedding}.weight"},
        settings=write,
        prefix=start,
        outside=() if head is None else head.outside,
    )


def decoder_mapping(
    name: str,
    kind: str,
    settings: tuple[Row, ...],
    body: Rules,
    *,
    head: Rules = HEAD,
    buffers: tuple[Buffer, ...] = (),
    special_tokens: tuple[str, ...] = (),
) -> ModuleMapping:
    """Returns the mapping of the decoder of an encoder and decoder, as a class of its own.

    Args:
        name: the dialect's.
        kind: the class.
        settings: the rows of all settings.
        body: rules of the decoder.
        head: rules of the head.
        buffers: of it.
        special_tokens: settings of tokens that the class has beside the usual ones.
    """
    known = TRANSFORMERS_TYPES[name]
    start, matrix = f"{known.prefix}decoder", head[-1].source[0].removesuffix(".weight")

    def read_config(source_model: SourceModel) -> TransformerLMConfig:
        if any(".encoder_attn" in name for name in source_model.shapes):
            raise UsageError(
                f"{kind} holds an attention to a source, and uses it nowhere: leave out "
                "'*.encoder_attn*' with ",
                Setting("ignore"),
            )
        return TransformerLMConfig(**read_fields(name, (*settings, *SHARED), source_model))

    def write(module: Any) -> dict[str, Any]:
        about = {"model_type": name, "architectures": [kind], "is_encoder_decoder": False}
        about |= {"is_decoder": True, **NO_SPECIAL_TOKENS, **dict.fromkeys(special_tokens)}
        return {**about, **write_settings(settings, module.config)}

    return ModuleMapping(
        (kind,),
        TransformerLM,
        ConfigReader(read_config),
        (*under("", start, body), *head),
        aliases={f"{matrix}.weight": f"{start}.{EMBEDDED}"},
        buffers=buffers,
        settings=write,
        prefix=known.prefix,
        outside=(f"{matrix}.",),
    )
