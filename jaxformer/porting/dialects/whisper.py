"""Hugging Face's ``whisper`` (arXiv 2212.04356): an encoder of sound and a decoder of text.

The source is a mel spectrogram, of as many frames as the config says; making it of sound is not
part of the model. The encoder's sinusoids stand among the parameters in files, and no optimizer
moves them.

``WhisperForAudioClassification`` is the encoder with a classifier, a ``SpeechClassifier``. Its
projector stands before the mean over time there and behind it here, which is the same.

``WhisperForCausalLM`` is the decoder alone, a language model, as of BART's kin: its files hold the
attention to a source too, which nothing there uses: leave it out by ``--ignore``.

Settings that say which tokens are never made, ``suppress_tokens`` and its kin, change no number of
the model. They go with it, there and back; ``generate_target`` takes them by the same names.
"""

import dataclasses
from typing import Any

from jaxformer.config_speech import SpeechClassifierConfig
from jaxformer.porting.dialects.bart import (
    ATTENTION,
    DECODER,
    STACK,
    own_of_encoder,
    sinusoids,
)
from jaxformer.porting.dialects.common.halves import decoder_mapping
from jaxformer.porting.dialects.common.hugging_face import language_model, read_fields
from jaxformer.porting.dialects.common.hugging_face_settings import ACTIVATIONS, ATTENTION_DROPOUT
from jaxformer.porting.dialects.common.known_settings import SHARED
from jaxformer.porting.dialects.common.task_heads import Labels
from jaxformer.porting.mapping.adapter import ConfigReader, ModuleMapping
from jaxformer.porting.mapping.packings import Reshaped
from jaxformer.porting.mapping.rules import Rule, Rules, names, under
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    Mapped,
    Required,
    Row,
    fixed,
    write_settings,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.speech_classifier import SpeechClassifier
from jaxformer.speech_transformer import SpeechTransformer

TOKENS = ("suppress_tokens", "begin_suppress_tokens")
HEAD = names(lm_head="proj_out")


def stem(module: SpeechTransformer | SpeechClassifier) -> Rules:
    """Returns the rules of the convolutions."""
    width, features = module.config.d_model, module.config.features.num_features

    def convolution(name: str, inputs: int) -> Rules:
        shape = (width, inputs, 3)
        return (
            Rule((f"{name}.proj.kernel",), (f"{name}.weight",), Reshaped(shape)),
            Rule((f"{name}.proj.bias",), (f"{name}.bias",), Reshaped(shape[:1])),
        )

    convolutions = (*convolution("conv1", features), *convolution("conv2", width))
    return under("stem", "encoder", convolutions)


def body(module: SpeechTransformer) -> Rules:
    """Returns the rules of the convolutions, of both stacks and of the target's embeddings."""
    return (
        *stem(module),
        *names(
            target_embedding="decoder.embed_tokens",
            position_embedding="decoder.embed_positions",
        ),
        *under("encoder", "encoder", STACK),
        *under("decoder", "decoder", STACK),
        *under("decoder.blocks.*.cross_attention", "decoder.layers.*.encoder_attn", ATTENTION),
    )


