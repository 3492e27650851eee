"""Generates tokens from a causal model, one by one, with a key/value cache.

The window is what the model sees of a row: its newest tokens. As soon as it would hold more than
``context_length`` tokens it is cut to the newest ``context_length // 2`` (at least one), and grows
from there; a longer prompt is cut in the same way. With a cache the new window is read once and
then extended token by token, without one it is read anew for every token: the results are equal.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from torch_ref.attention import LayerCache
from torch_ref.decoding import (
    choose_cache_dtype,
    choose_tokens,
    evaluating,
    make_cache,
    read_request,
)
from torch_ref.transformer_lm import TransformerLM


def generate(
    model: TransformerLM,
    prompt_BT: torch.Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    generator: torch.Generator | None = None,
    stop_tokens: Sequence[int] = (),
    use_cache: bool = True,
    cache_dtype: torch.dtype | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the next tokens of every row, int64 (B, n): all that ``stream`` yields.

    They are fewer only where every row has made a stop token. Arguments and errors as there.
    """
    chunks = stream(
        model,
        prompt_BT,
        num_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        greedy=greedy,
        generator=generator,
        stop_tokens=stop_tokens,
        use_cache=use_cache,
        cache_dtype=cache_dtype,
        mask=mask,
        chunk=max(num_tokens, 1),
    )
    empty = torch.zeros((len(prompt_BT), 0), dtype=torch.long, device=_device(model))
    return torch.cat((empty, *chunks), dim=1)


def stream(
    model: TransformerLM,
    prompt_BT: torch.Tensor,
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    generator: torch.Generator | None = None,
    stop_tokens: Sequence[int] = (),
    use_cache: bool = True,
    cache_dtype: torch.dtype | None = None,
    mask: torch.Tensor | None = None,
    chunk: int = 16,
) -> Iterator[torch.Tensor]:
    """Yields the next ``num_tokens`` tokens of every row as they are made, int64 (B, n <= chunk).

    The first token comes by itself, as soon as the prompt is read. The window of each row follows
    the rule of this module, so a row of a batch continues as in a batch of one. The model
    computes in evaluation mode, without gradients, and is in the mode it was in whenever the caller
    has the word.

    Args:
        model: causal.
        prompt_BT: ids (B, T) in [0, V).
        num_tokens: how many to make, in tokens.
        temperature: see ``filter_logits``.
        top_k: see ``filter_logits``.
        top_p: see ``filter_logits``.
        greedy: take the most probable token, the lowest id on a tie, instead of sampling.
        generator: what sampling draws from, once a token, on the model's device; default torch's
            global one.
        stop_tokens: a row ends with the first of these ids that it makes, which it repeats as long
            as other rows have not ended; when all rows have ended, nothing more is made.
        use_cache: False reads the whole window for every token: slower, the same result.
        cache_dtype: of the keys and values in the cache, default the weights'. ``torch.bfloat16``
            halves what is stored and read for a model in float32, at its rounding: the text can
            then be another.
        mask: boolean (B, T), True where the prompt holds a token, False on the padding to its
            left; positions count from a row's first token. Default: no padding.
        chunk: the most tokens to yield at once; it does not change them.

    Raises:
        ValueError: the model is not causal or has no head; the prompt or one of its rows is empty,
            or has an id outside [0, V); so has ``stop_tokens``; the mask is not left padding; or a
            setting is out of its range. Raised by this call, not by the first ``next``.
    """
    (text,) = stream_samples(
        model,
        prompt_BT,
        num_tokens,
        [generator],
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        greedy=greedy,
        stop_tokens=stop_tokens,
        use_cache=use_cache,
        cache_dtype=cache_dtype,
        mask=mask,
        chunk=chunk,
    )
    return text


def stream_samples(
    model: TransformerLM,
    prompt_BT: torch.Tensor,
    num_tokens: int,
    generators: Sequence[torch.Generator | None],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    stop_tokens: Sequence[int] = (),
    use_cache: bool = True,
    cache_dtype: torch.dtype | None = None,
    mask: torch.Tensor | None = None,
    chunk: int = 16,
) -> list[Iterator[torch.Tensor]]:
    """Returns a text for each generator, as ``stream`` yields it; the prompt is read once for all.

    What is kept of it is its cache. A text after the first begins with a pass over the prompt's
    last token, and is the one that ``stream`` yields, but where two choices lie within rounding.

    Args:
        model: causal.
        prompt_BT: ids (B, T) in [0, V).
        num_tokens: how many to make of each text, in tokens.
        generators: one a text.
        temperature: this and all others as in ``stream``.
        top_k: see ``stream``.
        top_p: see ``stream``.
        greedy: see ``stream``.
        stop_tokens: see ``stream``.
        use_cache: see ``stream``.
        cache_dtype: see ``stream``.
        mask: see ``stream``.
        chunk: see ``stream``.

    Raises:
        ValueError: see ``stream``.
    """
    rows = read_request(
        model, prompt_BT, num_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
        stop_tokens=stop_tokens, mask=mask, chunk=chunk,
    )  # fmt: skip
    settings = None if greedy else (temperature, top_k, top_p)
    cache_dtype = choose_cache_dtype(cache_dtype, model.token_embedding.weight.dtype)
    stop = torch.tensor(stop_tokens, dtype=torch.long, device=_device(model))
    prompt = _Prompt(is_kept=use_cache and len(generators) > 1)
    return [
        _stream(
            model,
            rows,
            num_tokens,
            functools.partial(choose_tokens, settings=settings, generator=generator),
            stop,
            cache_dtype if use_cache else None,
            chunk,
            prompt,
        )
        for generator in generators
    ]


