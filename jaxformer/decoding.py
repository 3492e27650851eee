"""What every way of generating shares: caches, the choice of a token, checks of a request."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention import LayerCache
from jaxformer.checks import check_is_integer
from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.execution import lengths
from jaxformer.execution.batch_halves import BatchPart
from jaxformer.execution.called_attention import without_gradients
from jaxformer.execution.called_products import products_of
from jaxformer.execution.token_window import Window
from jaxformer.few_row_layers import FewRowKernels, library_for_prompt, prepare_few_rows
from jaxformer.logits import check_sampling, draw, filter_logits, most_probable
from jaxformer.parameters import Parameters, merge
from jaxformer.prompts import read_prompt
from jaxformer.transformer_lm import TransformerLM

# Temperature, top_k and top_p.
SamplingSettings = tuple[float, int | None, float | None]


def make_cache(
    config: TransformerLMConfig | EncoderDecoderConfig, batch: int, length: int, dtype: jnp.dtype
) -> list[LayerCache]:
    """Returns empty caches, one a layer, each with room for ``length`` tokens of ``batch`` rows."""
    keys, values = lengths.cache_shapes(config, batch, length)
    return [
        LayerCache(jnp.zeros(keys, dtype), jnp.zeros(values, dtype), jnp.int32(0))
        for _ in range(_causal_layers(config))
    ]


def choose_cache_dtype(cache_dtype: str | None, weights: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of keys and values in the cache, by default that of the weights.

    Raises:
        ValueError: it is none of floats.
    """
    try:
        dtype = jnp.dtype(weights if cache_dtype is None else cache_dtype)
        is_float = jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        is_float = False
    if not is_float:
        raise ValueError(
            f"cache_dtype must be a dtype of floats, such as 'bfloat16': got {cache_dtype!r:.80}"
        )
    return dtype


def _causal_layers(config: TransformerLMConfig | EncoderDecoderConfig) -> int:
    if isinstance(config, EncoderDecoderConfig):
        return config.num_decoder_layers
    return config.num_layers


def choose_tokens(
    logits_BV: Float[Array, "B V"],
    settings: SamplingSettings | None,
    key: Array | None,
    index: Int[Array, ""],
    part: BatchPart | None = None,
) -> Int[Array, "B"]:
    """Returns the ``index``-th token of every row: the most probable one, or one that is drawn.

    Args:
        logits_BV: in nats.
        settings: None takes the most probable one.
        key: tokens are drawn with ``jax.random.fold_in(key, index)``.
        index: how many tokens came before it.
        part: which rows of a batch these are, default all.
    """
    if settings is None or key is None:
        return most_probable(logits_BV)
    temperature, top_k, top_p = settings
    kept_BV = filter_logits(logits_BV, temperature=temperature, top_k=top_k, top_p=top_p)
    return draw(jax.random.fold_in(key, index), kept_BV, part)


def read_request(
    model: TransformerLM,
    prompt_BT: Int[np.ndarray, "B T"],
    num_tokens: int,
    *,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    stop_tokens: Sequence[int],
    mask: Bool[np.ndarray, "B T"] | None,
    chunk: int,
) -> list[np.ndarray]:
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
    vocab_size, _ = model.token_embedding.embedding[...].shape
    rows = read_prompt(prompt_BT, mask, vocab_size)
    for token in stop_tokens:
        check_is_integer("stop_tokens", token)
        if not 0 <= token < vocab_size:
            raise ValueError(f"stop_tokens must be in [0, {vocab_size}): got {token}")
    return rows


def evaluating(definition: nnx.GraphDef[Any], parameters: Parameters) -> TransformerLM:
    """Returns the model of these parameters, in evaluation mode."""
    model: TransformerLM = merge(definition, parameters)
    model.eval()
    return model


@functools.lru_cache(maxsize=16)
def generating_programs(
    definition: nnx.GraphDef[Any],
    settings: SamplingSettings | None,
    cache_dtype: jnp.dtype,
) -> tuple[Callable[..., Window], Callable[..., Window]]:
    """The two compiled programs: one reads a prompt, the other extends a window.

    Both add tokens to the window that they are given, of which the first is the ``index``-th of
    the text: one token, or ``count``, or fewer where all rows have ended.
    """

    @functools.partial(jax.jit, static_argnames="slots_read")
    def prefill(
        parameters: Parameters,
        kernels: FewRowKernels,
        window: Window,
        index: Int[Array, ""],
        *,
        slots_read: int,
        key: Array | None,
        stop_tokens: Int[Array, "n"],
        part: BatchPart | None = None,
    ) -> Window:
        model = evaluating(definition, parameters)
        prepare_few_rows(model, kernels)
        batch = window.tokens_BS.shape[0]
        window.cache = make_cache(model.config, batch, slots_read, cache_dtype)
        # What the slots past the prompt leave in the cache is hidden by the causal mask until it
        # is overwritten.
        with products_of(library_for_prompt(kernels)), without_gradients():
            hidden = window.read(model, 0, slots_read)
        window.cache = lengths.lengthen(window.cache, window.slots - slots_read)
        last = jax.lax.dynamic_slice_in_dim(hidden, window.length - 1, 1, axis=1)
        chosen_B = choose_tokens(model.logits(last)[:, 0], settings, key, index, part)
        window.append(chosen_B, stop_tokens)
        return window

    @functools.partial(jax.jit, donate_argnames="window")
    def extend(
        parameters: Parameters,
        kernels: FewRowKernels,
        window: Window,
        index: Int[Array, ""],
        count: Int[Array, ""],
        *,
        key: Array | None,
        stop_tokens: Int[Array, "n"],
        part: BatchPart | None = None,
    ) -> Window:
        model = evaluating(definition, parameters)
        prepare_few_rows(model, kernels)

        def is_needed(carry: tuple[Int[Array, ""], Window]) -> Bool[Array, ""]:
            made, window = carry
            return (made < count) & ~jnp.all(window.ended_B)

        def step(carry: tuple[Int[Array, ""], Window]) -> tuple[Int[Array, ""], Window]:
            made, window = carry
            logits = model.logits(window.read(model, window.length - 1, 1))
            chosen_B = choose_tokens(logits[:, 0], settings, key, index + made, part)
            window.append(chosen_B, stop_tokens)
            return made + 1, window

        return jax.lax.while_loop(is_needed, step, (jnp.int32(0), window))[1]

    return prefill, extend
