"""Sizes, inputs and settings of the cases, and how modules are built from settings.

Sizes are all distinct and no weight is square but those that must be (BERT's head and pooler), so
no two axes can be confused and no missing transpose can pass.
"""

from typing import Any

import numpy as np

from parity_tests.harness import Side

Random = np.random.Generator
B, T, S, D, N, K, H, F, V, L, E = 3, 7, 11, 20, 4, 2, 6, 34, 37, 2, 5
LONG = 311


def x(*shape: int) -> Any:
    """An input drawn from a standard normal."""
    return lambda random: random.standard_normal(shape)


def ids(*shape: int, below: int = V) -> Any:
    """Token ids."""
    return lambda random: random.integers(0, below, shape)


def boolean(*shape: int) -> Any:
    """A mask that blocks about a third, and one row of the last batch element altogether."""

    def draw(random: Random) -> np.ndarray:
        mask = random.random(shape) < 0.7
        mask[-1, ..., 2 % shape[-2], :] = False
        return mask

    return draw


def padded(batch: int, length: int) -> Any:
    """A mask of keys that leaves out padding: of one row its end, of another its beginning."""

    def draw(random: Random) -> np.ndarray:
        mask = np.ones((batch, 1, 1, length), bool)
        mask[0, ..., -4:] = mask[-1, ..., :3] = False
        return mask

    return draw


def arange(*shape: int, start: int = 0) -> Any:
    """Positions that rise along the last axis."""
    return lambda random: np.broadcast_to(np.arange(start, start + shape[-1]), shape).copy()


def given(**drawers: Any) -> Any:
    """Keyword arguments, each drawn by its own drawer."""
    return lambda random: {name: draw(random) for name, draw in drawers.items()}


def attention(position: Any = None, **settings: Any) -> Any:
    """A builder of attentions; ``position`` and norms are builders themselves."""

    def build(side: Side) -> Any:
        parts = {k: v(side) if callable(v) else v for k, v in settings.items()}
        made = None if position is None else position(side)
        return side.attention.MultiHeadAttention(
            D, N, **{"head_dim": H, "position": made, **parts}, **side.init
        )

    return build


def block(
    kind: str, cross: bool = False, shared: bool = False, sandwich: bool = False, **settings: Any
) -> Any:
    """A builder of blocks from their parts."""

    def build(side: Side) -> Any:
        dropout = settings.get("dropout", 0.0)
        heads = {"head_dim": H, "attention_dropout": dropout, "output_dropout": dropout}
        make = side.attention.MultiHeadAttention
        return getattr(side.blocks, kind)(
            make(D, N, **heads, **side.init),
            side.feed_forward.FeedForward(
                D, F, hidden_dropout=dropout, output_dropout=dropout, **side.init
            ),
            side.norms.LayerNorm(D),
            None if shared else side.norms.LayerNorm(D),
            cross_attention=make(D, N, **heads, **side.init) if cross else None,
            cross_attention_norm=side.norms.LayerNorm(D) if cross else None,
            attention_output_norm=side.norms.LayerNorm(D) if sandwich else None,
            feed_forward_output_norm=side.norms.LayerNorm(D) if sandwich else None,
            cross_attention_output_norm=side.norms.LayerNorm(D) if sandwich and cross else None,
            residual_dropout=dropout,
            residual_scale=settings.get("residual_scale", 1.0),
        )

    return build


def mixture(**settings: Any) -> Any:
    """A builder of mixtures of experts."""
    return lambda side: side.experts.MixtureOfExperts(
        D, F, **{"num_experts": E, **settings}, **side.init
    )


def latent(query_latent_width: int | None = None, **settings: Any) -> Any:
    """A builder of latent attention."""

    def build(side: Any) -> Any:
        q_norm = side.norms.RMSNorm(query_latent_width) if query_latent_width else None
        return side.latent_attention.LatentAttention(
            D, N, head_dim=10, latent_width=13, rotary_dim=4,
            query_latent_width=query_latent_width, q_norm=q_norm, kv_norm=side.norms.RMSNorm(13),
            position=side.positions.Rotary(4, 13), **settings, **side.init,
        )  # fmt: skip

    return build


