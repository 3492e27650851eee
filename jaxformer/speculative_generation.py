"""Generates tokens with a draft: a small model proposes, the large one reads all proposals at once.

A round begins with the draft, which makes K tokens one by one. The model then reads the last token
and these K in one pass, and keeps the first n on which it agrees, and one more of its own: n + 1
tokens for one pass of the large model. What is written does not depend on the draft: greedily it is
the text that the model writes alone, and sampled tokens have the model's own probabilities
(Leviathan et al., "Fast inference from transformers via speculative decoding", arXiv 2211.17192,
section 2.3). The window of a row is that of ``generation``.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention import LayerCache
from jaxformer.execution import lengths
from jaxformer.execution.token_window import Window
from jaxformer.generation import (
    SamplingSettings,
    choose_tokens,
    evaluating,
    make_cache,
    read_request,
)
from jaxformer.layers import few_row_kernels, prepare_few_rows
from jaxformer.logits import filter_logits
from jaxformer.parameters import Parameters, split
from jaxformer.transformer_lm import TransformerLM


def accept_proposals(
    model_BLV: Float[Array, "B L V"], draft_BKV: Float[Array, "B K V"], tokens_BK: Int[Array, "B K"]
) -> tuple[Float[Array, "B K"], Float[Array, "B L V"]]:
    """Returns how likely each proposal is accepted, and what is drawn where the first is not.

    Proposal x of a draft with probabilities q is accepted with probability min(1, p(x) / q(x)), p
    being the model's; else a token is drawn from max(0, p - q), normalised. A token made in this
    way has the probabilities p (arXiv 2211.17192, appendix A.1).

    Args:
        model_BLV: p of the tokens at the K places, and at one more: L = K + 1.
        draft_BKV: q of those at the K places.
        tokens_BK: the proposals, drawn from q.

    Returns:
        Probabilities of acceptance, and at each place those of the token that is drawn there if it
        is the first without an accepted proposal; after the last, p itself.
    """
    p_BK, q_BK = (
        jnp.take_along_axis(x, tokens_BK[..., None], axis=-1)[..., 0]
        for x in (model_BLV[:, :-1], draft_BKV)
    )
    rest_BKV = jnp.maximum(model_BLV[:, :-1] - draft_BKV, 0)
    sum_BK1 = jnp.sum(rest_BKV, axis=-1, keepdims=True)
    # Where p = q nothing is rejected, and nothing is left to draw from.
    rest_BKV = jnp.where(sum_BK1 > 0, rest_BKV / sum_BK1, model_BLV[:, :-1])
    return jnp.minimum(1, p_BK / q_BK), jnp.concatenate((rest_BKV, model_BLV[:, -1:]), axis=1)


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
    (definition, parameters), (draft_definition, draft_parameters) = split(model), split(draft)
    dtypes = tuple(
        jnp.dtype(p["token_embedding.embedding"].dtype if cache_dtype is None else cache_dtype)
        for p in (parameters, draft_parameters)
    )
    settings = None if greedy else (temperature, top_k, top_p)
    drawing: dict[str, Any] = {
        "key": None if greedy else key,
        "stop_tokens": np.array(stop_tokens, np.int32),
    }
    read, write = _programs(definition, draft_definition, settings, dtypes, draft_tokens)
    prefill = functools.partial(read, parameters, draft_parameters, **drawing)

    @functools.cache  # made with the second token: the first need not wait for it
    def copied_kernels() -> tuple[dict[str, Array], dict[str, Array]]:
        model = evaluating(definition, parameters)
        draft = evaluating(draft_definition, draft_parameters)
        return (
            few_row_kernels(model, len(rows) * (draft_tokens + 1), num_tokens),
            few_row_kernels(draft, len(rows), num_tokens),
        )

    def extend(*text: Any) -> _Text:
        return write(parameters, draft_parameters, copied_kernels(), *text, **drawing)

    shortest = lengths.shortest_cache(model.config, len(rows), dtypes[0])
    context = model.config.context_length
    return _stream(prefill, extend, rows, num_tokens, context, shortest, chunk, draft_tokens)


def check_draft(model: TransformerLM, draft: TransformerLM, draft_tokens: int) -> None:
    """Checks that a draft can write for a model.

    Raises:
        ValueError: it cannot; the message says why.
    """
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


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class _Text:
    """A window that two models see.

    Attributes:
        window: the model's.
        draft_cache: the draft's, of all tokens but the last two.
    """

    window: Window
    draft_cache: list[LayerCache]

    def with_slots(self, slots: int) -> "_Text":
        """The same text with room for ``slots`` tokens."""
        return lengths.lengthen(self, slots - self.window.slots)


@functools.lru_cache(maxsize=16)
def _programs(
    definition: nnx.GraphDef[Any],
    draft_definition: nnx.GraphDef[Any],
    settings: SamplingSettings | None,
    dtypes: tuple[jnp.dtype, jnp.dtype],
    draft_tokens: int,
) -> tuple[Callable[..., _Text], Callable[..., _Text]]:
    """The two compiled programs, as in ``generation``: one reads a prompt, one makes rounds."""

    def probabilities(logits: Float[Array, "*B V"]) -> Float[Array, "*B V"]:
        assert settings is not None
        temperature, top_k, top_p = settings
        kept = filter_logits(logits, temperature=temperature, top_k=top_k, top_p=top_p)
        return jax.nn.softmax(kept, axis=-1)

    @functools.partial(jax.jit, static_argnames="slots_read")
    def prefill(
        parameters: Parameters,
        draft_parameters: Parameters,
        window: Window,
        index: Int[Array, ""],
        *,
        slots_read: int,
        key: Array | None,
        stop_tokens: Int[Array, "n"],
    ) -> _Text:
        models = evaluating(definition, parameters), evaluating(draft_definition, draft_parameters)
        batch = window.tokens_BS.shape[0]
        caches = [
            make_cache(m.config, batch, slots_read, d) for m, d in zip(models, dtypes, strict=True)
        ]
        drafted = dataclasses.replace(window, cache=caches[1])
        drafted.read(models[1], 0, slots_read)
        window.cache = caches[0]
        hidden = window.read(models[0], 0, slots_read)
        last = jax.lax.dynamic_slice_in_dim(hidden, window.length - 1, 1, axis=1)
        window.cache, draft_cache = lengths.lengthen(
            (window.cache, drafted.cache), window.slots - slots_read
        )
        logits = models[0].logits(last)[:, 0]
        window.append(choose_tokens(logits, settings, key, index), stop_tokens)
        return _Text(window, draft_cache)

    def propose(
        draft: TransformerLM, text: _Text, key: Array | None
    ) -> tuple[Window, Float[Array, "B K V"] | None]:
        """The window with the draft's tokens in the slots after its last, and their q."""
        window, length = (
            dataclasses.replace(text.window, cache=text.draft_cache),
            text.window.length,
        )

        def write(i: Array | int, window: Window, logits_BV: Array) -> Array:
            token_B = choose_tokens(logits_BV, settings, key, jnp.int32(i))[:, None]
            window.tokens_BS = jax.lax.dynamic_update_slice_in_dim(
                window.tokens_BS, token_B.astype(jnp.int32), length + i, axis=1
            )
            return logits_BV if settings is None else probabilities(logits_BV)

        # Of a round whose proposals were all accepted the draft has not read the last.
        q_BV = write(0, window, draft.logits(window.read(draft, length - 2, 2))[:, -1])
        if draft_tokens == 1:
            return window, None if settings is None else q_BV[:, None]

        def step(i: Array, carry: tuple[Window, Array]) -> tuple[Window, Array]:
            window, q_KBV = carry
            q_BV = write(i, window, draft.logits(window.read(draft, length + i - 1, 1))[:, 0])
            return window, q_KBV if settings is None else q_KBV.at[i].set(q_BV)

        q_KBV = jnp.zeros((0 if settings is None else draft_tokens, *q_BV.shape), q_BV.dtype)
        q_KBV = q_KBV if settings is None else q_KBV.at[0].set(q_BV)
        window, q_KBV = jax.lax.fori_loop(1, draft_tokens, step, (window, q_KBV))
        return window, None if settings is None else q_KBV.swapaxes(0, 1)

    def choose(
        logits_BLV: Float[Array, "B L V"],
        q_BKV: Float[Array, "B K V"] | None,
        tokens_BK: Int[Array, "B K"],
        ended_B: Bool[Array, "B"],
        key: Array | None,
    ) -> tuple[Int[Array, "B L"], Int[Array, ""]]:
        """The next tokens of each row, and how many of them all rows take."""
        if q_BKV is None or key is None:
            best_BL = jnp.argmax(logits_BLV, axis=-1)
            return best_BL, 1 + _agreed(best_BL[:, :-1] == tokens_BK, ended_B).min()
        accept_BK, rest_BLV = accept_proposals(probabilities(logits_BLV), q_BKV, tokens_BK)
        accept_key, rest_key = jax.random.split(jax.random.fold_in(key, draft_tokens))
        drawn_BK = jax.random.uniform(accept_key, accept_BK.shape, accept_BK.dtype)
        agreed_B = _agreed(drawn_BK < accept_BK, ended_B)
        last = agreed_B.min()
        # A row that accepts more has its proposal there; the others draw.
        rest_BV = jax.lax.dynamic_index_in_dim(rest_BLV, last, axis=1, keepdims=False)
        drawn_B = jax.random.categorical(rest_key, jnp.log(rest_BV))
        tokens_BL = jnp.pad(tokens_BK, ((0, 0), (0, 1)))
        proposed_B = jax.lax.dynamic_index_in_dim(tokens_BL, last, axis=1, keepdims=False)
        final_B = jnp.where(agreed_B > last, proposed_B, drawn_B)
        return tokens_BL.at[:, last].set(final_B.astype(tokens_BL.dtype)), 1 + last

    @functools.partial(jax.jit, donate_argnames="text")
    def extend(
        parameters: Parameters,
        draft_parameters: Parameters,
        kernels_OI: tuple[Mapping[str, Array], Mapping[str, Array]],
        text: _Text,
        index: Int[Array, ""],
        count: Int[Array, ""],
        most: Int[Array, ""],
        *,
        key: Array | None,
        stop_tokens: Int[Array, "n"],
    ) -> _Text:
        model = evaluating(definition, parameters)
        draft = evaluating(draft_definition, draft_parameters)
        prepare_few_rows(model, kernels_OI[0])
        prepare_few_rows(draft, kernels_OI[1])

        def is_needed(carry: tuple[Int[Array, ""], _Text]) -> Bool[Array, ""]:
            made, text = carry
            fits = text.window.length + draft_tokens <= text.window.slots
            return (made < count) & fits & ~jnp.all(text.window.ended_B)

        def make_round(carry: tuple[Int[Array, ""], _Text]) -> tuple[Int[Array, ""], _Text]:
            made, text = carry
            length = text.window.length
            # All that a round draws comes from the key of its first token.
            round_key = None if key is None else jax.random.fold_in(key, index + made)
            proposed, q_BKV = propose(draft, text, round_key)
            window = dataclasses.replace(text.window, tokens_BS=proposed.tokens_BS)
            logits_BLV = model.logits(window.read(model, length - 1, draft_tokens + 1))
            tokens_BK = jax.lax.dynamic_slice_in_dim(window.tokens_BS, length, draft_tokens, axis=1)
            tokens_BL, taken = choose(logits_BLV, q_BKV, tokens_BK, window.ended_B, round_key)
            end = length + jnp.minimum(taken, most - made)

            def append(window: Window) -> Window:
                token_B1 = jax.lax.dynamic_slice_in_dim(
                    tokens_BL, window.length - length, 1, axis=1
                )
                window.append(token_B1[:, 0], stop_tokens)
                return window

            window = jax.lax.while_loop(
                lambda w: (w.length < end) & ~jnp.all(w.ended_B), append, window
            )
            return made + window.length - length, _Text(window, proposed.cache)

        return jax.lax.while_loop(is_needed, make_round, (jnp.int32(0), text))[1]

    return prefill, extend


def _agreed(accepted_BK: Bool[Array, "B K"], ended_B: Bool[Array, "B"]) -> Int[Array, "B"]:
    """How many proposals of each row are accepted before the first that is not."""
    # A row that has ended repeats its last token, whatever is proposed.
    return jnp.sum(jnp.cumprod(accepted_BK | ended_B[:, None], axis=1), axis=1)


_lengthen = jax.jit(_Text.with_slots, static_argnames="slots")


def _stream(
    prefill: Callable[..., _Text],
    extend: Callable[..., _Text],
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
                text = _lengthen(text, slots=slots)
            most = end - length
            text = extend(text, np.int32(made), np.int32(min(chunk, most)), np.int32(most))
        rows = [row[start:length] for row, start in zip(tokens, padding, strict=True)]
