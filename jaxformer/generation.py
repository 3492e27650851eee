"""Generates tokens from a causal model, one by one, with a key/value cache.

The window is what the model sees of a row: its newest tokens. As soon as it would hold more than
``context_length`` tokens it is cut to the newest ``context_length // 2`` (at least one), and grows
from there; a longer prompt is cut in the same way. With a cache the new window is read once and
then extended token by token, without one it is read anew for every token: the results are equal.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxformer.decoding import choose_cache_dtype, generating_programs, read_request
from jaxformer.execution import lengths
from jaxformer.execution.batch_halves import cut_batch, place_part, write_beside
from jaxformer.execution.token_window import Window, lengthen_window
from jaxformer.few_row_layers import FewRowKernels, few_row_calls_of, few_row_kernels_of
from jaxformer.split_once import split_once
from jaxformer.transformer_lm import TransformerLM


def generate(
    model: TransformerLM,
    prompt_BT: Int[np.ndarray, "B T"],
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    key: Array | None = None,
    stop_tokens: Sequence[int] = (),
    use_cache: bool = True,
    cache_dtype: str | None = None,
    mask: Bool[np.ndarray, "B T"] | None = None,
) -> Int[np.ndarray, "B n"]:
    """Returns the next tokens of every row, int32 (B, n): all that ``stream`` yields.

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
        key=key,
        stop_tokens=stop_tokens,
        use_cache=use_cache,
        cache_dtype=cache_dtype,
        mask=mask,
        chunk=max(num_tokens, 1),
    )
    empty = np.zeros((len(prompt_BT), 0), np.int32)
    return np.concatenate((empty, *chunks), axis=1)


