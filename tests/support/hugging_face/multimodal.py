"""Models that see, of which the language model is ported: small ones, like the other cases."""

from typing import Any

from tests.support.hugging_face.case import GROUPED, VOCAB, Case

VISION = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
# No text ends before its length.
NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SIGHT = ("model.vision_tower.*", "model.multi_modal_projector.*")


def _case(kind: str, vision: str, text: dict[str, Any], **more: Any) -> Case:
    settings = {
        "text_config": {**GROUPED, **NO_TOKENS, "vocab_size": VOCAB, **text},
        "vision_config": {**VISION, "model_type": vision},
        **more,
    }
    start = kind.removesuffix("ForConditionalGeneration")
    return Case(start.lower(), kind, settings, ignore=SIGHT)


GEMMA = ("Gemma3ForConditionalGeneration", "siglip_vision_model")
LLAVA = ("LlavaForConditionalGeneration", "clip_vision_model")
MISTRAL = ("Mistral3ForConditionalGeneration", "pixtral")
CASES = {
    "gemma3": _case(
        *GEMMA,
        {"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 19, "num_hidden_layers": 3},
        mm_tokens_per_image=4,
    ),
    "gemma3 untied bias": _case(
        *GEMMA,
        {"head_dim": 10, "attention_bias": True, "query_pre_attn_scalar": 7, "sliding_window": 5},
        mm_tokens_per_image=4,
        tie_word_embeddings=False,
    ),
    "llava": _case(*LLAVA, {"model_type": "llama"}),
    "llava qwen tied": _case(
        *LLAVA,
        {"model_type": "qwen2", "num_attention_heads": 6, "tie_word_embeddings": True},
    ),
    "mistral3": _case(*MISTRAL, {"head_dim": 8, "sliding_window": None}),
    "mistral3 window untied": _case(
        *MISTRAL,
        {"model_type": "mistral", "head_dim": 10, "sliding_window": 19},
        tie_word_embeddings=False,
    ),
}
