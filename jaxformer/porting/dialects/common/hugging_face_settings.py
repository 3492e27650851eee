"""Rows of the tables of settings that several of Hugging Face's families share."""

import math

from jaxformer.errors import UsageError
from jaxformer.porting.mapping.settings import (
    Choices,
    Conversion,
    Mapped,
    Required,
    Values,
)

# gelu_fast is gelu_new with sqrt(2/π) cut to ten digits, which rounds to the same float32.
ACTIVATIONS = Choices(
    {
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
        "relu2": "relu_squared",
        "silu": "silu",
        "swish": "silu",
    }
)
# Of families that write the tanh approximation by its name in PyTorch.
ACTIVATIONS_OF_TORCH = Choices({"gelu_pytorch_tanh": "gelu_tanh", **ACTIVATIONS.table})
GATED_ACTIVATIONS = Choices(
    {
        "silu": "swiglu",
        "swish": "swiglu",
        "gelu": "geglu",
        "gelu_pytorch_tanh": "geglu_tanh",
        "gelu_new": "geglu_tanh",
        "gelu_fast": "geglu_tanh",
    }
)


def even_head_width(values: Values) -> int:
    """Returns the width of a head in the families that have no setting for it.

    Raises:
        UsageError: the heads do not share the model's width evenly. transformers rejects that in
            some families even where the heads have a width of their own.
    """
    d_model, num_heads = values["d_model"], values["num_heads"]
    if d_model % num_heads:
        raise UsageError(
            f"hidden_size must be divisible by num_attention_heads: got {d_model} and {num_heads}"
        )
    return int(d_model // num_heads)


SIZES = (
    Mapped("hidden_size", "d_model"),
    Mapped("num_attention_heads", "num_heads"),
    Required("head_dim", even_head_width),
    Mapped("num_hidden_layers", "num_layers"),
    Mapped("max_position_embeddings", "context_length"),
)
FEED_FORWARD_WIDTH = Mapped("intermediate_size", "d_ff", written_from="feed_forward_width")
KEY_VALUE_HEADS = Mapped(
    "num_key_value_heads",
    "num_kv_heads",
    lambda source_model, values: values["num_heads"],
    written_from="key_value_heads",
)


def narrow_embedding(name: str) -> Mapped:
    """Returns the row of the width of token embeddings, which may be that of the model."""
    return Mapped(
        name,
        "embedding_width",
        lambda source_model, values: values["d_model"],
        Conversion(
            lambda width, values: None if width == values["d_model"] else width,
            lambda width, config: config.embedding_width,
        ),
    )


def scaled_embedding(is_usual: bool) -> Mapped:
    """Returns the row of whether token embeddings are multiplied by sqrt(D), and by default so."""
    return Mapped(
        "scale_embedding",
        "embedding_scale",
        is_usual,
        Conversion(
            lambda is_scaled, values: math.sqrt(values["d_model"]) if is_scaled else None,
            lambda scale, config: scale is not None,
        ),
    )


ATTENTION_DROPOUT = Mapped("attention_dropout", "attention_dropout", 0.0)


def _reciprocal(number: float) -> float:
    """Returns 1 / number; of a reciprocal, the short number that it was made of."""
    short = round(1 / number, 9)
    return short if short and 1 / short == number else 1 / number


# Factors that a config.json has as a number, where none here is None: 1 there.
FACTOR = Conversion(
    lambda number, values: None if number == 1 else float(number),
    lambda factor, config: 1.0 if factor is None else factor,
)
# What is divided by.
DIVISOR = Conversion(
    lambda number, values: None if number == 1 else 1 / number,
    lambda factor, config: 1.0 if factor is None else _reciprocal(factor),
)
# Of attention scores, where none here is 1 / sqrt(H).
SCORE_FACTOR = Conversion(
    lambda number, values: float(number),
    lambda factor, config: 1 / math.sqrt(config.head_width) if factor is None else factor,
)
