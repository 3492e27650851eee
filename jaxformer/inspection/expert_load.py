"""Which experts compute a text, and how evenly they are used."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxformer.errors import UsageError
from jaxformer.inspection.inspected_model import InspectedModel, Numbers, Unknown, text_and_ids


def experts(run: InspectedModel, *, text: str | None = None, unknown: Unknown = "error") -> Numbers:
    """Returns what the routers of a model choose for a text, layer by layer.

    ``load`` (L, E) is the share of tokens that each expert computes; a row adds up to the C experts
    of a token, and is C / E everywhere where all are used alike. ``probability`` (L, E) is the mean
    probability of each. ``choices`` (L, T, C) are each token's experts, the one with the largest
    weight first, and ``weights`` what their outputs are multiplied by. ``balance`` (L) is
    E · Σ load · probability (arXiv 2101.03961, eq. 4), C where all are used alike.

    Args:
        run: the model.
        text: what it reads; None lets it write one.
        unknown: see ``CharTokenizer.encode``.

    Raises:
        UsageError: the model has no experts, or the text is too long.
        TextError: the text has a character that the model does not know.
    """
    config = run.config
    layers = [layer for layer in range(config.num_layers) if config.has_experts(layer)]
    if not layers:
        raise UsageError("this inspection is of experts: this model has none")
    text, ids = text_and_ids(run, text, unknown)
    call = nnx.jit(lambda model, tokens: model.hidden(tokens, return_routing=True)[1])
    routings = call(run.model, jnp.asarray(ids)[None])
    choices = np.stack([np.asarray(each.experts) for each in routings])
    count = routings[0].probabilities.shape[-1]
    used = [np.bincount(chosen.reshape(-1), minlength=count) for chosen in choices]
    load_LE = np.stack(used) / len(ids)
    probability_LE = np.stack([np.asarray(each.probabilities).mean(0) for each in routings])
    return {
        "text": text,
        "tokens": [run.tokenizer.decode([i]) for i in ids],
        "layers": layers,
        "load": load_LE,
        "probability": probability_LE,
        "choices": choices,
        "weights": np.stack([np.asarray(each.weights) for each in routings]),
        "balance": count * (load_LE * probability_LE).sum(axis=1),
    }