LM = {
    "d_model": D,
    "num_heads": N,
    "head_dim": H,
    "d_ff": F,
    "num_layers": L,
    "vocab_size": V,
    "context_length": 13,
}
GEMMA = {
    "positions": "rotary",
    "norm": "rms_norm",
    "norm_unit_offset": True,
    "activation": "geglu_tanh",
    "qkv_bias": False,
    "output_bias": False,
    "feed_forward_bias": False,
    "embedding_scale": D**0.5,
}
BERT = {
    "causal": False,
    "block": "post_norm",
    "final_norm": False,
    "embedding_norm": True,
    "norm_eps": 1e-12,
    "num_token_types": 2,
}
DROPOUTS = {
    "embedding_dropout": 0.2,
    "attention_dropout": 0.3,
    "output_dropout": 0.1,
    "hidden_dropout": 0.25,
    "feed_forward_dropout": 0.15,
    "residual_dropout": 0.35,
}


def lm(**settings: Any) -> Any:
    """A builder of TransformerLMs."""
    return lambda side: side.transformer_lm.TransformerLM(
        side.config.TransformerLMConfig(**{**LM, **settings}), **side.init
    )


def pooling_lm(**settings: Any) -> Any:
    """A builder of TransformerLMs that give the pooled text."""

    def build(side: Side) -> Any:
        class Pooling(side.transformer_lm.TransformerLM):
            def __call__(self, tokens: Any) -> Any:
                return self.pooled(self.hidden(tokens))

        return Pooling(side.config.TransformerLMConfig(**{**LM, **settings}), **side.init)

    return build


def classifier(**settings: Any) -> Any:
    """A builder of TransformerClassifiers of three labels on BERT's body."""
    chosen = {**LM, **BERT, "labels": ("a", "b", "c"), **settings}
    return lambda side: side.transformer_classifier.TransformerClassifier(
        side.config.TransformerClassifierConfig(**chosen), **side.init
    )


ENCDEC = {k: LM[k] for k in ("d_model", "num_heads", "head_dim", "d_ff", "context_length")} | {
    "source_vocab_size": 41,
    "target_vocab_size": V,
    "num_encoder_layers": 2,
    "num_decoder_layers": 3,
}


T5 = {
    "source_vocab_size": V,
    "positions": "relative_buckets",
    "num_position_buckets": 8,
    "max_bucket_distance": 9,
    "attention_scale": 1.0,
    "norm": "rms_norm",
    "block": "pre_norm",
    "activation": "geglu_tanh",
    "qkv_bias": False,
    "output_bias": False,
    "feed_forward_bias": False,
    "head_bias": False,
    "shared_embedding": True,
    "tie_embeddings": True,
    "logit_scale": D**-0.5,
}
BART = {
    "source_vocab_size": V,
    "positions": "learned",
    "position_offset": 2,
    "shared_positions": False,
    "shared_embedding": True,
    "tie_embeddings": True,
    "embedding_norm": True,
    "embedding_scale": D**0.5,
    "final_norm": False,
    "activation": "gelu",
    "encoder_d_ff": 29,
}


def encdec(cls: str, *arguments: Any, **settings: Any) -> Any:
    """A builder of encoders, decoders and both."""

    def build(side: Side) -> Any:
        config = side.config.EncoderDecoderConfig(**{**ENCDEC, **settings})
        return getattr(side.encoder_decoder, cls)(config, *arguments, **side.init)

    return build


def pair_classifier(**settings: Any) -> Any:
    """A builder of EncoderDecoderClassifiers."""

    def build(side: Side) -> Any:
        config = side.config_classifiers.EncoderDecoderClassifierConfig(
            **{**ENCDEC, "labels": ("a", "b", "c"), **settings, "head_bias": False,
               "logit_scale": None}
        )  # fmt: skip
        return side.encoder_decoder_classifier.EncoderDecoderClassifier(config, **side.init)

    return build


