"""Dialect ``torch_ref``: the PyTorch mirror, with the same paths, constructors and attributes."""

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

from flax import nnx

from jaxformer import (
    adapters,
    attention,
    blocks,
    convolutions,
    disentangled,
    dual_encoder,
    encoder_decoder,
    encoder_decoder_classifier,
    experts,
    feed_forward,
    heads,
    latent_attention,
    layers,
    norms,
    patches,
    pooling,
    positions,
    speech_classifier,
    speech_transformer,
    transformer_classifier,
    transformer_lm,
    vision_transformer,
)
from jaxformer.config import TransformerConfig
from jaxformer.config_tree import from_dict
from jaxformer.porting.mapping.abstract_modules import MODEL_OF_CONFIG, parameter_shapes
from jaxformer.porting.mapping.adapter import ModuleMapping, StateDictAdapter
from jaxformer.porting.mapping.rules import Rules, names
from jaxformer.porting.mapping.source_model import MissingSettingError, SourceModel

CLASSES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        transformer_lm.TransformerLM,
        transformer_classifier.TransformerClassifier,
        encoder_decoder.EncoderDecoder,
        vision_transformer.VisionTransformer,
        encoder_decoder_classifier.EncoderDecoderClassifier,
        dual_encoder.DualEncoder,
        speech_transformer.SpeechTransformer,
        speech_classifier.SpeechClassifier,
        convolutions.SpeechStem,
        convolutions.FrameConvolution,
        patches.PatchEmbedding,
        pooling.AttentionPooling,
        disentangled.DistanceRows,
        disentangled.DisentangledPositions,
        norms.LayerScale,
        norms.NoNorm,
        encoder_decoder.Encoder,
        encoder_decoder.Decoder,
        blocks.PreNormBlock,
        blocks.PostNormBlock,
        blocks.OutputNormBlock,
        blocks.ParallelBlock,
        attention.MultiHeadAttention,
        latent_attention.LatentAttention,
        feed_forward.FeedForward,
        feed_forward.GatedFeedForward,
        feed_forward.XIELU,
        experts.MixtureOfExperts,
        experts.Router,
        experts.ExpertLinear,
        heads.HeadTransform,
        heads.ClassifierHead,
        heads.OutputBias,
        heads.Similarity,
        heads.LayerSum,
        positions.LearnedPositions,
        positions.SinusoidalPositions,
        positions.RelativePositions,
        positions.RelativeBuckets,
        positions.Rotary,
        positions.ALiBi,
        positions.NoPositions,
        norms.LayerNorm,
        norms.RMSNorm,
        layers.Linear,
        adapters.LoRALinear,
        layers.Embedding,
        layers.Dropout,
    )
}
# The setting with which an export hands over the jaxformer module itself, to read attributes from.
MODULE = "the module itself"
# Attributes that only modules with the signature of another dialect have.
SIGNATURES = frozenset({"batch_first", "context_length"})
INDEX = re.compile(r"(?<![^.])\d+(?![^.])")
Read = Callable[[SourceModel], Any]


def _size(array: str, axis: int) -> Read:
    return lambda source_model: source_model.shape(f"{array}weight")[axis]


def _has(name: str) -> Read:
    return lambda source_model: source_model.has(name)


def _features(source_model: SourceModel) -> tuple[int, ...]:
    """The shape of a norm's parameters; without any, it is not used."""
    found = [name for name in ("weight", "bias") if source_model.has(name)]
    return source_model.shape(found[0]) if found else (1,)


def _rate(place: str) -> Read:
    return lambda source_model: source_model.child(place).setting("rate")


def _router_settings(source_model: SourceModel) -> dict[str, Any]:
    """The settings of a mixture's router, but those of its size."""
    router = source_model.child("router")
    attributes = ("kind", "normalize_weights", "weight_scale", "groups", "groups_per_token")
    return {
        **{name: router.setting(name) for name in attributes},
        "use_bias": router.has("proj.bias"),
        "choice_bias": router.has("choice_bias"),
    }


