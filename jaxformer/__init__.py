"""Transformers in JAX that compute the same as their PyTorch twins.

``import jaxformer`` offers what ``__all__`` lists. Each name is imported when it is first used, so
the import itself costs nothing and needs no JAX: ``load`` and ``train`` for whole models, the model
classes and their parts, ``from_torch`` and ``to_torch``, ``compare``, the settings, ``presets`` and
``errors``.

Every component here has a twin of the same name in ``torch_ref``: same file, same class,
same constructor keywords, same attribute paths.

Dimension letters, used in every signature of the project:

======  =====================================================
letter  meaning
======  =====================================================
B       batch
T       query length, in tokens
S       key length, in tokens
D       model width (``d_model``)
N       query heads (``num_heads``)
K       key/value heads (``num_kv_heads``)
H       head width (``head_dim``)
F       feed-forward width (``d_ff``)
V       vocabulary (``vocab_size``)
L       layers (``num_layers``)
A       micro-batches whose gradients are averaged in one step
E       experts of a mixture
C       experts that compute a token
======  =====================================================

A local variable whose layout matters carries it: ``q_BTNH``. Masks are boolean, True = may attend.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jaxformer import errors
from jaxformer.hardware.nvidia_driver import skip_version_check_without_driver

if TYPE_CHECKING:
    from jaxformer.api.model import Model, load
    from jaxformer.api.runs import TrainResult, train
    from jaxformer.attention import LayerCache, MultiHeadAttention
    from jaxformer.attention_core import scaled_dot_product_attention
    from jaxformer.blocks import OutputNormBlock, ParallelBlock, PostNormBlock, PreNormBlock
    from jaxformer.char_data import CharTokenizer, TokenIdsDataset, batch_at
    from jaxformer.config import (
        EncoderDecoderConfig,
        OptimizerConfig,
        TransformerClassifierConfig,
        TransformerLMConfig,
    )
    from jaxformer.config_attention import AttentionConfig, LatentConfig, QueryKeyNormConfig
    from jaxformer.config_classifiers import EncoderDecoderClassifierConfig
    from jaxformer.config_dual_encoder import DualEncoderConfig
    from jaxformer.config_experts import ExpertsConfig, RouterConfig
    from jaxformer.config_heads import ClassifierConfig, HeadConfig
    from jaxformer.config_parts import (
        BlockConfig,
        EmbeddingConfig,
        FeedForwardConfig,
        LayerPattern,
        LMEmbeddingConfig,
        LoRAConfig,
        NormConfig,
    )
    from jaxformer.config_positions import (
        DisentangledConfig,
        PositionConfig,
        RotaryConfig,
        RotaryScalingConfig,
    )
    from jaxformer.config_speech import (
        FeatureConfig,
        SpeechClassifierConfig,
        SpeechTransformerConfig,
    )
    from jaxformer.config_vision import ImageHeadConfig, PatchConfig, VisionTransformerConfig
    from jaxformer.continuous_generation import Request, generate_requests
    from jaxformer.convolutions import FrameConvolution, SpeechStem
    from jaxformer.data.tokenizers import HuggingFaceTokenizer
    from jaxformer.disentangled import DisentangledPositions, DistanceRows
    from jaxformer.dual_encoder import DualEncoder
    from jaxformer.encoder_decoder import Decoder, Encoder, EncoderDecoder
    from jaxformer.encoder_decoder_classifier import EncoderDecoderClassifier
    from jaxformer.experts import ExpertLinear, MixtureOfExperts, Router
    from jaxformer.feed_forward import FeedForward, GatedFeedForward
    from jaxformer.generation import generate, stream, stream_samples
    from jaxformer.heads import ClassifierHead, LayerSum, Similarity
    from jaxformer.inspection.attention_maps import AttentionMaps
    from jaxformer.latent_attention import LatentAttention
    from jaxformer.layers import Dropout, Embedding, Linear, seed_dropout
    from jaxformer.losses import cross_entropy
    from jaxformer.masks import causal_mask, combine_masks, padding_mask, window_mask
    from jaxformer.narrow_linear import NarrowLinear, narrow_weights
    from jaxformer.norms import LayerNorm, LayerScale, RMSNorm
    from jaxformer.optimizers import make_optimizer
    from jaxformer.parity.comparison.api import assert_parity, compare
    from jaxformer.parity.comparison.generation import compare_generation
    from jaxformer.parity.comparison.training import compare_training
    from jaxformer.parity.report.report import Report
    from jaxformer.patches import PatchEmbedding
    from jaxformer.pooling import AttentionPooling
    from jaxformer.porting.api import from_torch, to_torch
    from jaxformer.positions import (
        ALiBi,
        LearnedPositions,
        RelativeBuckets,
        RelativePositions,
        Rotary,
        SinusoidalPositions,
    )
    from jaxformer.sequence_generation import generate_target
    from jaxformer.speculative_generation import generate_with_draft, stream_with_draft
    from jaxformer.speech_classifier import SpeechClassifier
    from jaxformer.speech_transformer import SpeechTransformer
    from jaxformer.training import presets
    from jaxformer.training.config import PairTrainConfig, TrainConfig
    from jaxformer.transformer_classifier import TransformerClassifier
    from jaxformer.transformer_lm import TransformerLM
    from jaxformer.vision_transformer import VisionTransformer

__version__ = "0.2.0"
__all__ = [
    "ALiBi",
    "AttentionConfig",
    "AttentionMaps",
    "AttentionPooling",
    "BlockConfig",
    "CharTokenizer",
    "ClassifierConfig",
    "ClassifierHead",
    "Decoder",
    "DisentangledConfig",
    "DisentangledPositions",
    "DistanceRows",
    "Dropout",
    "DualEncoder",
    "DualEncoderConfig",
    "Embedding",
    "EmbeddingConfig",
    "Encoder",
    "EncoderDecoder",
    "EncoderDecoderClassifier",
    "EncoderDecoderClassifierConfig",
    "EncoderDecoderConfig",
    "ExpertLinear",
    "ExpertsConfig",
    "FeatureConfig",
    "FeedForward",
    "FeedForwardConfig",
    "FrameConvolution",
    "GatedFeedForward",
    "HeadConfig",
    "HuggingFaceTokenizer",
    "ImageHeadConfig",
    "LMEmbeddingConfig",
    "LatentAttention",
    "LatentConfig",
    "LayerCache",
    "LayerNorm",
    "LayerPattern",
    "LayerScale",
    "LayerSum",
    "LearnedPositions",
    "Linear",
    "LoRAConfig",
    "MixtureOfExperts",
    "Model",
    "MultiHeadAttention",
    "NarrowLinear",
    "NormConfig",
    "OptimizerConfig",
    "OutputNormBlock",
    "PairTrainConfig",
    "ParallelBlock",
    "PatchConfig",
    "PatchEmbedding",
    "PositionConfig",
    "PostNormBlock",
    "PreNormBlock",
    "QueryKeyNormConfig",
    "RMSNorm",
    "RelativeBuckets",
    "RelativePositions",
    "Report",
    "Request",
    "Rotary",
    "RotaryConfig",
    "RotaryScalingConfig",
    "Router",
    "RouterConfig",
    "Similarity",
    "SinusoidalPositions",
    "SpeechClassifier",
    "SpeechClassifierConfig",
    "SpeechStem",
    "SpeechTransformer",
    "SpeechTransformerConfig",
    "TokenIdsDataset",
    "TrainConfig",
    "TrainResult",
    "TransformerClassifier",
    "TransformerClassifierConfig",
    "TransformerLM",
    "TransformerLMConfig",
    "VisionTransformer",
    "VisionTransformerConfig",
    "assert_parity",
    "batch_at",
    "causal_mask",
    "combine_masks",
    "compare",
    "compare_generation",
    "compare_training",
    "cross_entropy",
    "errors",
    "from_torch",
    "generate",
    "generate_requests",
    "generate_target",
    "generate_with_draft",
    "load",
    "make_optimizer",
    "narrow_weights",
    "padding_mask",
    "presets",
    "scaled_dot_product_attention",
    "seed_dropout",
    "stream",
    "stream_samples",
    "stream_with_draft",
    "to_torch",
    "train",
    "window_mask",
]


def lazy_attributes(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a ``__getattr__`` for a package's ``__init__``.

    Importing the package then costs nothing: ``--help`` needs neither JAX nor torch.

    Args:
        package: its ``__name__``.
        modules: the module, relative to the package, that defines each public name.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(f"{package}.{modules[name]}")
        if not hasattr(module, name):
            # The name is that of a module.
            importlib.import_module(f"{module.__name__}.{name}")
        value = getattr(module, name)
        found = vars(sys.modules[package])
        found[name] = value
        # A subpackage of the same name, imported meanwhile, would stand in its place.
        for other in modules:
            if isinstance(found.get(other), ModuleType) and other != name:
                get(other)
        return value

    return get


# The public names, by the module that defines them.
_PUBLIC = {
    "api.model": ("Model", "load"),
    "api.runs": ("TrainResult", "train"),
    "inspection.attention_maps": ("AttentionMaps",),
    "attention": ("LayerCache", "MultiHeadAttention"),
    "attention_core": ("scaled_dot_product_attention",),
    "blocks": ("OutputNormBlock", "ParallelBlock", "PostNormBlock", "PreNormBlock"),
    "char_data": ("CharTokenizer", "TokenIdsDataset", "batch_at"),
    "config": (
        "EncoderDecoderConfig",
        "OptimizerConfig",
        "TransformerClassifierConfig",
        "TransformerLMConfig",
    ),
    "config_parts": (
        "BlockConfig",
        "EmbeddingConfig",
        "FeedForwardConfig",
        "LayerPattern",
        "LMEmbeddingConfig",
        "LoRAConfig",
        "NormConfig",
    ),
    "config_attention": ("AttentionConfig", "LatentConfig", "QueryKeyNormConfig"),
    "config_classifiers": ("EncoderDecoderClassifierConfig",),
    "config_dual_encoder": ("DualEncoderConfig",),
    "config_experts": ("ExpertsConfig", "RouterConfig"),
    "config_heads": ("ClassifierConfig", "HeadConfig"),
    "config_positions": (
        "DisentangledConfig",
        "PositionConfig",
        "RotaryConfig",
        "RotaryScalingConfig",
    ),
    "config_speech": ("FeatureConfig", "SpeechClassifierConfig", "SpeechTransformerConfig"),
    "config_vision": ("ImageHeadConfig", "PatchConfig", "VisionTransformerConfig"),
    "continuous_generation": ("Request", "generate_requests"),
    "convolutions": ("FrameConvolution", "SpeechStem"),
    "data.tokenizers": ("HuggingFaceTokenizer",),
    "disentangled": ("DisentangledPositions", "DistanceRows"),
    "dual_encoder": ("DualEncoder",),
    "encoder_decoder": ("Decoder", "Encoder", "EncoderDecoder"),
    "encoder_decoder_classifier": ("EncoderDecoderClassifier",),
    "experts": ("ExpertLinear", "MixtureOfExperts", "Router"),
    "feed_forward": ("FeedForward", "GatedFeedForward"),
    "generation": ("generate", "stream", "stream_samples"),
    "heads": ("ClassifierHead", "LayerSum", "Similarity"),
    "latent_attention": ("LatentAttention",),
    "layers": ("Dropout", "Embedding", "Linear", "seed_dropout"),
    "losses": ("cross_entropy",),
    "masks": ("causal_mask", "combine_masks", "padding_mask", "window_mask"),
    "narrow_linear": ("NarrowLinear", "narrow_weights"),
    "norms": ("LayerNorm", "LayerScale", "RMSNorm"),
    "patches": ("PatchEmbedding",),
    "pooling": ("AttentionPooling",),
    "optimizers": ("make_optimizer",),
    "parity.comparison.generation": ("compare_generation",),
    "parity.comparison.api": ("assert_parity", "compare"),
    "parity.comparison.training": ("compare_training",),
    "parity.report.report": ("Report",),
    "porting.api": ("from_torch", "to_torch"),
    "sequence_generation": ("generate_target",),
    "speculative_generation": ("generate_with_draft", "stream_with_draft"),
    "positions": (
        "ALiBi",
        "LearnedPositions",
        "RelativeBuckets",
        "RelativePositions",
        "Rotary",
        "SinusoidalPositions",
    ),
    "speech_classifier": ("SpeechClassifier",),
    "speech_transformer": ("SpeechTransformer",),
    "training.config": ("PairTrainConfig", "TrainConfig"),
    "transformer_classifier": ("TransformerClassifier",),
    "transformer_lm": ("TransformerLM",),
    "vision_transformer": ("VisionTransformer",),
    "training": ("presets",),
}

if not TYPE_CHECKING:
    # A type checker would take any name for an attribute.
    __getattr__ = lazy_attributes(
        __name__, {name: module for module, names in _PUBLIC.items() for name in names}
    )


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# JAX must not have looked for its devices: whoever imports a part of jaxformer comes here first.
skip_version_check_without_driver()