CLASSIFIED_PAIR = given(source=ids(B, 13), target=ids(B, 13), source_mask=padded(B, 13))
WHISPER = {
    "num_features": 5,
    "encoder_length": S,
    "source_vocab_size": 0,
    "key_bias": False,
    "encoder_d_ff": 29,
}


def speech(**settings: Any) -> Any:
    """A builder of SpeechTransformers."""

    def build(side: Side) -> Any:
        config = side.config_speech.SpeechTransformerConfig(**{**ENCDEC, **WHISPER, **settings})
        return side.speech_transformer.SpeechTransformer(config, **side.init)

    return build


def hearing(**settings: Any) -> Any:
    """A builder of SpeechClassifiers of three labels."""
    chosen: dict[str, Any] = {
        "d_model": D, "num_heads": N, "head_dim": H, "d_ff": F, "num_layers": L,
        "context_length": S, "encoder_length": S, "num_features": 5, "key_bias": False,
        "labels": ("a", "b", "c"), "classifier_width": 7, **settings,
    }  # fmt: skip

    def build(side: Side) -> Any:
        config = side.config_speech.SpeechClassifierConfig(**chosen)
        return side.speech_classifier.SpeechClassifier(config, **side.init)

    return build


FRAMES = given(features=x(B, 5, 2 * S))
# Twice as many frames as the encoder has positions.
SOUND = given(source=x(B, 5, 2 * S), target=ids(B, T))
# A text, and rows of distances.
ROWS = given(query=x(B, 13, D), position_rows=x(8, D))
VISION = {
    "d_model": D,
    "num_heads": N,
    "head_dim": H,
    "d_ff": F,
    "num_layers": L,
    "image_height": 11,
    "image_width": 21,
    "patch_height": 3,
    "patch_width": 5,
    "num_channels": 2,
    "context_length": 13,
}
IMAGES = x(B, 2, 11, 21)
# Fewer images than texts, whose end token is 5.
TEXTS_AND_IMAGES = given(tokens=ids(5, T, below=9), images=IMAGES)
# What remains of 11 by 21 pixels is 3 by 4 patches.
PARTLY_MASKED = given(images=IMAGES, masked=lambda random: random.random((B, 12)) < 0.4)


def vision(pools: bool = False, **settings: Any) -> Any:
    """A builder of VisionTransformers, which with ``pools`` give the pooled images."""

    def build(side: Side) -> Any:
        class Pooling(side.vision_transformer.VisionTransformer):
            def __call__(self, images: Any) -> Any:
                return self.pooled(self.hidden(images))

        cls = Pooling if pools else side.vision_transformer.VisionTransformer
        config = side.config_vision.VisionTransformerConfig(**{**VISION, **settings})
        return cls(config, **side.init)

    return build


def dual_encoder(
    text: dict[str, Any], vision: dict[str, Any], *, reads: bool = False, **settings: Any
) -> Any:
    """A builder of DualEncoders, which with ``reads`` give the vectors of texts."""

    def build(side: Side) -> Any:
        class Reading(side.dual_encoder.DualEncoder):
            def __call__(self, tokens: Any) -> Any:
                return self.text_vectors(tokens)

        config = side.config_dual_encoder.DualEncoderConfig(
            text=side.config.TransformerLMConfig(**{**LM, "head": "none", **text}),
            vision=side.config_vision.VisionTransformerConfig(**{**VISION, **vision}),
            **settings,
        )
        return (Reading if reads else side.dual_encoder.DualEncoder)(config, **side.init)

    return build


CLIP = dual_encoder(
    {},
    {"embedding_norm": True, "final_norm": False, "pooled_norm": True, "d_model": 16},
    projection_width=9,
    end_token=5,
)
SIGLIP = dual_encoder(
    {"causal": False, "pooler": True, "pooled_token": "last", "pooler_tanh": False},
    {"class_token": False, "context_length": 12, "pooling": "attention"},
    text_vector="pooler",
    similarity_bias=True,
)