# Constructor arguments that a module does not keep under their name.
READERS: dict[str, dict[str, Read]] = {
    "Linear": {
        "in_features": _size("", 1), "out_features": _size("", 0), "use_bias": _has("bias"),
    },
    "LoRALinear": {
        "in_features": _size("", 1), "out_features": _size("", 0), "use_bias": _has("bias"),
        "dropout": _rate("lora_dropout"),
    },
    "Embedding": {"num_embeddings": _size("", 0), "features": _size("", 1)},
    "LayerNorm": {
        "features": _features, "use_bias": _has("bias"), "use_scale": _has("weight"),
    },
    "RMSNorm": {"features": _features, "use_scale": _has("weight")},
    "OutputBias": {"features": lambda source_model: source_model.shape("bias", 1)[0]},
    "FrameConvolution": {
        "in_features": lambda f: f.shape("proj.weight")[1] // f.setting("width"),
        "out_features": _size("proj.", 0),
    },
    "SpeechStem": {"d_model": _size("conv2.proj.", 0)},
    "Similarity": {"use_bias": _has("bias")},
    "LayerSum": {"num_streams": _size("", 0)},
    "AttentionPooling": {"d_model": _size("query.", 1)},
    "LayerScale": {"features": _size("", 0)},
    "HeadTransform": {
        "d_model": _size("proj.", 1), "out_features": _size("proj.", 0),
        "use_bias": _has("proj.bias"),
    },
    "PatchEmbedding": {"d_model": _size("proj.", 0), "use_bias": _has("proj.bias")},
    "DistanceRows": {
        "span": lambda source_model: source_model.shape("weight")[0] // 2, "d_model": _size("", 1),
    },
    "DisentangledPositions": {"dropout": _rate("dropout")},
    "ClassifierHead": {
        "d_model": lambda f: f.shape("proj.weight" if f.has("proj") else "out_proj.weight")[1],
        "num_labels": _size("out_proj.", 0),
        "use_bias": _has("out_proj.bias"), "transform": _has("proj"),
        "transform_width": lambda f: f.shape("proj.weight")[0] if f.has("proj") else None,
        "transform_bias": _has("proj.bias"), "input_dropout": _rate("input_dropout"),
        "dropout": _rate("dropout"),
    },
    "LearnedPositions": {
        "max_length": lambda f: f.shape("weight")[0] - f.setting("offset", default=0),
        "d_model": _size("", 1),
    },
    "RelativePositions": {"head_dim": _size("", 1)},
    "RelativeBuckets": {"num_buckets": _size("", 0), "num_heads": _size("", 1)},
    "Rotary": {"head_dim": lambda f: f.setting("width", "head_dim"), "fraction": lambda _: 1.0},
    "FeedForward": {
        "d_ff": _size("up_proj.", 0), "d_model": _size("up_proj.", 1),
        "use_bias": _has("up_proj.bias"),
    },
    "ExpertLinear": {
        "num_experts": _size("", 0), "in_features": _size("", 2), "out_features": _size("", 1),
        "use_bias": _has("bias"),
    },
    "Router": {
        "d_model": _size("proj.", 1), "num_experts": _size("proj.", 0),
        "use_bias": _has("proj.bias"), "choice_bias": _has("choice_bias"),
    },
    "MixtureOfExperts": {
        "d_model": _size("gate_proj.", 2), "d_ff": _size("gate_proj.", 1),
        "num_experts": _size("gate_proj.", 0),
        "experts_per_token": lambda f: f.child("router").setting("experts_per_token"),
        "router": _router_settings,
        "use_bias": _has("gate_proj.bias"),
        "shared_d_ff": lambda f: (
            f.shape("shared_expert.up_proj.weight")[0] if f.has("shared_expert") else None
        ),
        "shared_gate": _has("shared_expert_gate"),
    },
    "MultiHeadAttention": {
        "d_model": _size("q_proj.", 1), "use_bias": _has("q_proj.bias"),
        "key_bias": lambda f: f.has("k_proj.bias") or not f.has("q_proj.bias"),
        "output_bias": _has("o_proj.bias"), "output_projection": _has("o_proj"),
        "sinks": _has("sinks"),
    },
    "LatentAttention": {
        "d_model": _size("kv_down_proj.", 1), "use_bias": _has("kv_down_proj.bias"),
        "output_bias": _has("o_proj.bias"),
        "query_latent_width": lambda f: (
            f.shape("q_down_proj.weight")[0] if f.has("q_down_proj") else None
        ),
    },
    "Block": {"residual_dropout": _rate("attention_residual_dropout")},
}  # fmt: skip
READERS["GatedFeedForward"] = READERS["FeedForward"]
CONFIGS = {model.__name__: config for config, model in MODEL_OF_CONFIG.items()}


