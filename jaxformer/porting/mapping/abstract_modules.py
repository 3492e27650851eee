"""jaxformer modules without weights: built from settings, and described as plain values."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from jaxformer.config import (
    EncoderDecoderConfig,
    TransformerClassifierConfig,
    TransformerLMConfig,
)
from jaxformer.config_classifiers import EncoderDecoderClassifierConfig
from jaxformer.config_dual_encoder import DualEncoderConfig
from jaxformer.config_speech import SpeechClassifierConfig, SpeechTransformerConfig
from jaxformer.config_tree import from_dict, required_settings, setting_types
from jaxformer.config_vision import VisionTransformerConfig
from jaxformer.dual_encoder import DualEncoder
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.encoder_decoder_classifier import EncoderDecoderClassifier
from jaxformer.errors import JaxformerError, UsageError
from jaxformer.layers import Dropout
from jaxformer.parameters import abstract_module, join_path
from jaxformer.porting.mapping.adapter import ConfigReader, ModuleMapping
from jaxformer.porting.mapping.packings import Shape
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.validation import check_config
from jaxformer.positions import RotaryScaling
from jaxformer.speech_classifier import SpeechClassifier
from jaxformer.speech_transformer import SpeechTransformer
from jaxformer.transformer_classifier import TransformerClassifier
from jaxformer.transformer_lm import TransformerLM
from jaxformer.vision_transformer import VisionTransformer

MODEL_OF_CONFIG = {
    TransformerLMConfig: TransformerLM,
    EncoderDecoderConfig: EncoderDecoder,
    VisionTransformerConfig: VisionTransformer,
    TransformerClassifierConfig: TransformerClassifier,
    EncoderDecoderClassifierConfig: EncoderDecoderClassifier,
    DualEncoderConfig: DualEncoder,
    SpeechTransformerConfig: SpeechTransformer,
    SpeechClassifierConfig: SpeechClassifier,
}
# The modules of the classes that compute; the subclasses in porting only change their signatures.
_COMPONENTS = {
    f"jaxformer.{name}"
    for name in (
        "adapters", "attention", "blocks", "convolutions", "disentangled", "dual_encoder",
        "encoder_decoder", "encoder_decoder_classifier", "experts", "feed_forward", "heads",
        "latent_attention", "layers", "norms", "patches", "pooling", "positions",
        "speech_classifier", "speech_transformer", "transformer_classifier", "transformer_lm",
        "vision_transformer",
    )
}  # fmt: skip
# Settings that a model itself uses; its submodules show the others.
_USED_BY_THE_MODEL = (
    "causal", "sliding_window", "full_attention_layers", "embedding_scale", "logit_soft_cap",
    "logit_scale", "num_layers", "layer_groups", "layers_in_group", "image_height", "image_width",
    "pooling", "head", "pooler", "num_token_types", "num_task_types", "tie_embeddings",
    "labels", "classified", "text_vector", "end_token", "encoder_length", "image_labels",
    "classes_from", "layer_sum",
)  # fmt: skip


def as_config(settings: Mapping[str, Any]) -> Any:
    """Returns a config of jaxformer if the settings are those of one, else the settings.

    Args:
        settings: of a model, or of a training run with its model's under "model".

    Raises:
        UsageError: they are those of a jaxformer model, and invalid.
    """
    inner = settings.get("model")
    if isinstance(inner, Mapping):
        settings = inner
    for cls in MODEL_OF_CONFIG:
        if required_settings(cls) <= settings.keys() <= setting_types(cls).keys():
            try:
                return from_dict(cls, dict(settings))
            except (ValueError, TypeError) as error:
                raise UsageError(f"these settings make no model: {error}") from error
    return dict(settings)


def abstract_model(config: Any) -> Any:
    """Returns the model of a config, with a ``jax.ShapeDtypeStruct`` for every array.

    Equal settings are traced once: that takes most of the time of porting a small model.
    """
    # 2.0 equals 2, and makes another model, or none: only what is written alike is the same.
    written = repr(config.settings())
    return nnx.merge(*_trace(config, written, jax.dtypes.canonicalize_dtype(float)), copy=True)


# Of a large model, what is kept takes a few hundred kilobytes.
@functools.lru_cache(maxsize=256)
def _trace(config: Any, written: str, widest: Any) -> tuple[nnx.GraphDef[Any], Any]:
    """Returns a model's structure and shapes; the other arguments are part of what is the same."""
    build = MODEL_OF_CONFIG[type(config)]
    return nnx.split(abstract_module(lambda rngs: build(config, rngs=rngs)))


def build_abstract(module_mapping: ModuleMapping, source_model: SourceModel, config: Any) -> Any:
    """Builds the target module with shapes in place of weights.

    Args:
        module_mapping: of the source class.
        source_model: the source settings and shapes.
        config: a jaxformer config or module, which decides instead if it is one.

    Raises:
        JaxformerError: the settings are missing, unsupported, or make no such module.
    """
    if isinstance(config, nnx.Module):
        return config
    try:
        build = module_mapping.build
        if type(config) in MODEL_OF_CONFIG:
            module = abstract_model(config)
        elif isinstance(build, ConfigReader):
            module = abstract_model(build.read(source_model))
        else:
            module = abstract_module(functools.partial(build, source_model))
    except JaxformerError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Settings come from files: they may be of any type and value.
        reason = str(error) or type(error).__name__
        raise UsageError(f"these settings make no {source_model.kind}: {reason}") from error
    if type(getattr(module, "config", None)) in MODEL_OF_CONFIG:
        check_config(module.config)
    return module


def parameter_shapes(module: Any) -> dict[str, Shape]:
    """Returns the shapes of a module's parameters by name; the module may be abstract."""
    # Not by ``abstract``, which traces the module anew.
    state = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {join_path(path): tuple(variable.shape) for path, variable in state}


def architecture_of(module: Any) -> dict[str, Any]:
    """Returns what decides, beside the weights, what a module computes; without dropout rates.

    Keys are paths of submodules (values are class names) and of their attributes.
    """
    found: dict[str, Any] = {}
    for path, node in nnx.iter_modules(module):
        kinds = [c.__name__ for c in type(node).__mro__ if c.__module__ in _COMPONENTS]
        if isinstance(node, Dropout) or not kinds:
            continue
        at = join_path(path)
        found[at or "the class"] = kinds[0]
        values = dict(vars(node))
        config = values.pop("config", None)
        if type(config) in MODEL_OF_CONFIG:
            settings = config.settings()
            values |= {name: settings.get(name) for name in _USED_BY_THE_MODEL}
        for name, value in values.items():
            if isinstance(value, RotaryScaling):
                # Of a linear one the other numbers are not used. What tables are multiplied by
                # may follow from the factor.
                whole = dataclasses.replace(value, attention_factor=value.table_factor)
                value = value.factor if value.kind == "linear" else dataclasses.astuple(whole)
            if name.startswith("_") or not isinstance(value, int | float | str | tuple | None):
                continue
            found[f"{at}.{name}".removeprefix(".")] = value
    return found
