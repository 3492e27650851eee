"""Decoders of encoder-decoders alone, whose files hold an attention that nothing uses."""

from typing import Any

from tests.support.hugging_face.case import Case
from tests.support.hugging_face.cases.bart import BART, LARGE, OTHER, SMALL, Text
from tests.support.hugging_face.cases.whisper import OTHER as OTHER_WHISPER
from tests.support.hugging_face.cases.whisper import WHISPER

UNUSED = ("*.encoder_attn*",)


def _cases(
    dialect: str,
    start: str,
    text: Text,
    tied: dict[str, Any] = BART,
    other: dict[str, Any] = OTHER,
) -> dict[str, Case]:
    """Two cases of a type: one as most are, and one that is not tied."""
    kind = f"{start}ForCausalLM"
    untied: dict[str, Any] = {**other, "scale_embedding": True, "tie_word_embeddings": False}
    common: dict[str, Any] = {
        "pad_token": 1, "std": text[0], "embeddings": text[1], "ignore": UNUSED,
        "notes": f"`{kind}` without the attention to a source, which it does not use: `--ignore`",
    }  # fmt: skip
    return {
        f"{dialect} decoder": Case(dialect, kind, tied, **common),
        f"{dialect} decoder scaled untied": Case(dialect, kind, untied, **common),
    }


CASES = {
    **_cases("bart", "Bart", LARGE),
    **_cases("mbart", "MBart", LARGE),
    **_cases("marian", "Marian", SMALL),
    **_cases("pegasus", "Pegasus", SMALL),
    **_cases("blenderbot", "Blenderbot", LARGE),
    **_cases("whisper", "Whisper", (0.2, 0.2), WHISPER, OTHER_WHISPER),
}
