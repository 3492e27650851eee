"""Generates the texts of many requests that share one cache, whose rows come and go.

A batch of ``generation`` takes as long as its longest text. Here a row that has made its last token
is taken by the next request while the others go on (iteration-level scheduling: Yu et al., "Orca:
A Distributed Serving System for Transformer-Based Generative Models", OSDI 2022, section 3.1). Each
text is the one that ``generation.generate`` makes of its prompt alone, with its own key.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxformer.checks import check_is_integer
from jaxformer.decoding import (
    SamplingSettings,
    choose_cache_dtype,
    choose_tokens,
    evaluating,
    generating_programs,
    make_cache,
    read_request,
)
from jaxformer.execution import lengths
from jaxformer.execution.shared_window import (
    SharedWindow,
    lengthen_shared,
    place_text,
    shift_shared,
)
from jaxformer.execution.token_window import Window
from jaxformer.few_row_layers import (
    FewRowKernels,
    few_row_calls_of,
    few_row_kernels_of,
    prepare_few_rows,
)
from jaxformer.parameters import Parameters
from jaxformer.positions import Rotary
from jaxformer.split_once import split_once
from jaxformer.transformer_lm import TransformerLM

# Slots past the context: so many tokens at least are made before rows are shifted.
FEWEST_SPARE_SLOTS = 16


class Request(NamedTuple):
    """A text that is wanted.

    Attributes:
        prompt: ids (T,) in [0, V), at least one.
        num_tokens: the most to make, in tokens.
        key: token i (from 0) is drawn with ``jax.random.fold_in(key, i)``; None where all texts are
            greedy.
    """

    prompt: Int[np.ndarray, "T"]
    num_tokens: int
    key: Array | None = None


def generate_requests(
    model: TransformerLM,
    requests: Sequence[Request],
    *,
    rows: int = 8,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    stop_tokens: Sequence[int] = (),
    cache_dtype: str | None = None,
) -> Iterator[tuple[int, Int[np.ndarray, "n"]]]:
    """Yields the number of a request and its new tokens, int32 (n,), as soon as it has all.

    A text is the one of ``generation.generate`` for its prompt and key alone, up to its first stop
    token, whatever is written beside it; but where two choices lie within rounding, as products of
    several rows add in another order than those of one. Requests begin in their order. Programs are
    compiled once for each number of rows, set of sampling settings, and rounded length of a prompt
    and of the cache.

    Args:
        model: causal.
        requests: what is wanted.
        rows: how many texts are written at the same time.
        temperature: this and all others as in ``generation.stream``.
        top_k: see ``generation.stream``.
        top_p: see ``generation.stream``.
        greedy: see ``generation.stream``.
        stop_tokens: a text ends with the first of these ids that it makes.
        cache_dtype: see ``generation.stream``.

    Raises:
        ValueError: see ``generation.stream``; or ``rows`` is below 1, or the model's rotary tables
            follow the length of the longest text, so that no text is written by itself. Raised by
            this call, not by the first ``next``.
    """
    check_is_integer("rows", rows)
    if rows < 1:
        raise ValueError(f"rows must be at least 1: got {rows}")
    for node in (node for _, node in nnx.iter_modules(model) if isinstance(node, Rotary)):
        if node.scaling is not None and node.scaling.follows_length(node.max_length):
            raise ValueError(
                "texts of one batch must not depend on each other, and the rotary tables of this "
                "model follow the longest: generate one at a time"
            )
    texts = []
    for number, request in enumerate(requests):
        (prompt,) = read_request(
            model, np.asarray(request.prompt)[None], request.num_tokens, temperature=temperature,
            top_k=top_k, top_p=top_p, stop_tokens=stop_tokens, mask=None, chunk=1,
        )  # fmt: skip
        if not greedy and request.key is None:
            raise ValueError("sampling needs a key in each request, or greedy=True")
        key = None if greedy else _typed(request.key)
        texts.append(_Text(number, prompt, request.num_tokens, key, frozenset(stop_tokens)))
    definition, parameters = split_once(model)
    dtype = choose_cache_dtype(cache_dtype, parameters["token_embedding.embedding"].dtype)
    settings = None if greedy else (temperature, top_k, top_p)
    stops = np.array(stop_tokens, np.int32)
    read, _ = generating_programs(definition, settings, dtype)
    extend = functools.partial(
        _program(definition, settings),
        parameters,
        few_row_kernels_of(definition, parameters, rows, sum(text.left for text in texts)),
        stop_tokens=stops,
    )
    shortest = lengths.shortest_cache(model.config, rows, dtype)

    slots = min(shortest, model.config.context_length)

    @jax.jit  # so that each array has a buffer of its own, which is donated
    def make_window(key: Array | None) -> SharedWindow:
        return SharedWindow.empty(rows, slots, make_cache(model.config, rows, slots, dtype), key)

    batch = _Batch(
        functools.partial(
            read, parameters, few_row_calls_of(definition, parameters, 1), stop_tokens=stops
        ),
        extend,
        make_window(texts[0].key if texts else None),
        model.config.context_length,
        shortest,
    )
    return _serve(batch, texts)


def _typed(key: Any) -> Array:
    """A key of which an array has one dimension."""
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return key if is_typed else jax.random.wrap_key_data(key)


class _Text:
    """One request: what it has made, and what the model sees of it.

    Attributes:
        number: of the request.
        seen: the tokens in its window.
        made: its new tokens.
        key: what they are drawn from.
    """

    def __init__(
        self,
        number: int,
        prompt: np.ndarray,
        count: int,
        key: Array | None,
        stops: frozenset[int],
    ):
        self.number, self.seen, self.key = number, prompt, key
        self.made: list[int] = []
        self._count, self._stops = count, stops

    @property
    def left(self) -> int:
        """How many tokens it may still make."""
        return self._count - len(self.made)

    @property
    def is_done(self) -> bool:
        """Whether it has made its last token."""
        return self.left == 0 or any(token in self._stops for token in self.made[-1:])

    def add(self, tokens: np.ndarray) -> None:
        """Takes new tokens."""
        self.made += tokens.tolist()
        self.seen = np.concatenate((self.seen, tokens))

    def result(self) -> tuple[int, np.ndarray]:
        """Its number and its new tokens."""
        return self.number, np.array(self.made, np.int32)


class _Batch:
    """The rows: which text is in each, and the window on the device.

    Args:
        read: reads a prompt and makes its first token.
        extend: extends the window until a text ends or is full.
        window: of free rows.
        context_length: the most tokens that the model sees of a text.
        shortest_cache: the fewest slots.
    """

    def __init__(
        self,
        read: Callable[..., Window],
        extend: Callable[[SharedWindow], SharedWindow],
        window: SharedWindow,
        context_length: int,
        shortest_cache: int,
    ):
        self._read, self._extend, self._window = read, extend, window
        self._context_length, self._shortest = context_length, shortest_cache
        self._longest = context_length + max(context_length // 8, FEWEST_SPARE_SLOTS)
        self._length = int(window.length)
        self.texts: list[_Text | None] = [None] * len(window.ended_B)

    def start(self, row: int, text: _Text) -> None:
        """Reads a text, which makes a token; if more are to follow, it takes the free row."""
        context = self._context_length
        while True:
            if len(text.seen) > context:
                text.seen = text.seen[-max(context // 2, 1) :]
            length = len(text.seen)
            slots = lengths.round_up(length, lengths.SHORTEST_PREFILL, context)
            window = Window.pack([text.seen], np.zeros(1, bool), slots)
            index = np.int32(len(text.made))
            window = self._read(window, index, slots_read=slots, key=text.key)
            text.add(np.array(window.tokens_BS)[0, length : length + 1])
            if text.is_done:
                return
            if len(text.seen) <= context:
                break
        if slots > self._window.slots:
            self._lengthen(slots)
        if length + 1 > self._length:
            self._shift(length + 1 - self._length)
        self._window = place_text(
            self._window, np.int32(row), window, index + 1, np.int32(text.left), text.key
        )
        self.texts[row] = text

    def extend(self) -> list[tuple[int, _Text]]:
        """Extends all rows until a text ends or is full; returns those with the rows they had."""
        if self._length > self._window.slots:
            padding = np.array(self._window.padding_B)
            least = min(int(padding[i]) for i, text in enumerate(self.texts) if text is not None)
            wanted = lengths.round_up(
                self._length - least + FEWEST_SPARE_SLOTS, self._shortest, self._longest
            )
            if wanted > self._window.slots:
                self._lengthen(wanted)
            if least:
                self._shift(-least)
        window = self._window = self._extend(self._window)
        # Copies: on a CPU a mere view would keep the window from being donated.
        tokens, ended, index = map(np.array, (window.tokens_BS, window.ended_B, window.index_B))
        before, self._length = self._length, int(window.length)
        left = []
        for row, text in enumerate(self.texts):
            if text is None:
                continue
            text.add(tokens[row, before : before + int(index[row]) - len(text.made)])
            if ended[row]:
                left.append((row, text))
                self.texts[row] = None
        return left

    def _lengthen(self, slots: int) -> None:
        self._window = lengthen_shared(self._window, slots=slots)

    def _shift(self, count: int) -> None:
        self._window = shift_shared(self._window, np.int32(count))
        self._length += count


def _serve(batch: _Batch, texts: Sequence[_Text]) -> Iterator[tuple[int, np.ndarray]]:
    yield from (text.result() for text in texts if text.is_done)
    waiting = iter([text for text in texts if not text.is_done])
    free = list(range(len(batch.texts)))
    while True:
        while free and (text := next(waiting, None)) is not None:
            batch.start(free[0], text)
            if text.is_done:
                yield text.result()
            else:
                free.pop(0)
        if not any(batch.texts):
            return
        for row, text in batch.extend():
            if not text.is_done:
                # It is full: what the model sees of it is cut and read anew.
                batch.start(row, text)
            if text.is_done:
                free.append(row)
                yield text.result()


@functools.lru_cache(maxsize=16)
def _program(
    definition: nnx.GraphDef[Any], settings: SamplingSettings | None
) -> Callable[..., SharedWindow]:
    """The compiled program that extends a window until one of its texts ends or is full."""

    def choose(logits_BV: Float[Array, "B V"], window: SharedWindow) -> Int[Array, "B"]:
        if window.keys_B is None:
            return choose_tokens(logits_BV, None, None, jnp.int32(0))

        def choose_one(logits_V: Array, key: Array, index: Array) -> Array:
            return choose_tokens(logits_V[None], settings, key, index)[0]

        return jax.vmap(choose_one)(logits_BV, window.keys_B, window.index_B)

    @functools.partial(jax.jit, donate_argnames="window")
    def extend(
        parameters: Parameters,
        kernels: FewRowKernels,
        window: SharedWindow,
        *,
        stop_tokens: Int[Array, "n"],
    ) -> SharedWindow:
        model = evaluating(definition, parameters)
        prepare_few_rows(model, kernels)
        context_length = model.config.context_length
        free_B = window.ended_B

        def is_needed(window: SharedWindow) -> Bool[Array, ""]:
            return (window.length <= window.slots) & ~jnp.any(window.ended_B & ~free_B)

        def step(window: SharedWindow) -> SharedWindow:
            logits = model.logits(window.read(model, window.length - 1, 1))
            window.append(choose(logits[:, 0], window), stop_tokens)
            is_full_B = window.length - window.padding_B > context_length
            window.ended_B = window.ended_B | is_full_B
            return window

        return jax.lax.while_loop(is_needed, step, window)

    return extend
