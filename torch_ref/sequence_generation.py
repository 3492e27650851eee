"""Generates the target of a source sequence with an encoder and decoder, token by token.

The source is read once. With a cache the decoder keeps the keys and values of its own tokens and
those that it makes of the encoder's output; without one it reads the whole target anew for every
token: the results are equal.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from torch_ref.decoding import choose_cache_dtype, choose_tokens, evaluating, make_cache
from torch_ref.encoder_decoder import EncoderDecoder
from torch_ref.logits import check_sampling
from torch_ref.prompts import check_target_tokens, read_features, read_source, read_start
from torch_ref.speech_transformer import SpeechTransformer


def generate_target(
    model: EncoderDecoder,
    source_BS: torch.Tensor,
    num_tokens: int,
    *,
    start_BT: torch.Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    generator: torch.Generator | None = None,
    stop_tokens: Sequence[int] = (),
    last_token: int | None = None,
    suppress_tokens: Sequence[int] = (),
    begin_suppress_tokens: Sequence[int] = (),
    use_cache: bool = True,
    cache_dtype: torch.dtype | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the next ``num_tokens`` tokens of every row's target, int64 (B, n).

    They are fewer only where every row has made a stop token. The model computes in evaluation
    mode, without gradients, and is left as it was.

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
        generator: what sampling draws from, once a token, on the model's device; default torch's
            global one.
        stop_tokens: a row ends with the first of these ids that it makes, which it repeats as long
            as other rows have not ended; when all rows have ended, nothing more is made.
        last_token: what the last of ``num_tokens`` tokens always is (BART); default none.
        suppress_tokens: ids that are never made (Whisper's that stand for no speech).
        begin_suppress_tokens: ids that are not made as the first token.
        use_cache: False reads the whole target for every token: slower, the same result.
        cache_dtype: of the keys and values in the caches, default the weights'.
        mask: boolean (B, S), True where the source holds a token, False on padding, which is not
            attended to. Positions count padding too. Default: no padding.

    Raises:
        ValueError: the model is not causal or has no head; source or start are no ids, or not
            within ``context_length``; a row of the mask is all padding; or a setting is out of its
            range.
    """
    check_sampling(temperature, top_k, top_p)
    config = model.config
    if not config.causal:
        raise ValueError("only a causal decoder can generate: got causal=False")
    if config.head.head == "none":
        raise ValueError("only a model with a head can generate: got head='none'")
    weight = model.target_embedding.weight
    if isinstance(model, SpeechTransformer):
        part = model.config.features
        source, is_token = read_features(
            source_BS, mask, part.num_features, model.config.num_frames
        )
        source = source.to(weight.dtype)
    else:
        source, is_token = read_source(
            source_BS, mask, config.source_vocab_size, config.context_length
        )
    tokens = read_start(
        start_BT, len(source), num_tokens, config.target_vocab_size, config.context_length
    )
    check_target_tokens(
        config.target_vocab_size,
        stop_tokens=stop_tokens,
        last_token=() if last_token is None else (last_token,),
        suppress_tokens=suppress_tokens,
        begin_suppress_tokens=begin_suppress_tokens,
    )
    dtype = choose_cache_dtype(cache_dtype, weight.dtype)
    settings = None if greedy else (temperature, top_k, top_p)
    stop = torch.tensor(stop_tokens, dtype=torch.long, device=weight.device)
    source, is_token = source.to(weight.device), is_token.to(weight.device)
    tokens, begun = tokens.to(weight.device), tokens.shape[1]
    end = begun + num_tokens
    ended_B = torch.zeros(len(tokens), dtype=torch.bool, device=weight.device)
    mask_BS = is_token[:, None, None, :]
    with torch.no_grad(), evaluating(model):
        memory: Any = model.encode(source, mask_BS)
        cache, memory_cache = None, None
        if use_cache:
            cache = make_cache(config, len(tokens), end - 1, dtype, weight.device)
            memory_cache = [
                dataclasses.replace(c, k_BSKH=c.k_BSKH.to(dtype), v_BSKH=c.v_BSKH.to(dtype))
                for c in model.decoder.remember(memory)
            ]
            memory = None
        while tokens.shape[1] < end and not ended_B.all():
            seen = 0 if cache is None else cache[0].length
            hidden = model.decode(
                tokens[:, seen:],
                memory,
                memory_mask=mask_BS,
                cache=cache,
                memory_cache=memory_cache,
            )
            logits_BV = model.logits(hidden[:, -1:])[:, 0]
            is_first = tokens.shape[1] == begun
            for suppressed in (suppress_tokens, begin_suppress_tokens if is_first else ()):
                logits_BV[:, list(suppressed)] = -torch.inf
            token_B = choose_tokens(logits_BV, settings, generator)
            if last_token is not None and tokens.shape[1] == end - 1:
                token_B = torch.full_like(token_B, last_token)
            token_B = torch.where(ended_B, tokens[:, -1], token_B)
            tokens = torch.cat((tokens, token_B[:, None]), dim=1)
            ended_B = ended_B | torch.isin(token_B, stop)
    return tokens[:, begun:]
