"""Whisper."""

from typing import Any

from tests.support.hugging_face.case import Case

WHISPER: dict[str, Any] = {
    "d_model": 24,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 44,
    "decoder_ffn_dim": 36,
    "num_mel_bins": 5,
    "max_source_positions": 310,
    "max_target_positions": 320,
    "decoder_start_token_id": 2,
    "pad_token_id": 1,
    "begin_suppress_tokens": None,
}
OTHER = {
    **WHISPER,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 29,
    "decoder_ffn_dim": 29,
    "num_mel_bins": 7,
    "max_source_positions": 83,
    "activation_function": "relu",
    "tie_word_embeddings": False,
}
KIND = "WhisperForConditionalGeneration"
LABELS = {name: n for n, name in enumerate(("yes", "no", "stop", "go", "up"))}
CLASSES: dict[str, Any] = {
    "id2label": {str(n): label for label, n in LABELS.items()},
    "label2id": LABELS,
    "use_weighted_layer_sum": True,
    "classifier_proj_size": 9,
}
# Of the decoder and its tokens, which the class has not.
NO_DECODER = frozenset(
    {
        "decoder_layers", "decoder_attention_heads", "decoder_ffn_dim", "max_target_positions",
        "vocab_size", "tie_word_embeddings", "bos_token_id", "eos_token_id",
        "begin_suppress_tokens",
    }
)  # fmt: skip


def _classifier(settings: dict[str, Any]) -> Case:
    kind = "WhisperForAudioClassification"
    return Case("whisper", kind, settings, without_effect=NO_DECODER)


CASES = {
    "whisper": Case("whisper", KIND, WHISPER, pad_token=1, std=0.2, embeddings=0.05),
    "whisper untied relu": Case("whisper", KIND, OTHER, pad_token=1, std=0.2, embeddings=0.3),
    "whisper body silu": Case(
        "whisper", "WhisperModel", {**WHISPER, "activation_function": "silu"}, pad_token=1
    ),
    "whisper classes of all layers": _classifier({**WHISPER, **CLASSES}),
    "whisper classes relu": _classifier({**OTHER, "classifier_proj_size": 41}),
}
