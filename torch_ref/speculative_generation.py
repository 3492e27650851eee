"""Generates tokens with a draft: a small model proposes, the large one reads all proposals at once.

A round begins with the draft, which makes K tokens one by one. The model then reads the last token
and these K in one pass, and keeps the first n on which it agrees, and one more of its own: n + 1
tokens for one pass of the large model. What is written does not depend on the draft: greedily it is
the text that the model writes alone, and sampled tokens have the model's own probabilities
(Leviathan et al., "Fast inference from transformers via speculative decoding", arXiv 2211.17192,
section 2.3). The window of a row is that of ``generation``.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from torch_ref.attention import LayerCache
from torch_ref.checks import check_is_integer
from torch_ref.decoding import SamplingSettings, choose_tokens, evaluating, make_cache, read_request
from torch_ref.logits import filter_logits
from torch_ref.speculative_rounds import accept_proposals
from torch_ref.transformer_lm import TransformerLM


def generate_with_draft(
    model: TransformerLM,
    draft: TransformerLM,
    prompt_BT: torch.Tensor,
    num_tokens: int,
    **settings: Any,
) -> torch.Tensor:
    """Returns the next tokens of every row, int64 (B, n): all that ``stream_with_draft`` yields."""
    chunks = stream_with_draft(
        model, draft, prompt_BT, num_tokens, **{"chunk": max(num_tokens, 1), **settings}
    )
    device = model.token_embedding.weight.device
    empty = torch.zeros((len(prompt_BT), 0), dtype=torch.long, device=device)
    return torch.cat((empty, *chunks), dim=1)


def stream_with_draft(
    model: TransformerLM,
    draft: TransformerLM,
    prompt_BT: torch.Tensor,
    num_tokens: int,
    *,
    draft_tokens: int = 4,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    generator: torch.Generator | None = None,
    stop_tokens: Sequence[int] = (),
    cache_dtype: torch.dtype | None = None,
    mask: torch.Tensor | None = None,
    chunk: int = 16,
) -> Iterator[torch.Tensor]:
    """Yields the next ``num_tokens`` tokens of every row as they are made, int64 (B, n).

    Greedily they are those of ``generation.stream``, but where two logits lie within rounding of
    each other: a pass over several tokens adds in another order than one over a token. Sampled ones
    have the same probabilities. All rows of a batch take as many tokens in a round as the one that
    takes fewest.

    Args:
        model: causal.
        draft: causal, with the same vocabulary, and at least the model's ``context_length``.
        prompt_BT: ids (B, T) in [0, V).
        num_tokens: how many to make, in tokens.
        draft_tokens: K, how many the draft proposes in a round.
        temperature: see ``filter_logits``; of both models, as are the next two.
        top_k: see ``filter_logits``.
        top_p: see ``filter_logits``.
        greedy: take the most probable token, the lowest id on a tie, instead of sampling.
        generator: what is drawn from; default torch's global one.
        stop_tokens: see ``generation.stream``.
        cache_dtype: of the keys and values of both caches, default the weights'.
        mask: see ``generation.stream``.
        chunk: how many tokens to make before they are yielded; a round may make K more.

    Raises:
        ValueError: see ``generation.stream``; or the draft does not fit the model, or
            ``draft_tokens`` is below 1. Raised by this call, not by the first ``next``.
    """
    rows = read_request(
        model, prompt_BT, num_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        stop_tokens=stop_tokens, mask=mask, chunk=chunk,
    )  # fmt: skip
    check_draft(model, draft, draft_tokens)
    # One pass takes no more tokens than the context has.
    draft_tokens = min(draft_tokens, max(model.config.context_length - 1, 1))
    settings = None if greedy else (temperature, top_k, top_p)
    stop = torch.tensor(stop_tokens, dtype=torch.long, device=model.token_embedding.weight.device)
    writer = _Writer(model, draft, draft_tokens, settings, generator, stop, cache_dtype)
    return _stream(writer, rows, num_tokens, chunk)


def check_draft(model: TransformerLM, draft: TransformerLM, draft_tokens: int) -> None:
    """Checks that a draft can write for a model.

    Raises:
        ValueError: it cannot; the message says why.
    """
    check_is_integer("draft_tokens", draft_tokens)
    if draft_tokens < 1:
        raise ValueError(f"draft_tokens must be at least 1: got {draft_tokens}")
    if not draft.config.causal or draft.config.head.head == "none":
        raise ValueError("only a causal model with a head can be a draft")
    sizes = [m.token_embedding.num_embeddings for m in (draft, model)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"a draft must have the model's vocabulary: got {sizes[0]} and {sizes[1]} tokens"
        )
    contexts = draft.config.context_length, model.config.context_length
    if contexts[0] < contexts[1]:
        raise ValueError(
            "a draft must have at least the model's context_length: "
            f"got {contexts[0]} and {contexts[1]}"
        )


class _Writer:
    """Two models around one window, and how tokens are chosen."""

    def __init__(
        self,
        model: TransformerLM,
        draft: TransformerLM,
        draft_tokens: int,
        settings: SamplingSettings | None,
        generator: torch.Generator | None,
        stop_tokens: torch.Tensor,
        cache_dtype: torch.dtype | None,
    ):
        self.models = {"model": model, "draft": draft}
        self.draft_tokens, self.settings, self.generator = draft_tokens, settings, generator
        self.stop_tokens, self.cache_dtype = stop_tokens, cache_dtype
        self.context_length = model.config.context_length

    def begin(self, rows: list[torch.Tensor], ended_B: torch.Tensor) -> None:
        """Packs a window around the rows; nothing of it is read yet."""
        device = self.stop_tokens.device
        self.tokens_BT = pad_sequence(rows, batch_first=True, padding_side="left").to(device)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        self.padding_B, self.ended_B = self.tokens_BT.shape[1] - lengths, ended_B
        slots = self.context_length + self.draft_tokens
        self.caches: dict[str, list[LayerCache]] = {}
        for name, model in self.models.items():
            dtype = self.cache_dtype or model.token_embedding.weight.dtype
            self.caches[name] = make_cache(model.config, len(rows), slots, dtype, device)

    def read(self, name: str, tokens_BT: torch.Tensor, start: int) -> torch.Tensor:
        """Returns a model's logits (B, T, V) after each of the tokens that stand from a slot on."""
        cache, model = self.caches[name], self.models[name]
        slots_S = torch.arange(cache[0].k_BSKH.shape[1], device=tokens_BT.device)
        positions_BS = slots_S[None, :] - self.padding_B[:, None]
        # Only tokens that nobody asked for stand past the context.
        positions_BS = positions_BS.clamp(0, model.config.context_length - 1)
        is_token_BS = slots_S[None, :] >= self.padding_B[:, None]
        for layer in cache:
            layer.length = start
        hidden = model.hidden(
            tokens_BT[:, start:],
            is_token_BS[:, None, None, :],
            positions=positions_BS[:, start : tokens_BT.shape[1]],
            cache=cache,
        )
        assert not isinstance(hidden, tuple)
        return model.logits(hidden)

    def choose(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Returns the token of each row that follows."""
        return choose_tokens(logits_BV, self.settings, self.generator)

    def probabilities(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Returns what a token is drawn with."""
        assert self.settings is not None
        temperature, top_k, top_p = self.settings
        kept = filter_logits(logits_BV, temperature=temperature, top_k=top_k, top_p=top_p)
        return kept.softmax(dim=-1)

    def append(self, token_B: torch.Tensor) -> None:
        """Writes one more token into every row; a row that has ended repeats its last."""
        token_B = torch.where(self.ended_B, self.tokens_BT[:, -1], token_B)
        self.tokens_BT = torch.cat((self.tokens_BT, token_B[:, None]), dim=1)
        self.ended_B = self.ended_B | torch.isin(token_B, self.stop_tokens)

    def make_round(self, most: int) -> None:
        """Adds from 1 to K + 1 tokens, but not more than ``most``."""
        length, q = self.tokens_BT.shape[1], []
        tokens_BT = self.tokens_BT
        for i in range(self.draft_tokens):
            # Of a round whose proposals were all accepted the draft has not read the last.
            logits_BV = self.read("draft", tokens_BT, length + i - (1 if i else 2))[:, -1]
            q.append(logits_BV if self.settings is None else self.probabilities(logits_BV))
            tokens_BT = torch.cat((tokens_BT, self.choose(logits_BV)[:, None]), dim=1)
        logits_BLV = self.read("model", tokens_BT, length - 1)
        tokens_BK = tokens_BT[:, length:]
        if self.settings is None:
            tokens_BL = logits_BLV.argmax(dim=-1)
            last = int(self._agreed(tokens_BL[:, :-1] == tokens_BK).min())
        else:
            p_BLV = self.probabilities(logits_BLV)
            accept_BK, rest_BLV = accept_proposals(p_BLV, torch.stack(q, dim=1), tokens_BK)
            drawn_BK = torch.empty_like(accept_BK).uniform_(generator=self.generator)
            agreed_B = self._agreed(drawn_BK < accept_BK)
            last = int(agreed_B.min())
            drawn_B = torch.multinomial(rest_BLV[:, last], 1, generator=self.generator)[:, 0]
            tokens_BL = torch.nn.functional.pad(tokens_BK, (0, 1))
            # A row that accepts more has its proposal there.
            tokens_BL[:, last] = torch.where(agreed_B > last, tokens_BL[:, last], drawn_B)
        for i in range(min(last + 1, most)):
            self.append(tokens_BL[:, i])
            if self.ended_B.all():
                break

    def _agreed(self, accepted_BK: torch.Tensor) -> torch.Tensor:
        """Returns how many proposals of each row are accepted before the first that is not."""
        return (accepted_BK | self.ended_B[:, None]).long().cumprod(dim=1).sum(dim=1)


def _stream(
    writer: _Writer, rows: list[torch.Tensor], num_tokens: int, chunk: int
) -> Iterator[torch.Tensor]:
    context_length = writer.context_length
    made = 0
    ended_B = torch.zeros(len(rows), dtype=torch.bool, device=writer.stop_tokens.device)
    while made < num_tokens and not ended_B.all():
        rows = [r if len(r) <= context_length else r[-max(context_length // 2, 1) :] for r in rows]
        writer.begin(rows, ended_B)
        length = writer.tokens_BT.shape[1]
        end = min(length + num_tokens - made, context_length + 1)
        while length < end and not writer.ended_B.all():
            goal = min(length + (chunk if made else 1), end)
            model, draft = writer.models.values()
            with torch.no_grad(), evaluating(model), evaluating(draft):
                if not writer.caches["model"][0].length:
                    writer.read("draft", writer.tokens_BT, 0)
                    logits = writer.read("model", writer.tokens_BT, 0)[:, -1]
                    writer.append(writer.choose(logits))
                while writer.tokens_BT.shape[1] < goal and not writer.ended_B.all():
                    writer.make_round(end - writer.tokens_BT.shape[1])
            yield writer.tokens_BT[:, length:]
            made += writer.tokens_BT.shape[1] - length
            length = writer.tokens_BT.shape[1]
        ended_B = writer.ended_B
        rows = [
            row[start:]
            for row, start in zip(writer.tokens_BT, writer.padding_B.tolist(), strict=True)
        ]
