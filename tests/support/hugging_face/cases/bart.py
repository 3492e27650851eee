"""BART, mBART, Marian, Pegasus, M2M-100 and Blenderbot."""

from tests.support.hugging_face.case import Case

Text = tuple[float, float]
BART = {
    "d_model": 24,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 44,
    "decoder_ffn_dim": 36,
    "max_position_embeddings": 320,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "pad_token_id": 1,
}
OTHER = {
    **BART,
    "encoder_layers": 2,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 29,
    "decoder_ffn_dim": 29,
    "activation_function": "relu",
}


def _cases(dialect: str, kind: str, text: Text, other_text: Text, **more: bool) -> dict[str, Case]:
    """The cases that every one of the kin has.

    Args:
        dialect: the model type.
        kind: the class of the whole model.
        text: ``std`` and ``embeddings`` of the first case, see ``Case``.
        other_text: those of the second.
        more: of all cases.
    """
    is_scaled = dialect == "m2m_100"
    start = kind.removesuffix("ForConditionalGeneration").removesuffix("MTModel")
    scaled = {**OTHER, "scale_embedding": not is_scaled}
    silu = {**BART, "activation_function": "silu", "encoder_layers": 1}
    return {
        dialect: Case(dialect, kind, BART, pad_token=1, std=text[0], embeddings=text[1], **more),
        f"{dialect} scaled relu": Case(
            dialect, kind, scaled, pad_token=1, std=other_text[0], embeddings=other_text[1], **more
        ),
        f"{dialect} body silu": Case(dialect, f"{start}Model", silu, pad_token=1, **more),
    }


LARGE, SMALL, SMALLER = (0.2, 0.05), (0.1, 0.1), (0.05, 0.3)
CASES = {
    **_cases("bart", "BartForConditionalGeneration", LARGE, LARGE),
    **_cases("mbart", "MBartForConditionalGeneration", LARGE, LARGE),
    **_cases("marian", "MarianMTModel", SMALL, SMALL),
    **_cases("pegasus", "PegasusForConditionalGeneration", SMALL, SMALLER),
    **_cases("m2m_100", "M2M100ForConditionalGeneration", SMALL, SMALLER, counts_tokens=True),
    **_cases("blenderbot", "BlenderbotForConditionalGeneration", LARGE, LARGE),
}
