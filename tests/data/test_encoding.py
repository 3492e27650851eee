"""A long text is encoded in pieces, and its ids are those of one call."""

import numpy as np
import pytest

from jaxformer.data import tokenizers as module
from jaxformer.data.encoding import Piece, cut_text, encode_piece, find_cut
from jaxformer.data.tokenizers import HuggingFaceTokenizer
from tests.support.tiers import full_after
from tests.support.tokens import corpus, tokenizer

KINDS = ["gpt2", "llama", "unigram", "bert"]
ODD = "naïve 中文字符 🙂🙂 e\u0301 \n\n\t  tabs\r\n   and   spaces    of lengths... #!?-- x" * 40


def text(length=20_000):
    return corpus()[:length] + ODD + corpus()[length : length + 5000]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", full_after(1, [700, 5003]))
def test_pieces_give_the_ids_of_one_call(kind, length):
    whole = tokenizer(kind).encode(text(), add_special_tokens=False).ids
    pieces = list(cut_text(text(), length))
    assert "".join(piece.text for piece in pieces) == text()
    assert len(pieces) > len(text()) / (2 * length)
    found = np.concatenate([encode_piece(tokenizer(kind), piece) for piece in pieces])
    assert found.tolist() == whole


@pytest.mark.parametrize("kind", KINDS)
def test_cuts_inside_of_words_too(kind):
    """Every token belongs to the piece in which it begins."""
    part = text()[19_000:22_000]
    whole = tokenizer(kind).encode(part, add_special_tokens=False).ids
    found = []
    for begin in range(0, len(part), 371):
        end = begin + 371
        piece = Piece(part[begin:end], part[max(0, begin - 256) : begin], part[end : end + 256])
        found += encode_piece(tokenizer(kind), piece).tolist()
    assert found == whole


def test_a_cut_is_at_the_end_of_a_word_where_there_is_one_near():
    assert find_cut("one two three", 0, 9) == 7
    assert find_cut("one two", 0, 7) == 7
    assert find_cut("a" * 9000, 0, 8000) == 8000


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_what_stands_around_every_text_stands_there_once(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 1000)
    tokenizer(kind).save(str(tmp_path / "tokenizer.json"))
    made = HuggingFaceTokenizer(tmp_path / "tokenizer.json")
    assert made.encode(text()).tolist() == tokenizer(kind).encode(text()).ids
    inside = made.encode(text(), around_every_text=False)
    assert inside.tolist() == tokenizer(kind).encode(text(), add_special_tokens=False).ids
