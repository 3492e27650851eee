"""Texts of any length to ids, piece by piece, with the ids of the whole text.

The package ``tokenizers`` takes a hundred times a text's size in memory while it encodes it, so a
long text is cut. A piece is encoded with the text around it, and keeps the tokens that begin in it.
What a tokenizer makes of a place depends on the text near it alone, so the ids are those that one
call would give.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

PIECE_CHARACTERS = 1 << 17
# What surrounds a piece. Tokens have a few characters; a run of spaces can be one token or two.
CONTEXT_CHARACTERS = 256
# How far a cut is moved back to a good place.
MOST_MOVED = 4096


class Piece(NamedTuple):
    """A part of a text, and what stands before and after it."""

    text: str
    before: str = ""
    after: str = ""


def cut_text(text: str, length: int = PIECE_CHARACTERS) -> Iterator[Piece]:
    """Yields the pieces of a text, each of about ``length`` characters."""
    begin = 0
    while begin < len(text) or begin == 0:
        end = find_cut(text, begin, begin + length)
        yield Piece(
            text[begin:end],
            text[max(0, begin - CONTEXT_CHARACTERS) : begin],
            text[end : end + CONTEXT_CHARACTERS],
        )
        begin = end
        if begin >= len(text):
            return


def find_cut(text: str, begin: int, end: int) -> int:
    """Returns where a piece that begins at ``begin`` should end: at ``end`` or a little before.

    The end of a word is best, as all common tokenizers cut there.
    """
    if end >= len(text):
        return len(text)
    for place in range(end, max(begin, end - MOST_MOVED), -1):
        if text[place].isspace() and text[place - 1].isalnum():
            return place
    return end


def encode_piece(tokenizer: Any, piece: Piece) -> np.ndarray:
    """Returns the ids of the tokens that begin in a piece, int32 (T,).

    Args:
        tokenizer: of the package ``tokenizers``.
        piece: the text.
    """
    before, after = piece.before, piece.after
    head = _encode(tokenizer, before) if before else []
    opening = piece.text[:CONTEXT_CHARACTERS]
    closing = (before + piece.text)[-CONTEXT_CHARACTERS:]
    if (not before or _is_boundary(tokenizer, before, opening)) and (
        not after or _is_boundary(tokenizer, closing, after)
    ):
        ids = _encode(tokenizer, before + piece.text)
        if ids[: len(head)] == head:
            return np.array(ids[len(head) :], np.int32)
    return _encode_by_offsets(tokenizer, piece)


def _encode(tokenizer: Any, text: str) -> list[int]:
    # Without offsets, which take a third of the time.
    encoded = tokenizer.encode_batch_fast([text], add_special_tokens=False)
    ids: list[int] = encoded[0].ids
    return ids


def _is_boundary(tokenizer: Any, left: str, right: str) -> bool:
    """Whether no token spans two texts that follow each other."""
    alone = _encode(tokenizer, left)
    return _encode(tokenizer, left + right)[: len(alone)] == alone


def _encode_by_offsets(tokenizer: Any, piece: Piece) -> np.ndarray:
    text = piece.before + piece.text + piece.after
    encoded = tokenizer.encode(text, add_special_tokens=False)
    begins = np.array([begin for begin, _ in encoded.offsets], np.int64)
    first = len(piece.before)
    is_inside = (begins >= first) & (begins < first + len(piece.text))
    if not first:
        # A token without characters, such as a space that is put before a text.
        is_inside |= begins < len(piece.text)
    return np.array(encoded.ids, np.int32)[is_inside]