def rotary(max_length: int = 50, **settings: Any) -> Any:
    """A builder of rotary schemes."""

    def build(side: Side) -> Any:
        made = dict(settings)
        if "scaling" in made:
            made["scaling"] = side.positions.RotaryScaling(**made["scaling"])
        return side.positions.Rotary(H, max_length, **made)

    return build


LINEAR = {"kind": "linear", "factor": 3.0}
LLAMA3 = {
    "kind": "llama3",
    "factor": 8.0,
    "low_frequency_factor": 1.0,
    "high_frequency_factor": 4.0,
    "original_context_length": 64,
}


YARN = {"kind": "yarn", "factor": 4.0, "original_context_length": 64, "beta_fast": 8.0}
LONGROPE = {
    "kind": "longrope",
    "factor": 4.0,
    "original_context_length": 64,
    "short_factors": (1.0, 1.1, 1.3),
    "long_factors": (1.0, 2.5, 6.0),
}
NTK = {"kind": "ntk", "factor": 50.0}
DYNAMIC = {"kind": "dynamic", "factor": 3.0, "original_context_length": 64}
PROPORTIONAL = {"kind": "proportional", "factor": 2.0, "proportion": 0.7}


def alibi(side: Side) -> Any:
    """ALiBi for the attention of this table."""
    return side.positions.ALiBi(N)


def disentangled(**settings: Any) -> Any:
    """A builder of disentangled positions, with rows of 4 buckets to each side."""
    return lambda side: side.disentangled.DisentangledPositions(
        D, N, H, span=4, **settings, **side.init
    )


def relative(side: Side) -> Any:
    """Relative positions up to 5 away."""
    return side.positions.RelativePositions(5, H, **side.init)


def head_norm(side: Side) -> Any:
    """A norm of queries or keys."""
    return side.norms.RMSNorm(H)


def wide_norm(heads: int, *, per_head: bool = False) -> Any:
    """A norm of all heads' queries or keys: over all at once, or with a row of scales for each."""
    features = (heads, H) if per_head else heads * H
    return lambda side: side.norms.LayerNorm(features, use_bias=False)


def integer(value: int) -> Any:
    """A plain number that is part of the call."""
    return lambda random: value


SELF = given(query=x(B, T, D))
CROSS = given(query=x(B, T, D), key=x(B, S, D), value=x(B, S, D), mask=boolean(B, 1, T, S))
MASKED = given(query=x(B, T, D), mask=boolean(B, 1, T, T))
FAR = given(query=x(1, LONG, D))
QKV = given(q_BTNH=x(B, T, N, H), k_BSKH=x(B, S, K, H), v_BSKH=x(B, S, K, 9))
HEADS = given(x_BTNH=x(B, T, N, H), positions=arange(1, T, start=3))
SCORES = given(
    q_BTNH=x(B, T, N, H), distance_TS=lambda random: np.arange(S) - np.arange(T)[:, None]
)
FAR_SCORES = given(
    q_BTNH=x(B, T, N, H), distance_TS=lambda random: np.arange(LONG) - 150 + np.arange(T)[:, None]
)
FLOW = given(x=x(B, T, D))
MASKED_FLOW = given(x=x(B, T, D), mask=boolean(B, 1, T, T))
FEED_FORWARD_DROPOUTS = {"hidden_dropout": 0.2, "output_dropout": 0.3}
TOKENS = given(tokens=ids(B, 13))
FAR_TOKENS = given(tokens=ids(2, LONG))
DECODING = given(
    x=x(B, T, D), mask=boolean(B, 1, T, T), memory=x(B, S, D), memory_mask=boolean(B, 1, T, S)
)
BOTH = given(source=ids(B, S, below=41), target=ids(B, T))