def stream(
    model: TransformerLM,
    prompt_BT: Int[np.ndarray, "B T"],
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    key: Array | None = None,
    stop_tokens: Sequence[int] = (),
    use_cache: bool = True,
    cache_dtype: str | None = None,
    mask: Bool[np.ndarray, "B T"] | None = None,
    chunk: int = 16,
) -> Iterator[Int[np.ndarray, "B n"]]:
    """Yields the next ``num_tokens`` tokens of every row as they are made, int32, n <= ``chunk``.

    The first token comes by itself, as soon as the prompt is read. The window of each row follows
    the rule of this module, so a row of a batch continues as in a batch of one. The model
    computes as in evaluation mode and is left as it was. Programs are compiled once for each batch
    size, set of sampling settings, and rounded length of the prompt and of the cache; neither the
    number of tokens nor ``chunk`` compiles anything else. On a CPU the rows may be written as two
    halves at the same time.

    Args:
        model: causal.
        prompt_BT: ids in [0, V).
        num_tokens: how many to make, in tokens.
        temperature: see ``filter_logits``.
        top_k: see ``filter_logits``.
        top_p: see ``filter_logits``.
        greedy: take the most probable token, the lowest id on a tie, instead of sampling.
        key: token i (from 0) of all rows is drawn with ``jax.random.fold_in(key, i)``.
        stop_tokens: a row ends with the first of these ids that it makes, which it repeats as long
            as other rows have not ended; when all rows have ended, nothing more is made.
        use_cache: False reads the whole window for every token: slower, the same result.
        cache_dtype: of the keys and values in the cache, default the weights'. ``"bfloat16"``
            halves what is stored and read for a model in float32, at its rounding: the text can
            then be another.
        mask: True where the prompt holds a token, False on the padding to its left; positions
            count from a row's first token. Default: no padding.
        chunk: the most tokens to yield at once; it does not change them.

    Raises:
        ValueError: the model is not causal or has no head; the prompt or one of its rows is empty,
            or has an id outside [0, V); so has ``stop_tokens``; the mask is not left padding; a
            setting is out of its range; or sampling has no key. Raised by this call, not by the
            first ``next``.
    """
    (text,) = stream_samples(
        model,
        prompt_BT,
        num_tokens,
        [key],
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
    prompt_BT: Int[np.ndarray, "B T"],
    num_tokens: int,
    keys: Sequence[Array | None],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    stop_tokens: Sequence[int] = (),
    use_cache: bool = True,
    cache_dtype: str | None = None,
    mask: Bool[np.ndarray, "B T"] | None = None,
    chunk: int = 16,
) -> list[Iterator[Int[np.ndarray, "B n"]]]:
    """Returns a text for each key, as ``stream`` yields it; the prompt is read once for all.

    What is kept of it is its cache. A text after the first begins with a pass over the prompt's
    last token, and is the one that ``stream`` yields, but where two choices lie within rounding.

    Args:
        model: causal.
        prompt_BT: ids in [0, V).
        num_tokens: how many to make of each text, in tokens.
        keys: one a text.
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
    if not greedy and None in keys:
        raise ValueError("sampling needs a key: pass key=jax.random.key(seed), or greedy=True")
    for key in keys:
        if isinstance(key, int) and not greedy:
            raise ValueError(f"key must be a random key: pass key=jax.random.key({key})")
    definition, parameters = split_once(model)
    dtype = choose_cache_dtype(cache_dtype, parameters["token_embedding.embedding"].dtype)
    settings = None if greedy else (temperature, top_k, top_p)
    draws = 0 if greedy else len(rows) * len(parameters["token_embedding.embedding"])
    parts = cut_batch(len(rows), draws, [*parameters.values()])
    prompts = [_Prompt(is_kept=use_cache and len(keys) > 1) for _ in parts]
    read, write = generating_programs(definition, settings, dtype)
    making = threading.Lock()
    called_kernels = few_row_calls_of(definition, parameters, len(rows) // len(parts))

    @functools.cache  # made with the second token: the first need not wait for it
    def copied_kernels() -> FewRowKernels:
        per_part = len(rows) // len(parts)
        return called_kernels or few_row_kernels_of(definition, parameters, per_part, num_tokens)

    def write_part(key: Array | None, part: slice, prompt: _Prompt) -> Iterator[np.ndarray]:
        own = rows[part]
        drawing: dict[str, Any] = {
            "key": None if greedy else key,
            "stop_tokens": np.array(stop_tokens, np.int32),
            "part": place_part(part, len(rows)),
        }
        prefill = functools.partial(read, parameters, called_kernels, **drawing)

        def extend(*window: Any) -> Window:
            with making:  # once for both halves
                kernels = copied_kernels()
            return write(parameters, kernels, *window, **drawing)

        shortest = lengths.shortest_cache(model.config, len(own), dtype)
        context = model.config.context_length
        return _stream(
            prefill, extend, own, num_tokens, context, shortest, chunk, use_cache, prompt
        )

    return [
        write_beside([write_part(key, *of_part) for of_part in zip(parts, prompts, strict=True)])
        for key in keys
    ]


@dataclasses.dataclass
class _Prompt:
    """What several texts share.

    Attributes:
        is_kept: whether there are several.
        window: the prompt after it was read; None before.
    """

    is_kept: bool
    window: Window | None = None


_copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def _stream(
    prefill: Callable[..., Window],
    extend: Callable[..., Window],
    rows: list[np.ndarray],
    num_tokens: int,
    context_length: int,
    shortest_cache: int,
    chunk: int,
    use_cache: bool,
    prompt: _Prompt,
) -> Iterator[np.ndarray]:
    made = 0
    ended_B = np.zeros(len(rows), bool)
    while made < num_tokens and not ended_B.all():
        # A row is cut only when it is full itself. The others keep their windows, and all are
        # packed anew, so that the longest never stands behind padding.
        rows = [r if len(r) <= context_length else r[-max(context_length // 2, 1) :] for r in rows]
        length = max(len(row) for row in rows)
        end = min(length + num_tokens - made, context_length + 1) if use_cache else length + 1
        slots = lengths.round_up(length, shortest_cache, context_length)
        window = Window.pack(rows, ended_B, slots)
        padding = np.array(window.padding_B)
        slots_read = lengths.round_up(length, lengths.SHORTEST_PREFILL, context_length)
        if made == 0 and prompt.window is not None:
            # The first token is then made by the first step.
            window = _copy(prompt.window)
        else:
            first = window
            window = prefill(window, np.int32(made), slots_read=slots_read)
            if made == 0 and prompt.is_kept:
                read = dataclasses.replace(window, length=first.length, ended_B=first.ended_B)
                prompt.window = _copy(read)
        while True:
            # Copies: on a CPU a mere view would keep the window from being donated.
            tokens, ended_B = np.array(window.tokens_BS), np.array(window.ended_B)
            before, length = length, int(window.length)
            if length > before:
                yield tokens[:, before:length]
            made += length - before
            if length == end or ended_B.all():
                break
            if length > window.slots:
                slots = lengths.round_up(length, shortest_cache, context_length)
                window = lengthen_window(window, slots=slots)
            count = min(chunk if made else 1, end - length, window.slots + 1 - length)
            window = extend(window, np.int32(made), np.int32(count))
        rows = [row[start:length] for row, start in zip(tokens, padding, strict=True)]
