"""Generates the target of a source sequence with an encoder and decoder, token by token.

The source is read once. With a cache the decoder keeps the keys and values of its own tokens and
those that it makes of the encoder's output; without one it reads the whole target anew for every
token: the results are equal.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention import LayerCache
from jaxformer.decoding import SamplingSettings, choose_cache_dtype, choose_tokens, make_cache
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.execution import lengths
from jaxformer.execution.token_window import TokenRows
from jaxformer.few_row_layers import FewRowKernels, few_row_kernels_of, prepare_few_rows
from jaxformer.logits import check_sampling
from jaxformer.parameters import Parameters, merge
from jaxformer.prompts import check_target_tokens, read_features, read_source, read_start
from jaxformer.speech_transformer import SpeechTransformer
from jaxformer.split_once import split_once


def generate_target(
    model: EncoderDecoder,
    source_BS: Int[np.ndarray, "B S"] | Float[np.ndarray, "B C T"],
    num_tokens: int,
    *,
    start_BT: Int[np.ndarray, "B T"],
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    key: Array | None = None,
    stop_tokens: Sequence[int] = (),
    last_token: int | None = None,
    suppress_tokens: Sequence[int] = (),
    begin_suppress_tokens: Sequence[int] = (),
    use_cache: bool = True,
    cache_dtype: str | None = None,
    mask: Bool[np.ndarray, "B S"] | None = None,
) -> Int[np.ndarray, "B n"]:
    """Returns the next ``num_tokens`` tokens of every row's target, int32 (B, n).

    They are fewer only where every row has made a stop token. The model computes as in evaluation
    mode and is left as it was.

    Args:
        model: causal, with a head.
        source_BS: ids of the source sequences; of a ``SpeechTransformer`` its features (B, C, T).
        num_tokens: how many to make, in tokens.
        start_BT: the ids that the targets begin with, at least one: the model's start token and,
            where it has one, the token that always comes first (mBART's language).
        temperature: see ``filter_logits``.
        top_k: see ``filter_logits``.
        top_p: see ``filter_logits``.
        greedy: take the most probable token, the lowest id on a tie, instead of sampling.
        key: token i (from 0) of all rows is drawn with ``jax.random.fold_in(key, i)``.
        stop_tokens: a row ends with the first of these ids that it makes, which it repeats as long
            as other rows have not ended; when all rows have ended, nothing more is made.
        last_token: what the last of ``num_tokens`` tokens always is (BART); default none.
        suppress_tokens: ids that are never made (Whisper's that stand for no speech).
        begin_suppress_tokens: ids that are not made as the first token.
        use_cache: False reads the whole target for every token: slower, the same result.
        cache_dtype: of the keys and values in the caches, default the weights'.
        mask: True where the source holds a token, False on padding, which is not attended to.
            Positions count padding too. Default: no padding.

    Raises:
        ValueError: the model is not causal or has no head; source or start are no ids, or not
            within ``context_length``; a row of the mask is all padding; a setting is out of its
            range; or sampling has no key.
    """
    check_sampling(temperature, top_k, top_p)
    config = model.config
    if not config.causal:
        raise ValueError("only a causal decoder can generate: got causal=False")
    if config.head.head == "none":
        raise ValueError("only a model with a head can generate: got head='none'")
    longest = config.context_length
    if isinstance(model, SpeechTransformer):
        part = model.config.features
        source, is_token = read_features(
            source_BS, mask, part.num_features, model.config.num_frames
        )
    else:
        source, is_token = read_source(source_BS, mask, config.source_vocab_size, longest)
    start = read_start(
        start_BT, len(source), num_tokens, config.target_vocab_size, config.context_length
    )
    if not greedy and key is None:
        raise ValueError("sampling needs a key: pass key=jax.random.key(seed), or greedy=True")
    check_target_tokens(
        config.target_vocab_size,
        stop_tokens=stop_tokens,
        last_token=() if last_token is None else (last_token,),
        suppress_tokens=suppress_tokens,
        begin_suppress_tokens=begin_suppress_tokens,
    )
    if num_tokens == 0:
        return np.zeros((len(source), 0), np.int32)
    definition, parameters = split_once(model)
    weights = parameters["target_embedding.embedding"].dtype
    dtype = choose_cache_dtype(cache_dtype, weights)
    program = _program(definition, None if greedy else (temperature, top_k, top_p), dtype)
    if not config.reads_features:
        length = source.shape[1]
        room = lengths.round_up(length, lengths.SHORTEST_PREFILL, longest) - length
        source, is_token = (np.pad(x, ((0, 0), (0, room))) for x in (source, is_token))
    needed = start.shape[1] + num_tokens - 1
    tokens, length = program(
        parameters,
        few_row_kernels_of(definition, parameters, len(source), num_tokens) if use_cache else {},
        source.astype(weights if config.reads_features else np.int32),
        is_token,
        start.astype(np.int32),
        np.int32(num_tokens),
        slots=lengths.round_up(needed, lengths.SHORTEST_CACHE, longest),
        use_cache=use_cache,
        key=None if greedy else key,
        stop_tokens=np.array(stop_tokens, np.int32),
        last_token=np.int32(-1 if last_token is None else last_token),
        suppressed_2V=_suppressed(
            config.target_vocab_size, (*suppress_tokens, *begin_suppress_tokens), suppress_tokens
        ),
    )
    return np.array(tokens)[:, start.shape[1] : int(length)]


def _suppressed(
    vocab_size: int, first: Sequence[int], later: Sequence[int]
) -> Bool[np.ndarray, "2 V"] | None:
    """Which ids are not made, as the first token and later; None where every id may be."""
    if not first:
        return None
    suppressed_2V = np.zeros((2, vocab_size), bool)
    for row, ids in zip(suppressed_2V, (first, later), strict=True):
        row[list(ids)] = True
    return suppressed_2V


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Target(TokenRows):
    """The targets so far, and what the decoder remembers.

    Attributes:
        tokens_BS: ids; there is one slot more than the cache has, for the last token.
        ended_B: which rows have made a stop token.
        length: how many slots are filled.
        cache: of the decoder's own tokens; None without one.
    """

    tokens_BS: Int[Array, "B S"]  # noqa: N815
    ended_B: Bool[Array, "B"]  # noqa: N815
    length: Int[Array, ""]
    cache: list[LayerCache] | None


@functools.lru_cache(maxsize=16)
def _program(
    definition: nnx.GraphDef[Any], settings: SamplingSettings | None, cache_dtype: jnp.dtype
) -> Callable[..., tuple[Int[Array, "B S"], Int[Array, ""]]]:
    """The compiled program that reads a source and makes its target."""

    @functools.partial(jax.jit, static_argnames=("slots", "use_cache"))
    def run(
        parameters: Parameters,
        kernels: FewRowKernels,
        source_BS: Array,
        is_token_BS: Bool[Array, "B S"],
        start_BT: Int[Array, "B T"],
        count: Int[Array, ""],
        *,
        slots: int,
        use_cache: bool,
        key: Array | None,
        stop_tokens: Int[Array, "n"],
        last_token: Int[Array, ""],
        suppressed_2V: Bool[Array, "2 V"] | None,
    ) -> tuple[Int[Array, "B S"], Int[Array, ""]]:
        model: EncoderDecoder = merge(definition, parameters)
        model.eval()
        prepare_few_rows(model, kernels)
        batch, begun = start_BT.shape
        mask = is_token_BS[:, None, None, :]
        memory: Any = model.encode(source_BS, mask)
        memory_cache = None
        if use_cache:
            memory_cache, memory = _cast(model.decoder.remember(memory), cache_dtype), None

        def read(target: _Target, tokens: Array) -> Float[Array, "B T D"]:
            return model.decode(
                tokens, memory, memory_mask=mask, cache=target.cache, memory_cache=memory_cache
            )

        def add(target: _Target, hidden_B1D: Array) -> None:
            made = target.length - begun
            logits_BV = model.logits(hidden_B1D)[:, 0]
            if suppressed_2V is not None:
                suppressed_V = suppressed_2V[jnp.minimum(made, 1)]
                logits_BV = jnp.where(suppressed_V[None], -jnp.inf, logits_BV)
            token_B = choose_tokens(logits_BV, settings, key, made)
            is_last = (made == count - 1) & (last_token >= 0)
            target.append(jnp.where(is_last, last_token, token_B), stop_tokens)

        def is_needed(target: _Target) -> Bool[Array, ""]:
            return (target.length < begun + count) & ~jnp.all(target.ended_B)

        def step(target: _Target) -> _Target:
            if target.cache is None:
                # What stands behind the last token is hidden by the causal mask.
                hidden = read(target, target.tokens_BS[:, :-1])
                hidden = jax.lax.dynamic_slice_in_dim(hidden, target.length - 1, 1, axis=1)
            else:
                last = target.length - 1
                hidden = read(target, jax.lax.dynamic_slice_in_dim(target.tokens_BS, last, 1, 1))
            add(target, hidden)
            return target

        target = _Target(
            jnp.pad(start_BT, ((0, 0), (0, slots + 1 - begun))),
            jnp.zeros((batch,), bool),
            jnp.int32(begun),
            None,
        )
        if use_cache:
            target.cache = make_cache(model.config, batch, slots, cache_dtype)
            add(target, read(target, start_BT)[:, -1:])
        target = jax.lax.while_loop(is_needed, step, target)
        return target.tokens_BS, target.length

    return run


def _cast(caches: list[LayerCache], dtype: jnp.dtype) -> list[LayerCache]:
    return [
        dataclasses.replace(c, k_RSH=c.k_RSH.astype(dtype), v_RSH=c.v_RSH.astype(dtype))
        for c in caches
    ]
