"""The adapter of a family of Hugging Face, from its rules and its table of settings."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from jaxformer.config import (
    EncoderDecoderConfig,
    TransformerClassifierConfig,
    TransformerLMConfig,
)
from jaxformer.config_classifiers import EncoderDecoderClassifierConfig
from jaxformer.config_speech import SpeechTransformerConfig
from jaxformer.config_vision import VisionTransformerConfig
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.encoder_decoder_classifier import EncoderDecoderClassifier
from jaxformer.porting.dialects.common.known_settings import DEFAULTS, SHARED
from jaxformer.porting.dialects.common.task_heads import TaskHead, pair_task_heads, task_heads
from jaxformer.porting.dialects.common.transformers_types import TRANSFORMERS_TYPES
from jaxformer.porting.mapping.adapter import Buffer, ConfigReader, ModuleMapping, StateDictAdapter
from jaxformer.porting.mapping.rules import Rules, names, under
from jaxformer.porting.mapping.settings import BOOLEAN, Mapped, Row, read_settings, write_settings
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import check_all_read, find_unread
from jaxformer.speech_transformer import SpeechTransformer
from jaxformer.transformer_classifier import TransformerClassifier
from jaxformer.transformer_lm import TransformerLM
from jaxformer.vision_transformer import VisionTransformer

HEAD = names(lm_head="lm_head")
# Written out because models trained here have no special tokens:
# transformers' defaults would end texts at random.
NO_HEAD = {"head": "none", "head_bias": False, "logit_scale": None, "logit_soft_cap": None}
CONFIGS: dict[type, Any] = {
    TransformerLM: TransformerLMConfig,
    EncoderDecoder: EncoderDecoderConfig,
    VisionTransformer: VisionTransformerConfig,
    SpeechTransformer: SpeechTransformerConfig,
}
# What an encoder calls the table of rows that it shares.
EMBEDDED = "embed_tokens.weight"
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def language_model(
    name: str,
    settings: tuple[Row, ...],
    body: Rules | Callable[[Any], Rules],
    *,
    model: type = TransformerLM,
    vocabulary: tuple[Row, ...] | None = None,
    head: Rules = HEAD,
    outside: tuple[str, ...] = ("lm_head.",),
    copies: Mapping[str, str] | None = None,
    shared: Mapping[str, str] | None = None,
    buffers: Iterable[Buffer] = (),
    translated: frozenset[str] = frozenset(),
    old_names: Mapping[str, str] | None = None,
    published_names: Mapping[str, str] | None = None,
    untied_names: frozenset[str] = frozenset(),
    head_names: frozenset[str] = frozenset(),
    superfluous: tuple[str, ...] = (),
    special_tokens: tuple[str, ...] = (),
    equivalents: Mapping[str, str] | None = None,
    published: Callable[[Any], Rules] | None = None,
) -> StateDictAdapter:
    """Returns the adapter of a model with a language-modelling head, and of its body alone.

    Args:
        name: the dialect's, which is the ``model_type`` in config.json; what is known of it besides
            stands in transformers_types.json.
        settings: the rows of all settings but those of ``vocabulary``.
        body: rules of the body.
        model: what is built, a ``TransformerLM`` or an ``EncoderDecoder``.
        vocabulary: the rows of ``vocab_size`` and ``tie_word_embeddings``, where they are not the
            usual ones.
        head: rules of the head, that of what makes logits last.
        outside: how names outside of the body begin.
        copies: names in the whole model for arrays that have another name as well, by that other
            name; those of a tied head are known.
        shared: names in the body for arrays that have another name there as well, by that other.
        buffers: of the body.
        translated: see ``ModuleMapping``.
        old_names: see ``StateDictAdapter``.
        published_names: see ``StateDictAdapter``.
        untied_names: see ``StateDictAdapter``.
        head_names: see ``StateDictAdapter``.
        superfluous: of the whole model, see ``ModuleMapping``.
        special_tokens: settings of tokens that the class has beside the usual ones.
        equivalents: see ``StateDictAdapter``.
        published: rules of the body in files, see ``ModuleMapping``.
    """
    known = TRANSFORMERS_TYPES[name]
    prefix, defaults = known.prefix, known.defaults
    # Of half a model there is the body alone.
    whole_class, body_class, *causal_class = (known.classes * 2)[: max(2, len(known.classes))]
    is_half = len(known.classes) == 1
    matrix = head[-1].source[0].removesuffix(".weight")
    tied = {f"{matrix}.weight": f"{prefix}{known.embedding}.weight"}
    is_tied_by_default = defaults.get("tie_word_embeddings", False)
    body_buffers = tuple(buffers)
    usual = (
        Mapped("vocab_size", "vocab_size"),
        Mapped("tie_word_embeddings", "tie_embeddings", is_tied_by_default, BOOLEAN),
    )
    of_vocabulary = usual if vocabulary is None else vocabulary
    rows = (*settings, *of_vocabulary, *SHARED)

    def read_config(source_model: SourceModel) -> Any:
        fields = read_fields(name, rows, source_model)
        if source_model.kind == body_class:
            fields |= NO_HEAD
        return CONFIGS[model](**fields)

    def overlooks(config: Mapping[str, Any]) -> dict[str, Any]:
        source_model = SourceModel({}, kind=whole_class, config=config).with_defaults(defaults)
        read_settings(rows, source_model)
        return find_unread(source_model, DEFAULTS)

    def class_of(config: Any) -> str:
        if config.head.head == "none":
            return body_class
        return causal_class[0] if causal_class and config.causal else whole_class

    def write(module: Any) -> dict[str, Any]:
        return {
            "model_type": name,
            "architectures": [class_of(module.config)],
            **write_settings(of_vocabulary, module.config),
            **NO_SPECIAL_TOKENS,
            **dict.fromkeys(special_tokens),
            **write_settings(settings, module.config),
        }

    def rules(
        body: Rules | Callable[[Any], Rules], start: str, behind: Rules
    ) -> Callable[[Any], Rules]:
        def of(module: Any) -> Rules:
            inner = body if isinstance(body, tuple) else body(module)
            return (*under("", start.rstrip("."), inner), *behind)

        return of

    def module_mapping(
        kinds: tuple[str, ...], start: str, second_names: Mapping[str, str], **more: Any
    ) -> ModuleMapping:
        behind = () if kinds == (body_class,) else head
        return ModuleMapping(
            kinds,
            model,
            ConfigReader(read_config),
            rules(body, start, behind),
            aliases={start + second: start + own for second, own in (shared or {}).items()}
            | dict(second_names),
            buffers=tuple(replace(b, source=start + b.source) for b in body_buffers),
            settings=write,
            translated=translated,
            published=None if published is None else rules(published, start, behind),
            **more,
        )

    whole = module_mapping(
        (whole_class, *causal_class),
        prefix,
        tied | dict(copies or {}),
        prefix=prefix,
        outside=outside,
        superfluous=superfluous,
    )
    body_alone = module_mapping((body_class,), "", {})

    def task_mapping(head: TaskHead) -> ModuleMapping:
        kind = f"{body_class.removesuffix('Model')}For{head.task}"
        start = prefix if head.prefix is None else head.prefix

        def read_task(source_model: SourceModel) -> Any:
            fields = read_fields(name, (*rows, *head.settings), source_model) | NO_HEAD
            if model is EncoderDecoder:
                return EncoderDecoderClassifierConfig(**fields)
            return TransformerClassifierConfig(**fields)

        def write_task(module: Any) -> dict[str, Any]:
            own = write_settings(head.settings, module.config)
            return {**write(module), "architectures": [kind], **own}

        return replace(
            body_alone,
            source=(kind,),
            target=EncoderDecoderClassifier if model is EncoderDecoder else TransformerClassifier,
            build=ConfigReader(read_task),
            rules=rules(body, start, head.rules),
            aliases={start + second: start + own for second, own in (shared or {}).items()},
            buffers=tuple(replace(b, source=start + b.source) for b in body_buffers),
            settings=write_task,
            published=None if published is None else rules(published, start, head.rules),
            prefix=start,
            outside=head.outside,
        )

    # Of half a model, and of sound, heads for tasks are not known.
    known_heads = {TransformerLM: task_heads, EncoderDecoder: pair_task_heads}
    tasks = known_heads[model](name) if model in known_heads and not is_half else ()
    return StateDictAdapter(
        name,
        (body_alone,) if is_half else (whole, body_alone, *map(task_mapping, tasks)),
        prefix=prefix,
        model_types=(name,),
        old_names=old_names or {},
        published_names=published_names or {},
        untied_names=untied_names,
        head_names=head_names,
        equivalents=equivalents or {},
        overlooks=overlooks,
    )


def read_fields(name: str, rows: tuple[Row, ...], source_model: SourceModel) -> dict[str, Any]:
    """Returns the fields of a config that a table of a dialect reads from source settings.

    Raises:
        UsageError: a setting is missing, unsupported or unknown.
    """
    if "model_type" in source_model.config:
        # Arrays without a config.json do not show that their model has the usual settings.
        source_model = source_model.with_defaults(TRANSFORMERS_TYPES[name].defaults)
    fields = read_settings(rows, source_model)
    check_all_read(source_model, DEFAULTS, name)
    return fields