def _build(source_model: SourceModel, rngs: nnx.Rngs) -> Any:
    """Builds the jaxformer class of the same name, from attributes of the same names."""
    if MODULE in source_model.config:
        module = source_model.config[MODULE]
        source_model = SourceModel(source_model.shapes, kind=source_model.kind, module=module)
    if source_model.kind in CONFIGS:
        return _model(source_model, rngs)
    if source_model.kind in ("Encoder", "Decoder"):
        return _stack(source_model, rngs)
    cls = CLASSES[source_model.kind]
    known = (READERS.get(base.__name__, {}) for base in reversed(cls.__mro__))
    readers = {name: read for each in known for name, read in each.items()}
    arguments: dict[str, Any] = {}
    constructor: Any = inspect.getattr_static(cls, "__init__")
    for name, parameter in list(inspect.signature(constructor).parameters.items())[1:]:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name == "rngs":
            arguments[name] = rngs
        elif name in readers:
            arguments[name] = readers[name](source_model)
        else:
            value = source_model.setting(name, default=None)
            if value is not None:
                arguments[name] = _value(source_model.child(name), value, rngs)
            elif source_model.has(name):
                raise MissingSettingError(
                    f"arrays do not show what {name} of {source_model.kind} is: give a jaxformer "
                    "module that is built alike as config"
                )
            elif parameter.default is parameter.empty:
                arguments[name] = (
                    source_model.setting(name) if source_model.module is None else None
                )
    return cls(**arguments)


def _value(source_model: SourceModel, value: Any, rngs: nnx.Rngs) -> Any:
    """Returns a constructor argument, from a source setting."""
    if source_model.module is not value:
        return value
    if source_model.kind == "Dropout":
        return source_model.setting("rate")
    if source_model.kind == "RotaryScaling":
        return positions.RotaryScaling(**dataclasses.asdict(value))
    return _build(source_model, rngs) if hasattr(value, "train") else value


def _model(source_model: SourceModel, rngs: nnx.Rngs) -> Any:
    kept = getattr(source_model.module, "config", None)
    settings = {**({} if kept is None else kept.settings()), **source_model.config}
    settings.pop("class", None)
    return CLASSES[source_model.kind](from_dict(CONFIGS[source_model.kind], settings), rngs=rngs)


def _stack(source_model: SourceModel, rngs: nnx.Rngs) -> Any:
    """Builds an ``Encoder`` or ``Decoder``, which keep their blocks and not their config."""
    # What a stack without blocks uses of a config, and its required fields.
    window = source_model.setting("window", default=None)
    empty = TransformerConfig(
        d_model=1, num_heads=1, context_length=1, sliding_window=window, final_norm=False
    )
    more = {"causal": source_model.setting("causal")} if source_model.kind == "Decoder" else {}
    stack: Any = CLASSES[source_model.kind](empty, 0, **more, rngs=rngs)
    stack.blocks = nnx.List([_build(block, rngs) for block in source_model.children("blocks")])
    if source_model.has("position"):
        stack.position = nnx.data(_build(source_model.child("position"), rngs))
    if source_model.has("final_norm"):
        stack.final_norm = nnx.data(_build(source_model.child("final_norm"), rngs))
    return stack


def _rules(module: Any) -> Rules:
    """Returns rules that keep every path."""
    owners = (name.rpartition(".")[0] for name in parameter_shapes(module))
    return names({path: path for path in (INDEX.sub("*", owner) for owner in owners)})


def _itself(module: Any) -> dict[str, Any]:
    return {MODULE: module}


DIALECTS = (
    StateDictAdapter(
        "torch_ref",
        tuple(
            ModuleMapping((name,), cls, _build, _rules, settings=_itself, translated=SIGNATURES)
            for name, cls in CLASSES.items()
        ),
    ),
)
