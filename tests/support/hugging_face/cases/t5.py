"""T5, mT5 and umT5."""

from tests.support.hugging_face.case import Case

T5 = {
    "d_model": 24,
    "num_heads": 4,
    "d_kv": 10,
    "d_ff": 44,
    "num_layers": 3,
    # Not more than the others: transformers 5 makes no cache for those.
    "num_decoder_layers": 2,
    "decoder_start_token_id": 0,
    "pad_token_id": None,
}
# As T5 1.1: gated, and its logits are not scaled.
LATER = {
    **T5,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "num_decoder_layers": None,
    "relative_attention_num_buckets": 17,
    "relative_attention_max_distance": 61,
    "layer_norm_epsilon": 1e-3,
}
SILU = {**T5, "num_heads": 3, "d_kv": 7, "feed_forward_proj": "gated-silu"}
ENCODER = {k: v for k, v in T5.items() if "decoder" not in k}
NOTES = (
    "umT5's head, where it is not tied, is scaled by transformers 5 and not by 4: a setting says"
)

CASES = {
    "t5": Case("t5", "T5ForConditionalGeneration", T5, std=0.3),
    "t5 gated unscaled": Case("t5", "T5ForConditionalGeneration", LATER, std=0.3),
    "t5 body silu": Case("t5", "T5Model", SILU),
    "t5 encoder": Case("t5", "T5EncoderModel", ENCODER),
    "mt5": Case(
        "mt5", "MT5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}, std=0.3
    ),
    "mt5 relu buckets": Case(
        "mt5",
        "MT5ForConditionalGeneration",
        {**LATER, "feed_forward_proj": "relu", "num_decoder_layers": 1},
    ),
    "umt5": Case(
        "umt5", "UMT5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}, std=0.3
    ),
    "umt5 relu buckets": Case(
        "umt5",
        "UMT5ForConditionalGeneration",
        {
            **LATER,
            "tie_word_embeddings": True,
            "feed_forward_proj": "gelu",
            "num_decoder_layers": 1,
        },
        std=0.3,
        notes=NOTES,
    ),
    "umt5 body silu": Case("umt5", "UMT5Model", SILU),
    # Its class leaves the setting as it was, and reads none of it.
    "umt5 encoder gated": Case(
        "umt5",
        "UMT5EncoderModel",
        {**ENCODER, "feed_forward_proj": "gated-gelu"},
        without_effect=frozenset({"is_encoder_decoder"}),
    ),
}