RATES: tuple[Row, ...] = (
    Mapped("activation_function", "activation", translation=ACTIVATIONS),
    ATTENTION_DROPOUT,
    Mapped("dropout", ("residual_dropout", "embedding_dropout"), 0.0),
    Mapped("activation_dropout", "hidden_dropout", 0.0),
)
# Of training alone: the share of whole layers that are dropped, and of features.
ALL_LAYERS = Required("encoder_layerdrop", 0.0)
ALL_TARGET_LAYERS = Required("decoder_layerdrop", 0.0)
ALL_FEATURES = Required("apply_spec_augment", False)
UNUSED = Inert(
    (
        # The class computes this factor, and does not use it.
        "scale_embedding",
        # With apply_spec_augment.
        "mask_time_prob", "mask_time_length", "mask_time_min_masks", "mask_feature_prob",
        "mask_feature_length", "mask_feature_min_masks",
        # Of times of words.
        "median_filter_width",
        # The length of texts, by its name in the first files.
        "max_position_embeddings",
    )
)  # fmt: skip
CLASSES = Inert(("use_weighted_layer_sum", "classifier_proj_size"))
PRE_NORM = {"key_bias": False, "block": "pre_norm", "final_norm": True}
WHISPER: tuple[Row, ...] = (
    Mapped(("d_model", "hidden_size"), "d_model"),
    Mapped("decoder_attention_heads", "num_heads"),
    own_of_encoder(
        ("encoder_attention_heads", "num_attention_heads"),
        "encoder_num_heads",
        "num_heads",
        lambda encoder: encoder.attention.num_heads,
    ),
    Mapped("decoder_ffn_dim", "d_ff", written_from="feed_forward_width"),
    own_of_encoder(
        "encoder_ffn_dim", "encoder_d_ff", "d_ff", lambda encoder: encoder.feed_forward_width
    ),
    Mapped(("encoder_layers", "num_hidden_layers"), "num_encoder_layers"),
    Mapped("decoder_layers", "num_decoder_layers"),
    Mapped("max_target_positions", "context_length"),
    Mapped("max_source_positions", "encoder_length"),
    Mapped("num_mel_bins", "num_features"),
    *RATES,
    Required("is_encoder_decoder", True, is_written=True),
    ALL_LAYERS,
    ALL_TARGET_LAYERS,
    ALL_FEATURES,
    UNUSED,
    CLASSES,
    *fixed(causal=True, positions="learned", **PRE_NORM),
)
CLASSIFIER: tuple[Row, ...] = (
    Mapped(("d_model", "hidden_size"), "d_model"),
    Mapped(("encoder_attention_heads", "num_attention_heads"), "num_heads"),
    Mapped("encoder_ffn_dim", "d_ff", written_from="feed_forward_width"),
    Mapped(("encoder_layers", "num_hidden_layers"), "num_layers"),
    Mapped("max_source_positions", ("context_length", "encoder_length")),
    Mapped("num_mel_bins", "num_features"),
    *RATES,
    Mapped("use_weighted_layer_sum", "layer_sum", False, BOOLEAN),
    Mapped("classifier_proj_size", "classifier_width", 256, written_from="projected_width"),
    Labels(),
    ALL_LAYERS,
    ALL_FEATURES,
    UNUSED,
    # Of the decoder, which is not there.
    Inert(
        (
            "decoder_layers", "decoder_attention_heads", "decoder_ffn_dim", "decoder_layerdrop",
            "max_target_positions", "vocab_size", "tie_word_embeddings", "is_encoder_decoder",
        )
    ),
    *fixed(classified="mean", classifier_transform=True, classifier_activation="none", **PRE_NORM),
)  # fmt: skip
DECODER_ALONE: tuple[Row, ...] = (
    Mapped(("d_model", "hidden_size"), "d_model"),
    Mapped("decoder_attention_heads", "num_heads"),
    Mapped("decoder_ffn_dim", "d_ff", written_from="feed_forward_width"),
    Mapped("decoder_layers", "num_layers"),
    Mapped("max_target_positions", "context_length"),
    Mapped("vocab_size", "vocab_size"),
    Mapped("tie_word_embeddings", "tie_embeddings", True, BOOLEAN),
    *RATES,
    ALL_TARGET_LAYERS,
    UNUSED,
    CLASSES,
    # Of the encoder, which is not there. The class changes the last two as it needs them.
    Inert(
        (
            "encoder_layers", "num_hidden_layers", "encoder_attention_heads",
            "num_attention_heads", "encoder_ffn_dim", "encoder_layerdrop", "max_source_positions",
            "num_mel_bins", "apply_spec_augment", "is_encoder_decoder", "is_decoder",
        )
    ),
    *fixed(positions="learned", **PRE_NORM),
)  # fmt: skip
VOCABULARY = (
    Mapped("vocab_size", "target_vocab_size"),
    Mapped("tie_word_embeddings", "tie_embeddings", True, BOOLEAN),
)


def _classifier() -> ModuleMapping:
    """Returns the mapping of the encoder with a classifier."""
    kind = "WhisperForAudioClassification"

    def read_config(source_model: SourceModel) -> SpeechClassifierConfig:
        return SpeechClassifierConfig(
            **read_fields("whisper", (*CLASSIFIER, *SHARED), source_model)
        )

    def rules(module: SpeechClassifier) -> Rules:
        return (
            *stem(module),
            *under("", "encoder", STACK),
            *names({"classifier.proj": "projector", "classifier.out_proj": "classifier"}),
            Rule(("layer_sum.scale",), ("layer_weights",)),
        )

    def write(module: SpeechClassifier) -> dict[str, Any]:
        about = {"model_type": "whisper", "architectures": [kind]}
        return {**about, **write_settings(CLASSIFIER, module.config)}

    return ModuleMapping(
        (kind,),
        SpeechClassifier,
        ConfigReader(read_config),
        rules,
        buffers=(sinusoids("encoder"),),
        settings=write,
    )


WHOLE = language_model(
    "whisper",
    WHISPER,
    body,
    model=SpeechTransformer,
    vocabulary=VOCABULARY,
    head=HEAD,
    outside=("proj_out.",),
    buffers=(sinusoids("encoder", "source_position_embedding"),),
    special_tokens=TOKENS,
)
ALONE = decoder_mapping(
    "whisper", "WhisperForCausalLM", DECODER_ALONE, DECODER, head=HEAD, special_tokens=TOKENS
)
DIALECTS = (
    dataclasses.replace(WHOLE, module_mappings=(*WHOLE.module_mappings, ALONE, _classifier())),
)
