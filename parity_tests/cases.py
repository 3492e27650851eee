"""The table: every component with every setting, as one row a case.

Sizes are all distinct and no weight is square but those that must be (BERT's head and pooler), so
no two axes can be confused and no missing transpose can pass.
"""

from typing import Any

import numpy as np

from parity_tests.harness import Case, Side

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

CASES = [
    Case("layers/linear", lambda s: s.layers.Linear(D, F, **s.init), FLOW),
    Case("layers/linear-no-bias", lambda s: s.layers.Linear(D, F, use_bias=False, **s.init), FLOW),
    Case("layers/embedding", lambda s: s.layers.Embedding(V, D, **s.init), given(ids=ids(B, T))),
    Case("layers/tied-head", lambda s: s.layers.Embedding(V, D, **s.init), FLOW, method="attend"),
    Case("layers/dropout", lambda s: s.layers.Dropout(0.4), FLOW, dropout=True),
    Case("adapters/lora-linear", lambda s: s.adapters.LoRALinear(
         D, F, rank=5, alpha=7.0, **s.init), FLOW),
    Case("adapters/lora-linear-no-bias", lambda s: s.adapters.LoRALinear(
         D, F, rank=5, alpha=7.0, dropout=0.3, use_bias=False, **s.init), FLOW, dropout=True),
    Case("norms/layer-norm", lambda s: s.norms.LayerNorm(D), FLOW),
    Case("norms/layer-norm-no-bias", lambda s: s.norms.LayerNorm(D, use_bias=False), FLOW),
    Case("norms/layer-norm-eps", lambda s: s.norms.LayerNorm(D, eps=1e-2), FLOW),
    Case("norms/rms-norm", lambda s: s.norms.RMSNorm(D, eps=1e-6), FLOW),
    Case("norms/rms-norm-unit-offset", lambda s: s.norms.RMSNorm(D, unit_offset=True), FLOW),
    Case("norms/layer-norm-plain", lambda s: s.norms.LayerNorm(D, use_scale=False, use_bias=False),
         FLOW),
    Case("norms/layer-norm-bias-alone", lambda s: s.norms.LayerNorm(D, use_scale=False), FLOW),
    Case("norms/layer-norm-unit-offset", lambda s: s.norms.LayerNorm(D, unit_offset=True), FLOW),
    Case("norms/layer-norm-per-head", lambda s: s.norms.LayerNorm((N, H)),
         given(x=x(B, T, N, H))),
    Case("norms/rms-norm-per-head", lambda s: s.norms.RMSNorm((N, H), unit_offset=True),
         given(x=x(B, T, N, H))),
    Case("norms/layer-scale", lambda s: s.norms.LayerScale(D, initial=0.3), FLOW),
    Case("convolutions/frames", lambda s: s.convolutions.FrameConvolution(
        D, F, width=5, stride=3, **s.init), given(x=x(B, S, D))),
    Case("convolutions/frames-even", lambda s: s.convolutions.FrameConvolution(
        D, F, stride=2, **s.init), given(x=x(B, 12, D))),
    Case("convolutions/speech", lambda s: s.convolutions.SpeechStem(
        5, D, **s.init), given(features=x(B, 5, 12))),
    Case("pooling/attention", lambda s: s.pooling.AttentionPooling(
        D, attention()(s), s.norms.LayerNorm(D), s.feed_forward.FeedForward(D, F, **s.init),
        **s.init), FLOW),
    Case("patches/patch-embedding", lambda s: s.patches.PatchEmbedding(
        D, patch_height=3, patch_width=5, num_channels=2, **s.init), given(images=IMAGES)),
    Case("patches/patch-embedding-no-bias", lambda s: s.patches.PatchEmbedding(
        D, patch_height=4, patch_width=3, num_channels=2, use_bias=False, **s.init),
        given(images=IMAGES)),
    Case("norms/rms-norm-plain", lambda s: s.norms.RMSNorm(D, use_scale=False), FLOW),
    Case("positions/learned", lambda s: s.positions.LearnedPositions(13, D, **s.init),
         given(length=integer(T))),
    Case("positions/learned-at", lambda s: s.positions.LearnedPositions(13, D, **s.init),
         given(length=integer(T), positions=arange(B, T, start=4))),
    Case("positions/learned-offset", lambda s: s.positions.LearnedPositions(
        13, D, offset=2, **s.init), given(length=integer(T))),
    Case("positions/learned-offset-at", lambda s: s.positions.LearnedPositions(
        13, D, offset=2, **s.init), given(length=integer(T), positions=arange(B, T, start=6))),
    Case("positions/sinusoidal", lambda s: s.positions.SinusoidalPositions(LONG, D),
         given(length=integer(LONG))),
    Case("positions/sinusoidal-at", lambda s: s.positions.SinusoidalPositions(5000, D),
         given(length=integer(LONG), positions=arange(1, LONG, start=4600))),
    Case("positions/sinusoidal-halves", lambda s: s.positions.SinusoidalPositions(
        LONG, D + 1, halves=True, offset=2), given(length=integer(LONG))),
    Case("positions/sinusoidal-halves-at", lambda s: s.positions.SinusoidalPositions(
        5000, D, halves=True, offset=2), given(length=integer(LONG), positions=arange(
            1, LONG, start=4600))),
    Case("positions/rotary-half", rotary(), HEADS, method="rotate"),
    Case("positions/rotary-interleaved", rotary(interleaved=True), HEADS, method="rotate"),
    Case("positions/rotary-partial", rotary(fraction=0.67), HEADS, method="rotate"),
    Case("positions/rotary-base", rotary(base=500.0), HEADS, method="rotate"),
    Case("positions/rotary-linear", rotary(scaling=LINEAR), HEADS, method="rotate"),
    Case("positions/rotary-llama3", rotary(scaling=LLAMA3), HEADS, method="rotate"),
    Case("positions/rotary-yarn", rotary(base=500.0, scaling=YARN), HEADS, method="rotate"),
    Case("positions/rotary-yarn-exact", rotary(base=500.0, fraction=0.67, scaling={
        **YARN, "truncate": False, "attention_factor": 0.7}), HEADS, method="rotate"),
    Case("positions/rotary-longrope-short", rotary(LONG, scaling=LONGROPE), HEADS,
         method="rotate"),
    Case("positions/rotary-longrope-long", rotary(LONG, scaling=LONGROPE),
         given(x_BTNH=x(B, T, N, H), positions=arange(1, T, start=61)), method="rotate"),
    Case("positions/rotary-longrope-within", rotary(scaling=LONGROPE), HEADS, method="rotate"),
    Case("positions/rotary-ntk", rotary(scaling=NTK), HEADS, method="rotate"),
    Case("positions/rotary-dynamic-within", rotary(LONG, scaling=DYNAMIC), HEADS,
         method="rotate"),
    Case("positions/rotary-dynamic-beyond", rotary(LONG, scaling=DYNAMIC),
         given(x_BTNH=x(B, T, N, H), positions=arange(B, T, start=200)), method="rotate"),
    Case("positions/rotary-proportional", rotary(scaling=PROPORTIONAL), HEADS, method="rotate"),
    Case("positions/alibi", alibi, SCORES, method="bias"),
    Case("positions/alibi-6-heads", lambda s: s.positions.ALiBi(6), SCORES, method="bias"),
    Case("positions/alibi-mpt", lambda s: s.positions.ALiBi(6, max_bias=5.0), SCORES,
         method="bias"),
    Case("positions/alibi-falcon", lambda s: s.positions.ALiBi(
        6, scale=0.3, in_bfloat16=True), given(q_BTNH=x(B, T, 6, H), distance_TS=lambda random:
        np.arange(LONG) - np.arange(T)[:, None]), method="bias"),
    Case("positions/relative", relative, SCORES, method="bias"),
    Case("positions/relative-buckets", lambda s: s.positions.RelativeBuckets(
        17, N, max_distance=61, **s.init), FAR_SCORES, method="bias"),
    Case("positions/relative-buckets-causal", lambda s: s.positions.RelativeBuckets(
        32, N, causal=True, **s.init), FAR_SCORES, method="bias"),
    Case("positions/sinusoidal-exact", lambda s: s.positions.SinusoidalPositions(
        LONG, D, halves=True, exact=True), given(length=integer(LONG))),
    Case("disentangled/attention", attention(disentangled()), ROWS, weights=True),
    Case("disentangled/logarithmic", attention(disentangled(max_distance=9, dropout=0.3)), ROWS,
         dropout=True),
    Case("disentangled/keys-alone", attention(disentangled(
        content_to_position=False, shares_projections=True)), ROWS),
    Case("attention/core", lambda s: s.attention.scaled_dot_product_attention, QKV, first=True),
    Case("attention/core-masked", lambda s: s.attention.scaled_dot_product_attention,
         lambda r: {**QKV(r), "mask": boolean(B, 1, T, S)(r), "bias": x(1, N, T, S)(r)},
         first=True),
    Case("attention/multi-head", attention(), SELF, weights=True),
    Case("attention/masked", attention(), MASKED, weights=True),
    Case("attention/no-key-bias", attention(key_bias=False), MASKED, weights=True),
    Case("attention/no-bias", attention(use_bias=False, output_bias=False), MASKED, weights=True),
    Case("attention/cross", attention(), CROSS, weights=True),
    Case("attention/cross-key-only", attention(), given(query=x(B, T, D), key=x(B, S, D)),
         weights=True),
    Case("attention/grouped-query", attention(num_kv_heads=K), MASKED, weights=True),
    Case("attention/multi-query", attention(num_kv_heads=1), CROSS, weights=True),
    Case("attention/additive-bias", attention(),
         given(query=x(B, T, D), bias=x(1, N, T, T), mask=boolean(B, 1, T, T)), weights=True),
    Case("attention/scale", attention(scale=0.3), SELF, weights=True),
    Case("attention/soft-cap", attention(score_soft_cap=3.0), MASKED, weights=True),
    Case("attention/query-key-norm", attention(q_norm=head_norm, k_norm=head_norm), MASKED,
         weights=True),
    Case("attention/query-key-norm-per-head", attention(
        q_norm=wide_norm(N, per_head=True), k_norm=wide_norm(K, per_head=True), num_kv_heads=K),
         MASKED, weights=True),
    Case("attention/query-key-norm-all-heads", attention(
        rotary(), q_norm=wide_norm(N), k_norm=wide_norm(K), num_kv_heads=K, norm_all_heads=True),
         MASKED, weights=True),
    Case("attention/query-key-norm-after-rotation", attention(
        rotary(), q_norm=head_norm, k_norm=head_norm, norm_after_rotation=True), MASKED,
         weights=True),
    Case("attention/sinks", attention(sinks=True, num_kv_heads=K), MASKED, weights=True),
    *[
        Case(f"latent_attention/{name}", latent(**settings), MASKED, weights=True)
        for name, settings in (
            ("queries", {"query_latent_width": 9, "use_bias": True, "output_bias": True}),
            ("plain", {"value_dim": 11, "scale": 0.3}))
    ],
    Case("attention/clipped", attention(qkv_clip=0.3, num_kv_heads=K), MASKED, weights=True),
    Case("attention/one-head-alone", lambda s: s.attention.MultiHeadAttention(
        D, 1, head_dim=H, output_projection=False, **s.init), MASKED, weights=True),
    Case("attention/dropout", attention(attention_dropout=0.3, output_dropout=0.2), MASKED,
         weights=True, dropout=True),
    Case("attention/rotary", attention(rotary(interleaved=True)), MASKED, weights=True),
    Case("attention/rotary-at", attention(rotary(), num_kv_heads=K),
         given(query=x(B, T, D), positions=arange(B, T, start=9)), weights=True),
    Case("attention/alibi", attention(alibi), MASKED, weights=True),
    Case("attention/relative", attention(relative), MASKED, weights=True),
    Case("attention/relative-cross", attention(relative), CROSS, weights=True),
    Case("attention/far-none", attention(), FAR, weights=True),
    Case("attention/far-rotary-half", attention(rotary(LONG)), FAR, weights=True),
    Case("attention/far-rotary-interleaved", attention(rotary(LONG, interleaved=True)), FAR,
         weights=True),
    Case("attention/far-rotary-llama3", attention(rotary(LONG, scaling=LLAMA3)), FAR,
         weights=True),
    Case("attention/far-rotary-yarn", attention(rotary(LONG, scaling=YARN)), FAR, weights=True),
    Case("attention/far-rotary-longrope", attention(rotary(LONG, scaling=LONGROPE)), FAR,
         weights=True),
    Case("attention/far-rotary-dynamic", attention(rotary(LONG, scaling=DYNAMIC)), FAR,
         weights=True),
    Case("attention/far-alibi", attention(alibi), FAR, weights=True),
    Case("attention/far-relative", attention(relative), FAR, weights=True),
    *[
        Case(f"feed_forward/{activation}", lambda s, a=activation: s.feed_forward.FeedForward(
            D, F, activation=a, **FEED_FORWARD_DROPOUTS, **s.init), FLOW, dropout=True)
        for activation in ("relu", "gelu", "gelu_tanh", "gelu_bloom", "silu", "relu_squared",
                           "quick_gelu", "xielu")
    ],
    *[
        Case(f"feed_forward/gated-{activation}", lambda s, a=activation:
             s.feed_forward.GatedFeedForward(D, F, activation=a, use_bias=a == "gelu",
                                             **FEED_FORWARD_DROPOUTS, **s.init),
             FLOW, dropout=True)
        for activation in ("silu", "gelu", "gelu_tanh", "quick_gelu")
    ],
    Case("feed_forward/clamped", lambda s: s.feed_forward.GatedFeedForward(
        D, F, activation="clamped_silu", clamp=(1.5, 0.7), **s.init), FLOW),
    Case("feed_forward/default-width", lambda s: s.feed_forward.GatedFeedForward(D, **s.init),
         FLOW),
    *[
        Case(f"experts/linear{name}", lambda s, b=use_bias: s.experts.ExpertLinear(
            E, D, F, use_bias=b, **s.init), given(x=x(rows, D), experts=ids(rows, below=below)))
        for name, rows, below, use_bias in (
            ("", B * T, E, False), ("-bias", B * T, E, True), ("-unused", 5, 2, True),
            ("-far", LONG, E, False))
    ],
    Case("experts/mixture", mixture(activation="gelu", **FEED_FORWARD_DROPOUTS), FLOW,
         dropout=True),
    Case("experts/mixture-of-one",
         mixture(experts_per_token=1, router={"normalize_weights": False}), FLOW),
    Case("experts/mixture-of-all", mixture(experts_per_token=E), FLOW),
    Case("experts/mixture-shared", mixture(
        router={"normalize_weights": False}, shared_d_ff=F - 3, output_dropout=0.3), FLOW,
        dropout=True),
    Case("experts/mixture-biases", mixture(
        use_bias=True, router={"kind": "softmax_of_chosen", "use_bias": True}, shared_d_ff=F - 3),
        FLOW),
    *[
        Case(f"experts/mixture-sigmoid{name}", mixture(
            num_experts=12, experts_per_token=3, router={
                "kind": "sigmoid", "choice_bias": True, "weight_scale": 2.5, **settings}), FLOW)
        for name, settings in (
            ("", {}), ("-groups", {"groups": 4, "groups_per_token": 2, "normalize_weights": False}))
    ],
    Case("experts/mixture-shared-gate", mixture(shared_d_ff=F - 3, shared_gate=True),
         given(x=x(2, LONG, D))),
    *[
        Case(f"blocks/{kind}", block(kind, dropout=0.2), MASKED_FLOW,
             weights=True, dropout=True)
        for kind in ("PreNormBlock", "PostNormBlock", "ParallelBlock")
    ],
    *[
        Case(f"blocks/{kind}-decoder", block(kind, cross=True, dropout=0.2), DECODING,
             weights=True, dropout=True)
        for kind in ("PreNormBlock", "PostNormBlock", "ParallelBlock")
    ],
    Case("blocks/OutputNormBlock", block("OutputNormBlock", dropout=0.2), MASKED_FLOW,
         weights=True, dropout=True),
    Case("blocks/OutputNormBlock-decoder", block("OutputNormBlock", cross=True, dropout=0.2),
         DECODING, weights=True, dropout=True),
    *[
        Case(f"blocks/{kind}-scaled", block(kind, cross=True, dropout=0.2, residual_scale=0.3),
             DECODING, weights=True, dropout=True)
        for kind in ("PreNormBlock", "PostNormBlock", "OutputNormBlock", "ParallelBlock")
    ],
    Case("blocks/PreNormBlock-sandwich", block("PreNormBlock", cross=True, sandwich=True,
                                               dropout=0.2), DECODING, weights=True, dropout=True),
    Case("blocks/ParallelBlock-shared", block("ParallelBlock", shared=True, dropout=0.2),
         MASKED_FLOW, weights=True, dropout=True),
    Case("heads/transform", lambda s: s.heads.HeadTransform(
        D, s.norms.LayerNorm(D, eps=1e-12), activation="gelu", **s.init), FLOW),
    Case("heads/transform-narrow", lambda s: s.heads.HeadTransform(
        D, s.norms.LayerNorm(9), activation="relu_squared", out_features=9, **s.init), FLOW),
    Case("heads/classifier", lambda s: s.heads.ClassifierHead(D, 5, dropout=0.2, **s.init), FLOW,
         dropout=True),
    Case("heads/classifier-narrow", lambda s: s.heads.ClassifierHead(
        D, 5, transform=True, transform_width=7, activation="none", **s.init), FLOW),
    Case("heads/classifier-transform", lambda s: s.heads.ClassifierHead(
        D, 5, transform=True, transform_bias=False, norm=s.norms.LayerNorm(D), use_bias=False,
        input_dropout=0.3, dropout=0.2, **s.init), FLOW, dropout=True),
    Case("heads/layer-sum", lambda s: s.heads.LayerSum(3), given(streams=x(3, B, T, D))),
    Case("heads/similarity", lambda s: s.heads.Similarity(), given(x=x(B, D), y=x(S, D))),
    Case("heads/similarity-bias", lambda s: s.heads.Similarity(use_bias=True),
         given(x=x(B, D), y=x(S, D))),
    Case("heads/bias", lambda s: s.heads.OutputBias(D), FLOW),
    Case("transformer_lm/gpt2", lm(activation="gelu_tanh", **DROPOUTS), TOKENS, weights=True,
         dropout=True),
    Case("transformer_lm/lora", lm(lora_rank=3, lora_targets="q_proj,o_proj,up_proj"), TOKENS),
    Case("transformer_lm/nanogpt", lm(qkv_bias=False, output_bias=False, feed_forward_bias=False,
                                      norm_bias=False), TOKENS, weights=True),
    Case("transformer_lm/char-lm", lm(qkv_bias=False, attention_dropout=0.1, output_dropout=0.1,
                                      feed_forward_dropout=0.1), TOKENS, weights=True,
         dropout=True),
    Case("transformer_lm/llama", lm(positions="rotary", norm="rms_norm", activation="swiglu",
                                    num_kv_heads=K, qkv_bias=False, output_bias=False,
                                    feed_forward_bias=False, tie_embeddings=False),
         TOKENS, weights=True),
    Case("transformer_lm/mistral", lm(positions="rotary", norm="rms_norm", activation="swiglu",
                                      num_kv_heads=K, sliding_window=5), TOKENS, weights=True),
    Case("transformer_lm/qwen2", lm(positions="rotary", norm="rms_norm", activation="swiglu",
                                    num_kv_heads=K, output_bias=False, feed_forward_bias=False,
                                    sliding_window=4, full_attention_layers=(0,)),
         TOKENS, weights=True),
    Case("transformer_lm/gemma", lm(**GEMMA, num_kv_heads=1), TOKENS, weights=True),
    Case("transformer_lm/gemma2", lm(**GEMMA, num_layers=4, num_kv_heads=K, score_soft_cap=5.0,
                                     logit_soft_cap=3.0, attention_scale=0.4, sliding_window=5,
                                     full_attention_layers=(1, 3), branch_output_norm=True),
         TOKENS, weights=True),
    Case("transformer_lm/qwen3", lm(positions="rotary", norm="rms_norm", activation="swiglu",
                                    num_kv_heads=K, query_key_norm=True), TOKENS, weights=True),
    Case("transformer_lm/experts", lm(
        positions="rotary", norm="rms_norm", activation="swiglu", feed_forward_bias=False,
        num_layers=3, num_experts=E, expert_d_ff=F - 5, shared_expert_d_ff=F - 3,
        shared_expert_gate=True, dense_layers=(1,), hidden_dropout=0.2), TOKENS, weights=True,
        dropout=True),
    Case("transformer_lm/latent", lm(
        positions="rotary", norm="rms_norm", head_dim=10, latent_width=13, query_latent_width=9,
        rotary_head_dim=4, value_head_dim=7, qkv_bias=False, attention_dropout=0.2), TOKENS,
        weights=True, dropout=True),
    Case("transformer_lm/neox", lm(positions="rotary", rotary_fraction=0.67, block="parallel",
                                   tie_embeddings=False, head_bias=True), TOKENS, weights=True),
    Case("transformer_lm/phi", lm(positions="rotary", rotary_fraction=0.67, block="parallel",
                                  shared_norm=True, activation="gelu_tanh", tie_embeddings=False,
                                  head_bias=True, **DROPOUTS), TOKENS, weights=True, dropout=True),
    Case("transformer_lm/opt", lm(activation="relu", position_offset=2), TOKENS, weights=True),
    Case("transformer_lm/bloom", lm(positions="alibi", embedding_norm=True,
                                    activation="gelu_bloom"), TOKENS, weights=True),
    Case("transformer_lm/bert", lm(**BERT, head="masked_lm", head_bias=True, **DROPOUTS),
         given(tokens=ids(B, 13), mask=boolean(B, 1, 13, 13), token_types=ids(B, 13, below=2)),
         weights=True, dropout=True),
    Case("transformer_lm/bert-untied", lm(**BERT, head="masked_lm", head_bias=True,
                                          tie_embeddings=False), TOKENS, weights=True),
    Case("transformer_lm/bert-encoder", lm(**BERT, num_task_types=3, head="none", pooler=True),
         given(tokens=ids(B, 13), token_types=ids(B, 13, below=2), task_types=ids(B, 13, below=3)),
         weights=True),
    Case("transformer_lm/final-dropout", lm(causal=False, head="none", final_dropout=0.3), TOKENS,
         dropout=True),
    Case("transformer_lm/bert-pooled", pooling_lm(**BERT, head="none", pooler=True), TOKENS),
    Case("transformer_lm/siglip-pooled", pooling_lm(
        causal=False, head="none", pooler=True, pooled_token="last", pooler_tanh=False), TOKENS),
    Case("transformer_lm/albert", lm(**BERT, num_layers=6, layer_groups=2, layers_in_group=2,
                                     embedding_width=E, head="masked_lm"), TOKENS, weights=True),
    Case("transformer_lm/mpnet", lm(**BERT, positions="relative_buckets", num_position_buckets=6,
                                    max_bucket_distance=9, learned_rows=True, position_offset=2),
         TOKENS, weights=True),
    Case("transformer_lm/modernbert", lm(
        causal=False, positions="rotary", sliding_window=4, full_attention_layers=(1,),
        window_rotary_base=70.0, norm_bias=False, first_norm=False, embedding_norm=True,
        activation="geglu", head="masked_lm", head_activation="gelu", head_transform_bias=False),
        TOKENS, weights=True),
    Case("transformer_lm/deberta", lm(**BERT, positions="disentangled", distance_span=6,
                                      distance_limit=11, distance_norm=True,
                                      shared_distance_projections=True, distance_dropout=0.2),
         given(tokens=ids(B, 13), token_types=ids(B, 13, below=2)), weights=True, dropout=True),
    Case("transformer_lm/deberta-own", lm(**BERT, positions="disentangled", distance_span=5,
                                          learned_rows=True, position_to_content=False), TOKENS),
    Case("transformer_lm/tied-head-bias", lm(head_bias=True), TOKENS, weights=True),
    Case("transformer_lm/relative", lm(positions="relative", max_relative_position=3), TOKENS,
         weights=True),
    Case("transformer_lm/relative-buckets", lm(positions="relative_buckets", num_position_buckets=7,
                                               max_bucket_distance=9, attention_scale=1.0),
         TOKENS, weights=True),
    Case("transformer_lm/relative-buckets-by-layer", lm(
        positions="relative_buckets", shared_buckets=False, num_position_buckets=6,
        max_bucket_distance=5, causal=False), TOKENS, weights=True),
    Case("transformer_lm/positions", lm(),
         given(tokens=ids(B, T), positions=arange(B, T, start=6)), weights=True),
    Case("transformer_lm/none", lm(positions="none", activation="relu"), TOKENS, weights=True),
    *[
        Case(f"transformer_lm/far-{positions}", lm(positions=positions, context_length=LONG),
             FAR_TOKENS)
        for positions in ("learned", "sinusoidal", "rotary", "alibi", "relative")
    ],
    *[
        Case(f"transformer_classifier/{classified}", classifier(
            classified=classified, classifier_transform=classified == "first", **DROPOUTS),
            given(tokens=ids(B, 13), mask=padded(B, 13)), dropout=True)
        for classified in ("first", "last", "last_place", "mean", "mean_of_places", "tokens")
    ],
    Case("transformer_classifier/choose", classifier(labels=("choice",)),
         given(tokens=ids(B, 4, 13), token_types=ids(B, 4, 13, below=2)), method="choose"),
    Case("encoder_decoder/encoder", encdec("Encoder", 2), given(x=x(B, S, D),
         mask=boolean(B, 1, S, S)), weights=True),
    Case("encoder_decoder/decoder", encdec("Decoder", 2), DECODING, weights=True),
    Case("vision_transformer/vit", vision(num_labels=9, **DROPOUTS), given(images=IMAGES),
         weights=True, dropout=True),
    Case("vision_transformer/vit-pooled", vision(pools=True, image_pooler=True),
         given(images=IMAGES)),
    Case("vision_transformer/deit", vision(distillation_token=True, context_length=14),
         given(images=IMAGES), weights=True),
    Case("vision_transformer/deit-two-heads", vision(distillation_token=True, context_length=14,
         num_labels=9, distillation_head=True), given(images=IMAGES)),
    Case("vision_transformer/dinov2-gated", vision(layer_scale=0.3, activation="swiglu"),
         given(images=IMAGES)),
    Case("vision_transformer/dinov2", vision(mask_token=True, layer_scale=0.3), PARTLY_MASKED,
         weights=True),
    Case("vision_transformer/dinov2-classes", vision(
        layer_scale=0.3, pooling="first_and_mean", num_labels=9), given(images=IMAGES)),
    Case("vision_transformer/clip", vision(
        patch_bias=False, embedding_norm=True, final_norm=False, pooled_norm=True, num_labels=9,
        label_bias=False, activation="quick_gelu"), given(images=IMAGES)),
    Case("vision_transformer/classes-of-patches", vision(
        embedding_norm=True, final_norm=False, num_labels=9, classes_from="patches"),
        given(images=IMAGES)),
    Case("vision_transformer/siglip", vision(
        pools=True, class_token=False, context_length=12, pooling="attention"),
        given(images=IMAGES)),
    Case("encoder_decoder_classifier/bart", pair_classifier(classifier_transform=True, **BART),
         CLASSIFIED_PAIR),
    Case("encoder_decoder_classifier/tokens", pair_classifier(classified="tokens", **T5),
         CLASSIFIED_PAIR),
    Case("speech_classifier/whisper", hearing(**DROPOUTS), FRAMES, dropout=True),
    Case("speech_classifier/layer-sum", hearing(layer_sum=True, activation="relu"), FRAMES),
    Case("speech_transformer/whisper", speech(), SOUND),
    Case("speech_transformer/dropout", speech(**DROPOUTS), SOUND, dropout=True),
    Case("speech_transformer/untied", speech(tie_embeddings=False, activation="relu"), SOUND),
    Case("dual_encoder/clip", CLIP, TEXTS_AND_IMAGES),
    Case("dual_encoder/siglip", SIGLIP, TEXTS_AND_IMAGES),
    Case("dual_encoder/highest-token", dual_encoder(
        {}, {}, reads=True, text_vector="highest_token"), TOKENS),
    Case("vision_transformer/no-class-token", vision(
        class_token=False, context_length=12, patch_bias=False, embedding_norm=True),
        given(images=IMAGES), weights=True),
    Case("encoder_decoder/model", encdec("EncoderDecoder", embedding_scale=D**0.5, **DROPOUTS),
         BOTH, dropout=True),
    Case("encoder_decoder/model-masked", encdec("EncoderDecoder", block="pre_norm",
         activation="gelu", positions="learned", embedding_norm=True),
         lambda r: {**BOTH(r), "source_mask": boolean(B, 1, S, S)(r),
                    "target_mask": boolean(B, 1, T, T)(r), "memory_mask": boolean(B, 1, T, S)(r)}),
    Case("encoder_decoder/model-sandwich", encdec("EncoderDecoder", block="pre_norm",
         activation="silu", norm="rms_norm", norm_unit_offset=True, branch_output_norm=True,
         positions="learned", position_offset=2), BOTH),
    Case("encoder_decoder/model-t5", encdec("EncoderDecoder", **T5, **DROPOUTS, final_dropout=0.3),
         lambda r: {**BOTH(r), "source": ids(B, S)(r), "source_mask": boolean(B, 1, S, S)(r),
                    "memory_mask": boolean(B, 1, T, S)(r)}, dropout=True),
    Case("encoder_decoder/model-umt5", encdec("EncoderDecoder", **T5 | {
        "shared_buckets": False, "activation": "relu", "encoder_num_heads": 3,
        "encoder_d_ff": 29}), given(source=ids(B, S), target=ids(B, T))),
    Case("encoder_decoder/model-lora", encdec(
        "EncoderDecoder", lora_rank=3, lora_targets="q_proj,o_proj,up_proj"), BOTH),
    Case("encoder_decoder/model-bart", encdec("EncoderDecoder", **BART),
         given(source=ids(B, S), target=ids(B, T), source_positions=arange(B, S, start=2),
               target_positions=arange(1, T, start=1))),
    Case("encoder_decoder/model-body", encdec(
        "EncoderDecoder", head="none", head_bias=False, positions="sinusoidal",
        sinusoid_halves=True, sinusoid_exact=True), BOTH),
    Case("losses/cross-entropy", lambda s: s.losses.cross_entropy,
         given(logits=x(B, T, V), targets=ids(B, T))),
    Case("losses/cross-entropy-masked", lambda s: s.losses.cross_entropy,
         given(logits=x(B, T, V), targets=ids(B, T), mask=lambda r: r.random((B, T)) < 0.6)),
    Case("losses/each-token", lambda s: s.losses.token_losses,
         given(logits=x(B, T, V), targets=ids(B, T))),
]  # fmt: skip
