"""Rows of the tables of settings that several of Hugging Face's families share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.errors import UsageError
from jaxformer.porting.mapping.settings import (
    Choices,
    Conversion,
    Mapped,
    Required,
    Row,
    Values,
    unsupported,
)
from jaxformer.porting.mapping.source_model import SourceModel

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


ATTENTION_DROPOUT = Mapped("attention_dropout", "attention_dropout", 0.0)


@dataclass(frozen=True)
class SlidingWindow(Row):
    """A sliding window in some layers.

    Attributes:
        default_types: the ``layer_types`` of a source model with so many layers that has none.
        has_switch: whether the window is there only where ``use_sliding_window`` says so.
    """

    default_types: Callable[[SourceModel, int], list[str]]
    has_switch: bool = False

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the window and the layers without it, or nothing."""
        # null says that there is none.
        window = source_model.nullable("sliding_window", 4096)
        if self.has_switch and not source_model.setting("use_sliding_window", default=False):
            window = None
        types = source_model.setting("layer_types", default=None)
        if types is not None and set(types) - {"full_attention", "sliding_attention"}:
            raise unsupported("layer_types", "be full_attention or sliding_attention", types)
        if types is not None and len(types) != values["num_layers"]:
            raise unsupported("layer_types", f"be {values['num_layers']}", types)
        if window is None:
            return {}
        if types is None:
            types = self.default_types(source_model, values["num_layers"])
        full = tuple(n for n, kind in enumerate(types) if kind == "full_attention")
        return {"sliding_window": window, "full_attention_layers": full}

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives the window and the type of every layer."""
        window = config.attention.sliding_window
        switch = {"use_sliding_window": window is not None} if self.has_switch else {}
        types = [
            "full_attention"
            if window is None or layer in config.layers.full_attention_layers
            else "sliding_attention"
            for layer in range(config.num_layers)
        ]
        return {**switch, "sliding_window": window, "layer_types": types}
