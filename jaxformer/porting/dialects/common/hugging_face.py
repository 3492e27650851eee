"""What the dialects of Hugging Face's models share: how a config.json reads, and is written."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from flax import nnx

from jaxformer.config import TransformerLMConfig
from jaxformer.errors import UsageError
from jaxformer.porting.mapping.adapter import Buffer, ModuleMapping, StateDictAdapter
from jaxformer.porting.mapping.rules import (
    ONE_TO_ONE,
    RotaryPermutation,
    Rule,
    Rules,
    Shape,
    names,
    under,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.positions import Rotary
from jaxformer.transformer_lm import TransformerLM

# Theirs: ours. The first of theirs is written. gelu_fast is gelu_new with sqrt(2/π) cut to ten
# digits, which rounds to the same float32.
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}
GATED_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
    "gelu_fast": "geglu_tanh",
}
HEAD = names(lm_head="lm_head")
# A model that was never theirs has no special tokens: their defaults would end texts at random.
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def activation(
    source_model: SourceModel, *names: str, table: Mapping[str, str] = ACTIVATIONS
) -> str:
    """Our name of the activation that the first of these settings names.

    Raises:
        UsageError: it is none of the table's.
    """
    source = source_model.setting(*names)
    if source not in table:
        raise UsageError(f"{names[0]}={source!r} is not ours to make: {', '.join(table)} are")
    return table[source]


def source_activation(target: str, table: Mapping[str, str] = ACTIVATIONS) -> str:
    """Their name of an activation of ours.

    Where they have none it is another's, and the export is refused: what ``build`` makes of these
    settings is compared with our module, so that all that stands against it is listed.
    """
    return next((source for source, name in table.items() if name == target), next(iter(table)))


def demand(source_model: SourceModel, **settings: Any) -> None:
    """Refuses what we do not build.

    Args:
        source_model: the model.
        settings: the value that each must have, where it is there at all.

    Raises:
        UsageError: one has another value.
    """
    for name, value in settings.items():
        found = source_model.setting(name, default=value)
        if found != value:
            raise UsageError(f"{name}={found!r} is not ours to make: it must be {value!r}")


def check_even(d_model: int, num_heads: int) -> None:
    """Refuses what transformers refuses, even where heads have a width of their own.

    Raises:
        UsageError: the heads do not share the model's width evenly.
    """
    if d_model % num_heads:
        raise UsageError(
            f"hidden_size must be divisible by num_attention_heads: got {d_model} and {num_heads}"
        )


def head_width(source_model: SourceModel, d_model: int, num_heads: int) -> int:
    """The width of a head in the models that have no setting for it.

    Raises:
        UsageError: the heads do not share the model's width evenly, or have another.
    """
    check_even(d_model, num_heads)
    demand(source_model, head_dim=d_model // num_heads)
    return d_model // num_heads


def rotary(source_model: SourceModel, *, share: float | None = None) -> dict[str, Any]:
    """Our settings of rotary positions, from either form in which a config.json gives them.

    Args:
        source_model: the model.
        share: how much of a head is turned where the config.json does not say; None where all
            always is.

    Raises:
        UsageError: the frequencies are stretched in a way that we do not have.
    """
    # As transformers reads them, the older form goes first.
    given = source_model.setting("rope_scaling", default={}) or source_model.setting(
        "rope_parameters", default={}
    )
    if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
        raise UsageError(f"rope_parameters={given!r} is not ours to make: all layers must agree")
    values = SourceModel({}, kind="rope_parameters", config=given)
    outside = source_model.setting("rope_theta", "rotary_emb_base", default=1e4)
    fraction = values.setting(
        "partial_rotary_factor",
        default=source_model.setting("partial_rotary_factor", "rotary_pct", default=share or 1.0),
    )
    if share is None and fraction != 1.0:
        raise UsageError(f"partial_rotary_factor={fraction!r} is not ours to make: it must be 1")
    settings = {
        "positions": "rotary",
        "rotary_base": float(values.setting("rope_theta", default=outside)),
        "rotary_fraction": float(fraction),
    }
    kind = values.setting("rope_type", "type", default="default")
    if kind == "default":
        return settings
    if kind not in ("linear", "llama3"):
        raise UsageError(f"rope_type={kind!r} is not ours to make: default, linear and llama3 are")
    settings |= {
        "rotary_scaling": kind,
        "rotary_scaling_factor": float(values.setting("factor")),
    }
    if kind == "linear":
        return settings
    trained = source_model.setting("max_position_embeddings")
    return settings | {
        "rotary_low_frequency_factor": float(values.setting("low_freq_factor")),
        "rotary_high_frequency_factor": float(values.setting("high_freq_factor")),
        "rotary_original_context_length": int(
            values.setting("original_max_position_embeddings", default=trained)
        ),
    }


def source_rotary(config: TransformerLMConfig) -> dict[str, Any]:
    """The ``rope_parameters`` of a config.json, beside what older readers take them from."""
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rotary_base}
    if config.rotary_fraction != 1.0:
        parameters["partial_rotary_factor"] = config.rotary_fraction
    if config.rotary_scaling != "none":
        parameters |= {"rope_type": config.rotary_scaling, "factor": config.rotary_scaling_factor}
    if config.rotary_scaling == "llama3":
        parameters |= {
            "low_freq_factor": config.rotary_low_frequency_factor,
            "high_freq_factor": config.rotary_high_frequency_factor,
            "original_max_position_embeddings": config.rotary_original_context_length,
        }
    scaling = {k: v for k, v in parameters.items() if k != "rope_theta"}
    return {
        "rope_parameters": parameters,
        "rope_theta": config.rotary_base,
        "rope_scaling": scaling if config.rotary_scaling != "none" else None,
    }


def turned_names(module: TransformerLM, pairs: Mapping[str, str]) -> Rules:
    """Rules for what a rotary embedding turns, queries and keys: ours = theirs.

    Theirs turns a head's halves: where ours turns neighbours, the same model has the outputs of
    every head in another order.
    """
    packing = ONE_TO_ONE
    attention = module.blocks[0].attention
    if isinstance(attention.position, Rotary) and attention.position.interleaved:
        packing = RotaryPermutation(attention.head_dim, attention.position.width)
    return tuple(Rule((target,), (source,), packing) for target, source in pairs.items())


def inverse_frequencies(module: TransformerLM, shape: Shape | None) -> np.ndarray | None:
    """The buffer of rotary frequencies that checkpoints of older versions hold in every layer."""
    position = module.blocks[0].attention.position
    if not isinstance(position, Rotary):
        return None
    exponent = np.arange(0, position.width, 2) / position.width
    return np.asarray(1 / position.base**exponent, np.float32)


def causal_mask(module: TransformerLM, shape: Shape | None) -> np.ndarray:
    """The buffer of the causal mask that checkpoints of older versions hold in every layer."""
    length = module.config.context_length
    return np.tril(np.ones((1, 1, length, length), np.bool_))


def language_model(
    name: str,
    settings: Callable[[SourceModel], dict[str, Any]],
    source_settings: Callable[[TransformerLMConfig], dict[str, Any]],
    body: Rules | Callable[[TransformerLM], Rules],
    *,
    classes: tuple[str, str],
    prefix: str,
    tied: Mapping[str, str],
    tied_by_default: bool,
    head: Rules = HEAD,
    outside: tuple[str, ...] = ("lm_head.",),
    buffers: Iterable[Buffer] = (),
    translated: frozenset[str] = frozenset(),
    old_names: Mapping[str, str] | None = None,
) -> StateDictAdapter:
    """The dialect of a model with a language-modelling head, and of its body alone.

    Args:
        name: the dialect's, and their ``model_type``.
        settings: ours from theirs, all but ``vocab_size`` and ``tie_embeddings``.
        source_settings: theirs from ours.
        body: rules of the body.
        classes: of the whole and of the body.
        prefix: of the body's names in the whole, with its dot.
        tied: names in the whole for arrays that have another name as well, by that other name.
        tied_by_default: whether the head is tied where the config.json does not say.
        head: rules of the head.
        outside: how names outside of the body begin.
        buffers: of the body.
        translated: see ``ModuleMapping``.
        old_names: see ``StateDictAdapter``.
    """
    whole, alone = classes
    inner_buffers = tuple(buffers)

    def build(source_model: SourceModel, rngs: nnx.Rngs) -> TransformerLM:
        values = settings(source_model)
        tied = source_model.setting("tie_word_embeddings", default=tied_by_default)
        values |= {"vocab_size": source_model.setting("vocab_size"), "tie_embeddings": bool(tied)}
        if source_model.kind == alone:
            values |= {"head": "none", "head_bias": False, "logit_soft_cap": None}
        return TransformerLM(TransformerLMConfig(**values), rngs=rngs)

    def describe(module: TransformerLM) -> dict[str, Any]:
        return {
            "model_type": name,
            "architectures": [alone if module.config.head == "none" else whole],
            "vocab_size": module.config.vocab_size,
            "tie_word_embeddings": module.config.tie_embeddings,
            **NO_SPECIAL_TOKENS,
            **source_settings(module.config),
        }

    def rules(start: str) -> Callable[[TransformerLM], Rules]:
        def of(module: TransformerLM) -> Rules:
            inner = body if isinstance(body, tuple) else body(module)
            return (*under("", start.rstrip("."), inner), *(head if start else ()))

        return of

    def module_mapping(kind: str, start: str, **more: Any) -> ModuleMapping:
        return ModuleMapping(
            (kind,),
            TransformerLM,
            build,
            rules(start),
            buffers=tuple(Buffer(start + b.source, b.values, b.written) for b in inner_buffers),
            settings=describe,
            translated=translated,
            **more,
        )

    return StateDictAdapter(
        name,
        (
            module_mapping(whole, prefix, aliases=tied, prefix=prefix, outside=outside),
            module_mapping(alone, ""),
        ),
        prefix=prefix,
        model_types=(name,),
        old_names=old_names or {},
    )
