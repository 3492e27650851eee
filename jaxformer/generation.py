"""Text from a causal model, token by token, with a key/value cache.

The window is what the model sees of a row: its newest tokens. As soon as it would hold more than
``context_length`` tokens it is cut to the newest ``context_length // 2`` (at least one), and grows
from there; a longer prompt is cut in the same way. With a cache the new window is read once and
then extended token by token, without one it is read anew for every token: the results are equal.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention import LayerCache
from jaxformer.config import TransformerLMConfig
from jaxformer.logits import check_sampling, filter_logits
from jaxformer.parameters import Parameters, merge, split
from jaxformer.transformer_lm import TransformerLM

# Lengths are rounded up to powers of two so that few programs are compiled: prompts from the
# first number on, caches from the second, both up to the context.
SHORTEST_PREFILL = 16
SHORTEST_CACHE = 1024

Definition = nnx.GraphDef[Any]


def make_cache(
    config: TransformerLMConfig, batch: int, length: int, dtype: jnp.dtype
) -> list[LayerCache]:
    """Empty caches, one a layer, each with room for ``length`` tokens of ``batch`` rows."""
    num_kv_heads = config.num_heads if config.num_kv_heads is None else config.num_kv_heads
    head_dim = config.d_model // config.num_heads if config.head_dim is None else config.head_dim
    shape = (batch, length, num_kv_heads, head_dim)
    return [
        LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.int32(0))
        for _ in range(config.num_layers)
    ]


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
    use_cache: bool = True,
    mask: Bool[np.ndarray, "B T"] | None = None,
) -> Int[np.ndarray, "B {num_tokens}"]:
    """The next ``num_tokens`` tokens of every row, int32; all that ``stream`` yields, in one array.

    Arguments and errors as there.
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
        use_cache=use_cache,
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
    use_cache: bool = True,
    mask: Bool[np.ndarray, "B T"] | None = None,
    chunk: int = 16,
) -> Iterator[Int[np.ndarray, "B n"]]:
    """Yields the next ``num_tokens`` tokens of every row as they are made, int32, n <= ``chunk``.

    The window of each row follows the rule at the head of this module, so a row of a batch
    continues as it would alone. The model computes as in evaluation mode and is left as it was.
    Programs are compiled once for each batch size, power of two of the prompt's length, and set
    of sampling settings; neither the number of tokens nor ``chunk`` compiles anything.

    Args:
        model: causal.
        prompt_BT: ids in [0, V).
        num_tokens: how many to make, in tokens.
        temperature: see ``filter_logits``.
        top_k: see ``filter_logits``.
        top_p: see ``filter_logits``.
        greedy: take the most probable token, the lowest id on a tie, instead of sampling.
        key: token i (from 0) of all rows is drawn with ``jax.random.fold_in(key, i)``.
        use_cache: False reads the whole window for every token: slower, the same result.
        mask: True where the prompt holds a token, False on the padding to its left; positions
            count from a row's first token. Default: no padding.
        chunk: the most tokens to yield at once; it does not change them.

    Raises:
        ValueError: the model is not causal or has no head; the prompt or one of its rows is empty,
            or has an id outside [0, V); the mask is not left padding; a setting is out of its
            range; or sampling has no key. Raised by this call, not by the first ``next``.
    """
    check_sampling(temperature, top_k, top_p)
    if num_tokens < 0:
        raise ValueError(f"num_tokens must not be negative: got {num_tokens}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1: got {chunk}")
    if not model.config.causal:
        raise ValueError("only a causal model can generate: got causal=False")
    if model.config.head == "none":
        raise ValueError("only a model with a head can generate: got head='none'")
    if not greedy and key is None:
        raise ValueError("sampling needs a key: pass key=jax.random.key(seed), or greedy=True")
    rows = _read_prompt(prompt_BT, mask, model.token_embedding.embedding[...].shape[0])
    copy = merge(*split(model))
    copy.eval()
    definition, parameters = split(copy)
    settings = None if greedy else (temperature, top_k, top_p)
    prefill = _compile_prefill(definition) if use_cache else None
    extend = functools.partial(_compile_extend(definition, settings), parameters)
    return _stream(
        functools.partial(prefill, parameters) if prefill else None,
        extend,
        rows,
        num_tokens,
        model.config.context_length,
        None if greedy else key,
        chunk,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Window:
    """What the model sees, in buffers of a fixed length, and the tokens that it makes there.

    Attributes:
        tokens_BS: ids, padded on the left; there is one slot more than the cache has, for the
            token made from a full window.
        padding_B: how many slots of each row are padding.
        length: how many slots are filled, padding included.
        cache: of all tokens but the last, or None where there is to be none.
    """

    tokens_BS: Int[Array, "B S"]  # noqa: N815
    padding_B: Int[Array, "B"]  # noqa: N815
    length: Int[Array, ""]
    cache: list[LayerCache] | None

    @classmethod
    def pack(cls, rows: list[np.ndarray], slots: int) -> "_Window":
        """A window of ``slots`` + 1 slots around the given rows."""
        length = max(len(row) for row in rows)
        tokens = np.zeros((len(rows), slots + 1), np.int32)
        for padded, row in zip(tokens, rows, strict=True):
            padded[length - len(row) : length] = row
        padding = np.array([length - len(row) for row in rows], np.int32)
        return cls(jnp.asarray(tokens), jnp.asarray(padding), jnp.int32(length), None)

    def hidden(
        self,
        model: TransformerLM,
        start: Int[Array, ""] | int,
        count: int,
        cache: list[LayerCache] | None,
    ) -> Float[Array, "B T D"]:
        """The model's residual stream at the ``count`` slots from ``start`` on."""
        slots = self.tokens_BS.shape[1] - 1
        tokens = jax.lax.dynamic_slice_in_dim(self.tokens_BS, start, count, axis=1)
        positions = (start + jnp.arange(count))[None, :] - self.padding_B[:, None]
        is_token_BS = jnp.arange(slots)[None, :] >= self.padding_B[:, None]
        hidden = model.hidden(
            tokens,
            is_token_BS[:, None, None, :],
            positions=jnp.maximum(positions, 0),
            cache=cache,
        )
        assert not isinstance(hidden, tuple)
        return hidden

    def next_logits(self, model: TransformerLM) -> Float[Array, "B V"]:
        """Logits of the token after the last; its keys and values go into the cache."""
        if self.cache is None:
            hidden = self.hidden(model, 0, self.tokens_BS.shape[1] - 1, None)
            last = jax.lax.dynamic_slice_in_dim(hidden, self.length - 1, 1, axis=1)
        else:
            last = self.hidden(model, self.length - 1, 1, self.cache)
        return model.logits(last)[:, 0]

    def append(self, token_B: Int[Array, "B"]) -> "_Window":
        """The window with one more token in every row."""
        tokens = jax.lax.dynamic_update_slice_in_dim(
            self.tokens_BS, token_B[:, None].astype(jnp.int32), self.length, axis=1
        )
        return dataclasses.replace(self, tokens_BS=tokens, length=self.length + 1)


@functools.lru_cache(maxsize=16)
def _compile_prefill(definition: Definition) -> Callable[..., _Window]:
    """Gives a window its cache, from its first ``count`` slots, ``length`` at least.

    What the slots past ``length`` leave in the cache is hidden by the causal mask until it is
    overwritten. The last token is computed again by the first step that follows, so that only
    there the head is applied and a token drawn.
    """

    @functools.partial(jax.jit, static_argnames="count")
    def prefill(parameters: Parameters, window: _Window, *, count: int) -> _Window:
        model = merge(definition, parameters)
        batch, slots = window.tokens_BS.shape
        dtype = parameters["token_embedding.embedding"].dtype
        cache = make_cache(model.config, batch, slots - 1, dtype)
        window.hidden(model, 0, count, cache)
        cache = [dataclasses.replace(layer, length=window.length - 1) for layer in cache]
        return dataclasses.replace(window, cache=cache)

    return prefill


@functools.lru_cache(maxsize=16)
def _compile_extend(
    definition: Definition, settings: tuple[float, int | None, float | None] | None
) -> Callable[..., _Window]:
    """Adds ``count`` tokens to a window, the first of which is the ``index``-th of the text."""

    def choose(
        logits_BV: Float[Array, "B V"], key: Array | None, index: Int[Array, ""]
    ) -> Int[Array, "B"]:
        if settings is None or key is None:
            return jnp.argmax(logits_BV, axis=-1)
        temperature, top_k, top_p = settings
        kept_BV = filter_logits(logits_BV, temperature=temperature, top_k=top_k, top_p=top_p)
        return jax.random.categorical(jax.random.fold_in(key, index), kept_BV)

    @functools.partial(jax.jit, donate_argnames="window")
    def extend(
        parameters: Parameters,
        window: _Window,
        key: Array | None,
        index: Int[Array, ""],
        count: Int[Array, ""],
    ) -> _Window:
        model = merge(definition, parameters)

        def step(i: Int[Array, ""], window: _Window) -> _Window:
            return window.append(choose(window.next_logits(model), key, index + i))

        return jax.lax.fori_loop(jnp.int32(0), count, step, window)

    return extend


def _stream(
    prefill: Callable[..., _Window] | None,
    extend: Callable[..., _Window],
    rows: list[np.ndarray],
    num_tokens: int,
    context_length: int,
    key: Array | None,
    chunk: int,
) -> Iterator[np.ndarray]:
    made = 0
    while made < num_tokens:
        # A row is cut when it alone is full; the others keep their windows, and all are packed
        # anew, so that the longest never stands behind padding.
        rows = [r if len(r) <= context_length else r[-max(context_length // 2, 1) :] for r in rows]
        length = max(len(row) for row in rows)
        end = min(length + num_tokens - made, context_length + 1)
        window = _Window.pack(rows, _round_up(end - 1, SHORTEST_CACHE, context_length))
        if prefill is not None:
            window = prefill(window, count=_round_up(length, SHORTEST_PREFILL, context_length))
        padding = np.array(window.padding_B)
        while length < end:
            count = min(chunk, end - length)
            window = extend(window, key, np.int32(made), np.int32(count))
            # A copy: on a CPU a mere view would keep the window from being donated.
            tokens = np.array(window.tokens_BS)
            yield tokens[:, length : length + count]
            length += count
            made += count
        rows = [row[start:length] for row, start in zip(tokens, padding, strict=True)]


def _read_prompt(prompt_BT: Any, mask: Any, vocab_size: int) -> list[np.ndarray]:
    """The tokens of each row, without padding."""
    prompt = np.asarray(prompt_BT)
    if prompt.ndim != 2 or prompt.size == 0:
        raise ValueError(f"the prompt must be (B, T) with B, T >= 1: got shape {prompt.shape}")
    if not np.issubdtype(prompt.dtype, np.integer):
        raise ValueError(f"the prompt must hold integer ids: got {prompt.dtype}")
    mask = np.ones(prompt.shape, bool) if mask is None else np.asarray(mask)
    if mask.dtype != bool or mask.shape != prompt.shape:
        raise ValueError(
            f"the mask must be boolean with the prompt's shape {prompt.shape}: "
            f"got {mask.dtype} with shape {mask.shape}"
        )
    if not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("every row of the mask must be padding (False), then tokens (True)")
    rows = [row[kept].astype(np.int64) for row, kept in zip(prompt, mask, strict=True)]
    for row in rows:
        if row.min() < 0 or row.max() >= vocab_size:
            bad = row[(row < 0) | (row >= vocab_size)][0]
            raise ValueError(f"prompt ids must be in [0, {vocab_size}): got {bad}")
    return rows


def _round_up(length: int, shortest: int, longest: int) -> int:
    """The next power of two from ``shortest`` on, but no more than ``longest``."""
    return min(max(1 << (length - 1).bit_length(), shortest), longest)
