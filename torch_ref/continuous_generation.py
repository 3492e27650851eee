"""Generates the texts of many requests: what sharing a cache must not change.

The twin of jaxformer's, which lets requests share the rows of one cache. A text there is the one
that its prompt gets alone; here each is written so, one after the other.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from torch_ref.generation import generate
from torch_ref.transformer_lm import TransformerLM


class Request(NamedTuple):
    """A text that is wanted.

    Attributes:
        prompt: ids (T,) in [0, V), at least one.
        num_tokens: the most to make, in tokens.
        generator: what is drawn from; None is torch's global one.
    """

    prompt: torch.Tensor
    num_tokens: int
    generator: torch.Generator | None = None


def generate_requests(
    model: TransformerLM,
    requests: Sequence[Request],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    greedy: bool = False,
    stop_tokens: Sequence[int] = (),
    cache_dtype: torch.dtype | None = None,
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields the number of a request and its new tokens, int64 (n,), in the order of requests.

    Arguments and errors as in ``generation.generate``.
    """
    for number, request in enumerate(requests):
        text = generate(
            model,
            request.prompt[None],
            request.num_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            greedy=greedy,
            generator=request.generator,
            stop_tokens=stop_tokens,
            cache_dtype=cache_dtype,
        )
        yield number, text[0]
