"""Generates tokens with a draft: a small model proposes, the large one reads all proposals at once.

A round begins with the draft, which makes K tokens one by one. The model then reads the last token
and these K in one pass, and keeps the first n on which it agrees, and one more of its own: n + 1
tokens for one pass of the large model. What is written does not depend on the draft: greedily it is
the text that the model writes alone, and sampled tokens have the model's own probabilities
(Leviathan et al., "Fast inference from transformers via speculative decoding", arXiv 2211.17192,
section 2.3). The window of a row is that of ``generation``.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Int

from jaxformer.checks import check_is_integer
from jaxformer.decoding import choose_cache_dtype, read_request
from jaxformer.execution import lengths
from jaxformer.execution.drafted_window import DraftedWindow, lengthen_drafted
from jaxformer.execution.token_window import Window
from jaxformer.few_row_layers import FewRowKernels, few_row_kernels_of
from jaxformer.speculative_rounds import round_programs
from jaxformer.split_once import split_once
from jaxformer.transformer_lm import TransformerLM


def generate_with_draft(
    model: TransformerLM,
    draft: TransformerLM,
    prompt_BT: Int[np.ndarray, "B T"],
    num_tokens: int,
    **settings: Any,
) -> Int[np.ndarray, "B n"]:
    """Returns the next tokens of every row, int32 (B, n): all that ``stream_with_draft`` yields."""
    chunks = stream_with_draft(
        model, draft, prompt_BT, num_tokens, **{"chunk": max(num_tokens, 1), **settings}
    )
    return np.concatenate((np.zeros((len(prompt_BT), 0), np.int32), *chunks), axis=1)


def stream_with_draft(
    model: TransformerLM,
    draft: TransformerLM,
    prompt_BT: Int[np.ndarray, "B T"],
    num_tokens: int,
    *,
    draft_tokens: int = 4,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    key: Array | None = None,
    stop_tokens: Sequence[int] = (),
    cache_dtype: str | None = None,
    mask: Bool[np.ndarray, "B T"] | None = None,
    chunk: int = 16,
) -> Iterator[Int[np.ndarray, "B n"]]:
    """Yields the next ``num_tokens`` tokens of every row as they are made, int32 (B, n).

    Greedily they are those of ``generation.stream``, but where two logits lie within rounding of
    each other: a pass over several tokens adds in another order than one over a token. Sampled ones
    have the same probabilities, and are others than there for the same key. All rows of a batch
    take as many tokens in a round as the one that takes fewest.

    Args:
        model: causal.
        draft: causal, with the same vocabulary, and at least the model's ``context_length``.
        prompt_BT: ids in [0, V).
        num_tokens: how many to make, in tokens.
        draft_tokens: K, how many the draft proposes in a round.
        temperature: see ``filter_logits``; of both models, as are the next two.
        top_k: see ``filter_logits``.
        top_p: see ``filter_logits``.
        greedy: take the most probable token, the lowest id on a tie, instead of sampling.
        key: what is drawn from.
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
    if not greedy and key is None:
        raise ValueError("sampling needs a key: pass key=jax.random.key(seed), or greedy=True")
    (definition, parameters), (draft_definition, draft_parameters) = (
        split_once(model),
        split_once(draft),
    )
    dtypes = tuple(
        choose_cache_dtype(cache_dtype, p["token_embedding.embedding"].dtype)
        for p in (parameters, draft_parameters)
    )
    settings = None if greedy else (temperature, top_k, top_p)
    drawing: dict[str, Any] = {
        "key": None if greedy else key,
        "stop_tokens": np.array(stop_tokens, np.int32),
    }
    read, write = round_programs(definition, draft_definition, settings, dtypes, draft_tokens)
    prefill = functools.partial(read, parameters, draft_parameters, **drawing)

    @functools.cache  # made with the second token: the first need not wait for it
    def copied_kernels() -> tuple[FewRowKernels, FewRowKernels]:
        checked = len(rows) * (draft_tokens + 1)
        return (
            few_row_kernels_of(definition, parameters, checked, num_tokens),
            few_row_kernels_of(draft_definition, draft_parameters, len(rows), num_tokens),
        )

    def extend(*text: Any) -> DraftedWindow:
        return write(parameters, draft_parameters, copied_kernels(), *text, **drawing)

    shortest = lengths.shortest_cache(model.config, len(rows), dtypes[0])
    context = model.config.context_length
    return _stream(prefill, extend, rows, num_tokens, context, shortest, chunk, draft_tokens)


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
    sizes = [m.token_embedding.embedding[...].shape[0] for m in (draft, model)]
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


def _stream(
    prefill: Callable[..., DraftedWindow],
    extend: Callable[..., DraftedWindow],
    rows: list[np.ndarray],
    num_tokens: int,
    context_length: int,
    shortest_cache: int,
    chunk: int,
    draft_tokens: int,
) -> Iterator[np.ndarray]:
    made = 0
    ended_B = np.zeros(len(rows), bool)
    # A round reads up to so many slots past the last token that it keeps.
    longest = context_length + draft_tokens
    while made < num_tokens and not ended_B.all():
        rows = [r if len(r) <= context_length else r[-max(context_length // 2, 1) :] for r in rows]
        length = max(len(row) for row in rows)
        end = min(length + num_tokens - made, context_length + 1)
        slots = lengths.round_up(length + 1 + draft_tokens, shortest_cache, longest)
        window = Window.pack(rows, ended_B, slots)
        padding = np.array(window.padding_B)
        slots_read = lengths.round_up(length, lengths.SHORTEST_PREFILL, context_length)
        text = prefill(window, np.int32(made), slots_read=slots_read)
        while True:
            # Copies: on a CPU a mere view would keep the text from being donated.
            tokens, ended_B = np.array(text.window.tokens_BS), np.array(text.window.ended_B)
            before, length = length, int(text.window.length)
            if length > before:
                yield tokens[:, before:length]
            made += length - before
            if length == end or ended_B.all():
                break
            if length + draft_tokens > text.window.slots:
                slots = lengths.round_up(length + draft_tokens, shortest_cache, longest)
                text = lengthen_drafted(text, slots=slots)
            most = end - length
            text = extend(text, np.int32(made), np.int32(min(chunk, most)), np.int32(most))
        rows = [row[start:length] for row, start in zip(tokens, padding, strict=True)]
