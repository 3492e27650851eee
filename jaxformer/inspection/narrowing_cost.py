"""What narrow weights cost on a text: logits, choices, perplexity and the greedy text."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxformer.errors import UsageError
from jaxformer.generation import generate
from jaxformer.inspection.inspected_model import check_ids
from jaxformer.layers import widen
from jaxformer.parameters import Parameters, get_parameters, merge, split
from jaxformer.transformer_lm import TransformerLM


@dataclasses.dataclass(frozen=True)
class NarrowingCost:
    """How a model with narrow weights differs from its own on a text.

    Attributes:
        own_bytes: of all parameters of the model.
        narrow_bytes: of those with narrow weights.
        places: how many tokens of the text were predicted from those before.
        largest_difference: of two logits, in nats.
        other_choices: at how many places another token is the most probable.
        own_perplexity: e to the mean loss of the model.
        narrow_perplexity: that with narrow weights.
        greedy_tokens: how many tokens both wrote after the text's beginning.
        same_tokens: how many of them are equal before the first that is not.
    """

    own_bytes: int
    narrow_bytes: int
    places: int
    largest_difference: float
    other_choices: int
    own_perplexity: float
    narrow_perplexity: float
    greedy_tokens: int
    same_tokens: int

    def __str__(self) -> str:
        """Returns the verdict: the same choices or others, and the figures behind it."""
        is_written = self.same_tokens == self.greedy_tokens
        verdict = "the same" if is_written and self.other_choices == 0 else "other"
        written = (
            f"{self.greedy_tokens:,} greedy tokens are the same"
            if is_written
            else f"the greedy text is another after {self.same_tokens:,} tokens"
        )
        change = self.narrow_perplexity / self.own_perplexity - 1
        return (
            f"{verdict} choices on this text: the most probable token is another at "
            f"{self.other_choices:,} of {self.places:,} places, and {written}; perplexity "
            f"{self.own_perplexity:.5g} becomes {self.narrow_perplexity:.5g} ({change:+.2%}); "
            f"logits differ by at most {self.largest_difference:.2g} nats; parameters take "
            f"{self.narrow_bytes / 2**20:.1f} MiB in place of {self.own_bytes / 2**20:.1f}"
        )


def narrowing_cost(
    model: TransformerLM,
    narrow: TransformerLM,
    tokens_T: Int[np.ndarray, "T"],
    *,
    num_tokens: int = 100,
) -> NarrowingCost:
    """Compares a model with what ``narrow_weights`` made of it, on a text.

    The text is read in windows of the context, each of whose tokens is predicted from those before
    it in the window. Then both write greedily after the text's first half, at most half a context.

    Args:
        model: causal, with a head.
        narrow: the same model with narrow weights.
        tokens_T: ids of the text, two at least.
        num_tokens: how many both write.

    Raises:
        UsageError: the text is no ids (T,), has fewer than two, or one outside the vocabulary.
    """
    if tokens_T.ndim != 1 or (tokens_T.size and tokens_T.dtype.kind not in "iu"):
        raise UsageError(
            "the text to compare on must be a text or integer ids (T,): got "
            f"{tokens_T.dtype} with shape {tokens_T.shape}"
        )
    if len(tokens_T) < 2:
        raise UsageError(f"the text to compare on needs two tokens: got {len(tokens_T)}")
    check_ids("text", tokens_T, model.config.vocab_size)
    length = min(model.config.context_length, len(tokens_T) - 1)
    starts = range(0, len(tokens_T) - 1, length)
    sides = [split(side) for side in (model, narrow)]
    found = []
    for start in starts:
        # The last window is filled up: one program does for all.
        window_T = np.zeros(length + 1, np.int32)
        text_T = tokens_T[start : start + length + 1]
        window_T[: len(text_T)] = text_T
        logits = [_logits(definition, parameters, window_T) for definition, parameters in sides]
        found.append(_compare(*logits, window_T[1:], np.arange(length) < len(text_T) - 1))
    places = len(tokens_T) - 1
    differences, others, losses, narrow_losses = np.array(found, np.float64).T
    prompt = tokens_T[None, : max(1, min(len(tokens_T), length) // 2)]
    written = [generate(side, prompt, num_tokens, greedy=True)[0] for side in (model, narrow)]
    is_other = written[0] != written[1]
    return NarrowingCost(
        own_bytes=_bytes(model),
        narrow_bytes=_bytes(narrow),
        places=places,
        largest_difference=float(differences.max()),
        other_choices=int(others.sum()),
        own_perplexity=math.exp(losses.sum() / places),
        narrow_perplexity=math.exp(narrow_losses.sum() / places),
        greedy_tokens=num_tokens,
        same_tokens=int(is_other.argmax()) if is_other.any() else num_tokens,
    )


def _bytes(module: nnx.Module) -> int:
    return sum(array.nbytes for array in get_parameters(module).values())


@functools.partial(jax.jit, static_argnums=0)
def _logits(
    definition: nnx.GraphDef[Any], parameters: Parameters, window_T: Int[Array, "T+1"]
) -> Float[Array, "T V"]:
    model = merge(definition, parameters)
    model.eval()
    logits: Array = model(window_T[None, :-1])[0]
    return widen(logits)


@jax.jit
def _compare(
    own_TV: Float[Array, "T V"],
    narrow_TV: Float[Array, "T V"],
    target_T: Int[Array, "T"],
    is_text_T: Array,
) -> tuple[Array, Array, Array, Array]:
    """Returns the largest difference, the number of other choices, and the sums of both losses."""
    differences_T = jnp.max(jnp.abs(own_TV - narrow_TV), axis=1)
    is_other_T = jnp.argmax(own_TV, axis=1) != jnp.argmax(narrow_TV, axis=1)

    def loss(logits_TV: Array) -> Array:
        chosen_T = jnp.take_along_axis(jax.nn.log_softmax(logits_TV), target_T[:, None], axis=1)
        return -jnp.sum(chosen_T[:, 0] * is_text_T)

    return (
        jnp.max(differences_T * is_text_T),
        jnp.sum(is_other_T & is_text_T),
        loss(own_TV),
        loss(narrow_TV),
    )
