"""Rows of the tables of settings that several of Hugging Face's families share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.errors import UsageError
from jaxformer.porting.mapping.settings import (
    FLOAT,
    INTEGER,
    Choices,
    Mapped,
    Required,
    Row,
    Values,
    read_settings,
    unsupported,
    write_settings,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert, check_all_read


def usual_sizes(
    vocab_size: int, width: int, feed_forward: int, layers: int, heads: int, context: int, act: str
) -> dict[str, Any]:
    """Returns what transformers takes the settings to be that a config.json does not have."""
    return {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": feed_forward,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": context,
        "hidden_act": act,
    }


# gelu_fast is gelu_new with sqrt(2/π) cut to ten digits, which rounds to the same float32.
ACTIVATIONS = Choices(
    {
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "relu": "relu",
        "silu": "silu",
        "swish": "silu",
    }
)
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
ATTENTION_DROPOUT = Mapped("attention_dropout", "attention_dropout", 0.0)


def _is_scaled(values: Values) -> bool:
    return bool(values["rotary_scaling"] != "none")


def _is_llama3(values: Values) -> bool:
    return bool(values["rotary_scaling"] == "llama3")


ROTARY_KINDS = Choices({"default": "none", "linear": "linear", "llama3": "llama3"})
ROPE_PARAMETERS = (
    Mapped(("rope_type", "type"), "rotary_scaling", "default", ROTARY_KINDS),
    Mapped("rope_theta", "rotary_base", translation=FLOAT),
    Mapped("partial_rotary_factor", "rotary_fraction", translation=FLOAT, omit=1.0),
    Mapped("factor", "rotary_scaling_factor", translation=FLOAT, applies=_is_scaled),
    Mapped("low_freq_factor", "rotary_low_frequency_factor", translation=FLOAT, applies=_is_llama3),
    Mapped(
        "high_freq_factor", "rotary_high_frequency_factor", translation=FLOAT, applies=_is_llama3
    ),
    Mapped(
        "original_max_position_embeddings",
        "rotary_original_context_length",
        lambda source_model, values: values["context_length"],
        INTEGER,
        applies=_is_llama3,
    ),
    # Of other kinds of scaling than the three that are known.
    Inert(
        (
            "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
            "short_factor", "long_factor", "finetuned",
        )
    ),
)  # fmt: skip


@dataclass(frozen=True)
class RotaryPositions(Row):
    """Rotary positions, in the forms of transformers before and since version 5.

    ``rope_parameters`` holds all; before, ``rope_theta`` and the share stood beside a
    ``rope_scaling``. Both forms are read and written.

    Attributes:
        fraction: the share of a head that is turned where the config.json does not say; None where
            a whole head always is.
        base_name: the older name of ``rope_theta``, beside ``rope_scaling``.
        fraction_name: that of ``partial_rotary_factor``.
    """

    fraction: float | None = None
    base_name: str = "rope_theta"
    fraction_name: str = "partial_rotary_factor"

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the fields of rotary positions."""
        # As in transformers, the older form goes first.
        forms = ("rope_scaling", "rope_parameters")
        found = [source_model.setting(name, default={}) for name in forms]
        given: Any = found[0] or found[1]
        if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
            raise unsupported("rope_parameters", "be one for all layers", given)
        outside = {
            "rope_theta": source_model.setting(self.base_name, default=1e4),
            "partial_rotary_factor": source_model.setting(
                self.fraction_name, default=self.fraction or 1.0
            ),
        }
        inside = {name: value for name, value in given.items() if value is not None}
        parameters = SourceModel(
            {}, kind="rope_parameters", config=outside | inside, ignore=source_model.ignore
        )
        fraction = parameters.config["partial_rotary_factor"]
        if self.fraction is None and fraction != 1.0:
            raise unsupported("partial_rotary_factor", "be 1", fraction)
        fields = read_settings(ROPE_PARAMETERS, parameters, values)
        check_all_read(parameters, {}, "rope_parameters")
        return {**fields, "positions": "rotary"}

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives both forms."""
        parameters = write_settings(ROPE_PARAMETERS, config)
        scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
        return {
            "rope_parameters": parameters,
            "rope_theta": config.position.rotary.rotary_base,
            "rope_scaling": scaling if _is_scaled(config.settings()) else None,
        }


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
