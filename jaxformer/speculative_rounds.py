"""A round of generation with a draft: the draft proposes, the model reads, and some are accepted.

Leviathan et al., "Fast inference from transformers via speculative decoding", arXiv 2211.17192,
section 2.3.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxformer.decoding import SamplingSettings, choose_tokens, evaluating, make_cache
from jaxformer.execution import lengths
from jaxformer.execution.drafted_window import DraftedWindow
from jaxformer.execution.token_window import Window
from jaxformer.few_row_layers import FewRowKernels, prepare_few_rows
from jaxformer.logits import draw, filter_logits, most_probable
from jaxformer.parameters import Parameters
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


@functools.lru_cache(maxsize=16)
def round_programs(
    definition: nnx.GraphDef[Any],
    draft_definition: nnx.GraphDef[Any],
    settings: SamplingSettings | None,
    dtypes: tuple[jnp.dtype, jnp.dtype],
    draft_tokens: int,
) -> tuple[Callable[..., DraftedWindow], Callable[..., DraftedWindow]]:
    """The two compiled programs, as in ``decoding``: one reads a prompt, one makes rounds."""

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
    ) -> DraftedWindow:
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
        return DraftedWindow(window, draft_cache)

    @functools.partial(jax.jit, donate_argnames="text")
    def extend(
        parameters: Parameters,
        draft_parameters: Parameters,
        kernels: tuple[FewRowKernels, FewRowKernels],
        text: DraftedWindow,
        index: Int[Array, ""],
        count: Int[Array, ""],
        most: Int[Array, ""],
        *,
        key: Array | None,
        stop_tokens: Int[Array, "n"],
    ) -> DraftedWindow:
        model = evaluating(definition, parameters)
        draft = evaluating(draft_definition, draft_parameters)
        prepare_few_rows(model, kernels[0])
        prepare_few_rows(draft, kernels[1])

        def is_needed(carry: tuple[Int[Array, ""], DraftedWindow]) -> Bool[Array, ""]:
            made, text = carry
            fits = text.window.length + draft_tokens <= text.window.slots
            return (made < count) & fits & ~jnp.all(text.window.ended_B)

        def make_round(
            carry: tuple[Int[Array, ""], DraftedWindow],
        ) -> tuple[Int[Array, ""], DraftedWindow]:
            made, text = carry
            length = text.window.length
            # All that a round draws comes from the key of its first token.
            round_key = None if key is None else jax.random.fold_in(key, index + made)
            proposed, q_BKV = _propose(draft, text, draft_tokens, settings, round_key)
            window = dataclasses.replace(text.window, tokens_BS=proposed.tokens_BS)
            logits_BLV = model.logits(window.read(model, length - 1, draft_tokens + 1))
            tokens_BK = jax.lax.dynamic_slice_in_dim(window.tokens_BS, length, draft_tokens, axis=1)
            tokens_BL, taken = _choose(
                logits_BLV, q_BKV, tokens_BK, window.ended_B, settings, round_key
            )
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
            return made + window.length - length, DraftedWindow(window, proposed.cache)

        return jax.lax.while_loop(is_needed, make_round, (jnp.int32(0), text))[1]

    return prefill, extend


def _propose(
    draft: TransformerLM,
    text: DraftedWindow,
    count: int,
    settings: SamplingSettings | None,
    key: Array | None,
) -> tuple[Window, Float[Array, "B K V"] | None]:
    """The window with the draft's tokens in the slots after its last, and their q."""
    window = dataclasses.replace(text.window, cache=text.draft_cache)
    length = text.window.length

    def write(i: Array | int, window: Window, logits_BV: Array) -> Array:
        token_B = choose_tokens(logits_BV, settings, key, jnp.int32(i))[:, None]
        window.tokens_BS = jax.lax.dynamic_update_slice_in_dim(
            window.tokens_BS, token_B.astype(jnp.int32), length + i, axis=1
        )
        return logits_BV if settings is None else _probabilities(logits_BV, settings)

    # Of a round whose proposals were all accepted the draft has not read the last.
    q_BV = write(0, window, draft.logits(window.read(draft, length - 2, 2))[:, -1])
    if count == 1:
        return window, None if settings is None else q_BV[:, None]

    def step(i: Array, carry: tuple[Window, Array]) -> tuple[Window, Array]:
        window, q_KBV = carry
        q_BV = write(i, window, draft.logits(window.read(draft, length + i - 1, 1))[:, 0])
        return window, q_KBV if settings is None else q_KBV.at[i].set(q_BV)

    q_KBV = jnp.zeros((0 if settings is None else count, *q_BV.shape), q_BV.dtype)
    q_KBV = q_KBV if settings is None else q_KBV.at[0].set(q_BV)
    window, q_KBV = jax.lax.fori_loop(1, count, step, (window, q_KBV))
    return window, None if settings is None else q_KBV.swapaxes(0, 1)


def _choose(
    logits_BLV: Float[Array, "B L V"],
    q_BKV: Float[Array, "B K V"] | None,
    tokens_BK: Int[Array, "B K"],
    ended_B: Bool[Array, "B"],
    settings: SamplingSettings | None,
    key: Array | None,
) -> tuple[Int[Array, "B L"], Int[Array, ""]]:
    """The next tokens of each row, and how many of them all rows take."""
    if settings is None or q_BKV is None or key is None:
        best_BL = most_probable(logits_BLV)
        return best_BL, 1 + _agreed(best_BL[:, :-1] == tokens_BK, ended_B).min()
    accept_BK, rest_BLV = accept_proposals(_probabilities(logits_BLV, settings), q_BKV, tokens_BK)
    accept_key, rest_key = jax.random.split(jax.random.fold_in(key, tokens_BK.shape[1]))
    drawn_BK = jax.random.uniform(accept_key, accept_BK.shape, accept_BK.dtype)
    agreed_B = _agreed(drawn_BK < accept_BK, ended_B)
    last = agreed_B.min()
    # A row that accepts more has its proposal there; the others draw.
    rest_BV = jax.lax.dynamic_index_in_dim(rest_BLV, last, axis=1, keepdims=False)
    drawn_B = draw(rest_key, jnp.log(rest_BV))
    tokens_BL = jnp.pad(tokens_BK, ((0, 0), (0, 1)))
    proposed_B = jax.lax.dynamic_index_in_dim(tokens_BL, last, axis=1, keepdims=False)
    final_B = jnp.where(agreed_B > last, proposed_B, drawn_B)
    return tokens_BL.at[:, last].set(final_B.astype(tokens_BL.dtype)), 1 + last


def _probabilities(
    logits: Float[Array, "*B V"], settings: SamplingSettings
) -> Float[Array, "*B V"]:
    temperature, top_k, top_p = settings
    kept = filter_logits(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    return jax.nn.softmax(kept, axis=-1)


def _agreed(accepted_BK: Bool[Array, "B K"], ended_B: Bool[Array, "B"]) -> Int[Array, "B"]:
    """How many proposals of each row are accepted before the first that is not."""
    # A row that has ended repeats its last token, whatever is proposed.
    return jnp.sum(jnp.cumprod(accepted_BK | ended_B[:, None], axis=1), axis=1)
