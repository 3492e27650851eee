"""Hugging Face's ``whisper`` (arXiv 2212.04356): an encoder of sound and a decoder of text.

The source is a mel spectrogram, of as many frames as the config says; making it of sound is not
part of the model. The encoder's sinusoids stand among the parameters in files, and no optimizer
moves them.

Settings that say which tokens are never made, ``suppress_tokens`` and its kin, change no number of
the model. They go with it, there and back; ``generate_target`` takes them by the same names.
"""

from jaxformer.porting.dialects.bart import (
    ATTENTION,
    STACK,
    own_of_encoder,
    sinusoids,
)
from jaxformer.porting.dialects.common.hugging_face import language_model
from jaxformer.porting.dialects.common.hugging_face_settings import ACTIVATIONS, ATTENTION_DROPOUT
from jaxformer.porting.mapping.packings import Reshaped
from jaxformer.porting.mapping.rules import Rule, Rules, names, under
from jaxformer.porting.mapping.settings import BOOLEAN, Mapped, Required, Row, fixed
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.speech_transformer import SpeechTransformer


def body(module: SpeechTransformer) -> Rules:
    """Returns the rules of the convolutions, of both stacks and of the target's embeddings."""
    width, features = module.config.d_model, module.config.features.num_features

    def convolution(name: str, inputs: int) -> Rules:
        shape = (width, inputs, 3)
        return (
            Rule((f"{name}.proj.kernel",), (f"{name}.weight",), Reshaped(shape)),
            Rule((f"{name}.proj.bias",), (f"{name}.bias",), Reshaped(shape[:1])),
        )

    return (
        *under(
            "stem",
            "encoder",
            (*convolution("conv1", features), *convolution("conv2", width)),
        ),
        *names(
            target_embedding="decoder.embed_tokens",
            position_embedding="decoder.embed_positions",
        ),
        *under("encoder", "encoder", STACK),
        *under("decoder", "decoder", STACK),
        *under("decoder.blocks.*.cross_attention", "decoder.layers.*.encoder_attn", ATTENTION),
    )


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
    Mapped("activation_function", "activation", translation=ACTIVATIONS),
    ATTENTION_DROPOUT,
    Mapped("dropout", ("residual_dropout", "embedding_dropout"), 0.0),
    Mapped("activation_dropout", "hidden_dropout", 0.0),
    Required("is_encoder_decoder", True, is_written=True),
    # Of training alone: the share of whole layers that are dropped, and of features.
    Required("encoder_layerdrop", 0.0),
    Required("decoder_layerdrop", 0.0),
    Required("apply_spec_augment", False),
    Inert(
        (
            # The class computes this factor, and does not use it.
            "scale_embedding",
            # With apply_spec_augment.
            "mask_time_prob", "mask_time_length", "mask_time_min_masks", "mask_feature_prob",
            "mask_feature_length", "mask_feature_min_masks",
            # Of the class that sorts sound, and of times of words.
            "use_weighted_layer_sum", "classifier_proj_size", "median_filter_width",
            # The length of texts, by its name in the first files.
            "max_position_embeddings",
        )
    ),
    *fixed(causal=True, positions="learned", key_bias=False, block="pre_norm", final_norm=True),
)  # fmt: skip
VOCABULARY = (
    Mapped("vocab_size", "target_vocab_size"),
    Mapped("tie_word_embeddings", "tie_embeddings", True, BOOLEAN),
)

DIALECTS = (
    language_model(
        "whisper",
        WHISPER,
        body,
        model=SpeechTransformer,
        vocabulary=VOCABULARY,
        head=names(lm_head="proj_out"),
        outside=("proj_out.",),
        buffers=(sinusoids("encoder", "source_position_embedding"),),
        special_tokens=("suppress_tokens", "begin_suppress_tokens"),
    ),
)