@dataclasses.dataclass
class _Prompt:
    """What several texts share.

    Attributes:
        is_kept: whether there are several.
        cache: of the prompt; None before it was read.
    """

    is_kept: bool
    cache: list[LayerCache] | None = None


def _copy(cache: list[LayerCache], length: int) -> list[LayerCache]:
    """Returns a copy of a cache of which so many slots count as written."""
    return [LayerCache(c.k_BSKH.clone(), c.v_BSKH.clone(), length) for c in cache]


def _stream(
    model: TransformerLM,
    rows: list[torch.Tensor],
    num_tokens: int,
    choose: Callable[[torch.Tensor], torch.Tensor],
    stop_tokens: torch.Tensor,
    cache_dtype: torch.dtype | None,
    chunk: int,
    prompt: _Prompt,
) -> Iterator[torch.Tensor]:
    context_length = model.config.context_length
    made = 0
    ended_B = torch.zeros(len(rows), dtype=torch.bool, device=_device(model))
    while made < num_tokens and not ended_B.all():
        # A row is cut only when it is full itself. The others keep their windows, and all are
        # packed anew, so that the longest never stands behind padding.
        rows = [r if len(r) <= context_length else r[-max(context_length // 2, 1) :] for r in rows]
        tokens_BT = pad_sequence(rows, batch_first=True, padding_side="left").to(_device(model))
        length = tokens_BT.shape[1]
        padding_B = length - torch.tensor([len(row) for row in rows], device=tokens_BT.device)
        end = min(length + num_tokens - made, context_length + 1)
        cache = None
        if cache_dtype is not None:
            cache = make_cache(model.config, len(rows), end - 1, cache_dtype, tokens_BT.device)
            if made == 0 and prompt.cache is not None:
                cache = _copy(prompt.cache, length - 1)
        while length < end and not ended_B.all():
            count = min(chunk, end - length) if made else 1
            with torch.no_grad(), evaluating(model):
                for _ in range(count):
                    logits_BV = _next_logits(model, tokens_BT, padding_B, cache)
                    if prompt.is_kept and prompt.cache is None and cache is not None:
                        prompt.cache = _copy(cache, length)
                    token_B = choose(logits_BV)
                    token_B = torch.where(ended_B, tokens_BT[:, -1], token_B)
                    tokens_BT = torch.cat((tokens_BT, token_B[:, None]), dim=1)
                    ended_B |= torch.isin(token_B, stop_tokens)
                    if ended_B.all():
                        break
            yield tokens_BT[:, length:]
            made += tokens_BT.shape[1] - length
            length = tokens_BT.shape[1]
        rows = [row[start:] for row, start in zip(tokens_BT, padding_B.tolist(), strict=True)]


def _next_logits(
    model: TransformerLM,
    tokens_BT: torch.Tensor,
    padding_B: torch.Tensor,
    cache: list[LayerCache] | None,
) -> torch.Tensor:
    """Returns the logits (B, V) of the next token; reads only what is not in the cache."""
    length = tokens_BT.shape[1]
    seen, keys = (0, length) if cache is None else (cache[0].length, cache[0].k_BSKH.shape[1])
    slots_S = torch.arange(keys, device=tokens_BT.device)
    positions_BS = (slots_S[None, :] - padding_B[:, None]).clamp(min=0)
    is_token_BS = slots_S[None, :] >= padding_B[:, None]
    hidden = model.hidden(
        tokens_BT[:, seen:],
        is_token_BS[:, None, None, :],
        positions=positions_BS[:, seen:length],
        cache=cache,
    )
    assert not isinstance(hidden, tuple)
    return model.logits(hidden[:, -1])


def _device(model: TransformerLM) -> torch.device:
    return model.token_embedding.weight.device
