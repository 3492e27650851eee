"""What every way of generating shares: caches, the choice of a token, checks of a request."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from torch_ref.attention import LayerCache
from torch_ref.checks import check_is_integer
from torch_ref.config import EncoderDecoderConfig, TransformerLMConfig
from torch_ref.logits import check_sampling, filter_logits
from torch_ref.prompts import read_prompt
from torch_ref.transformer_lm import TransformerLM

# Temperature, top_k and top_p.
SamplingSettings = tuple[float, int | None, float | None]


def make_cache(
    config: TransformerLMConfig | EncoderDecoderConfig,
    batch: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> list[LayerCache]:
    """Returns empty caches, one a layer, each with room for ``length`` tokens of ``batch`` rows."""
    heads, *widths = config.cache_widths
    keys, values = ((batch, length, heads, width) for width in widths)
    return [
        LayerCache(
            torch.zeros(keys, dtype=dtype, device=device),
            torch.zeros(values, dtype=dtype, device=device),
            0,
        )
        for _ in range(_causal_layers(config))
    ]


def choose_cache_dtype(cache_dtype: torch.dtype | None, weights: torch.dtype) -> torch.dtype:
    """Returns the dtype of keys and values in the cache, by default that of the weights.

    Raises:
        ValueError: it is none of floats.
    """
    dtype = weights if cache_dtype is None else cache_dtype
    if not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(
            f"cache_dtype must be a dtype of floats, such as torch.bfloat16: got {dtype!r:.80}"
        )
    return dtype


def _causal_layers(config: TransformerLMConfig | EncoderDecoderConfig) -> int:
    if isinstance(config, EncoderDecoderConfig):
        return config.num_decoder_layers
    return config.num_layers


def choose_tokens(
    logits_BV: torch.Tensor, settings: SamplingSettings | None, generator: torch.Generator | None
) -> torch.Tensor:
    """Returns the next token of every row (B,): the most probable one, or one that is drawn.

    Args:
        logits_BV: in nats.
        settings: None takes the most probable one.
        generator: what is drawn from; None is torch's global one.
    """
    if settings is None:
        return logits_BV.argmax(dim=-1)
    temperature, top_k, top_p = settings
    kept_BV = filter_logits(logits_BV, temperature=temperature, top_k=top_k, top_p=top_p)
    return torch.multinomial(kept_BV.softmax(dim=-1), 1, generator=generator)[:, 0]


def read_request(
    model: TransformerLM,
    prompt_BT: torch.Tensor,
    num_tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stop_tokens: Sequence[int],
    mask: torch.Tensor | None,
    chunk: int,
) -> list[torch.Tensor]:
    """Returns the rows of a prompt without their padding; arguments as of ``generation.stream``.

    Raises:
        ValueError: see ``generation.stream``.
    """
    check_sampling(temperature, top_k, top_p)
    check_is_integer("num_tokens", num_tokens)
    if num_tokens < 0:
        raise ValueError(f"num_tokens must not be negative: got {num_tokens}")
    check_is_integer("chunk", chunk)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1: got {chunk}")
    if not model.config.causal:
        raise ValueError("only a causal model can generate: got causal=False")
    if model.config.head.head == "none":
        raise ValueError("only a model with a head can generate: got head='none'")
    vocab_size = model.token_embedding.num_embeddings
    rows = read_prompt(prompt_BT, mask, vocab_size)
    for token in stop_tokens:
        check_is_integer("stop_tokens", token)
        if not 0 <= token < vocab_size:
            raise ValueError(f"stop_tokens must be in [0, {vocab_size}): got {token}")
    return rows


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts the modules in evaluation mode within the context."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
