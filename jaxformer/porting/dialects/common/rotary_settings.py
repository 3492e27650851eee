"""The rows of rotary positions, in the forms of transformers before and since version 5.

``rope_parameters`` holds all of them; before, ``rope_theta`` and the share of a head that is turned
stood beside a ``rope_scaling``. Both forms are read and written.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    FLOAT,
    INTEGER,
    Choices,
    Conversion,
    Mapped,
    Row,
    Values,
    read_settings,
    unsupported,
    write_settings,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert, check_all_read
from jaxformer.position_builders import make_rotary_scaling
from jaxformer.position_tables import yarn_attention_factor

TRAINED_LENGTH = "original_max_position_embeddings"
LAYER_TYPES = ("full_attention", "sliding_attention")
KINDS = Choices(
    {
        name: "none" if name == "default" else name
        for name in ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional")
    }
)
FACTORS = Conversion(
    lambda factors, values: tuple(FLOAT.read(factor, values) for factor in factors),
    lambda factors, config: list(factors),
)


def _is(*kinds: str) -> Callable[[Values], bool]:
    return lambda values: values["rotary_scaling"] in kinds


def _default_factor(parameters: SourceModel, values: Values) -> float:
    """Returns what transformers stretches by where only the two lengths are given."""
    if values["rotary_scaling"] in ("yarn", "longrope"):
        return float(values["context_length"] / values["rotary_original_context_length"])
    return 1.0


def _attention_factor(parameters: SourceModel, values: Values) -> float | None:
    """Returns DeepSeek's factor of the tables, from its two numbers, or None."""
    scales = [parameters.setting(name, default=None) for name in ("mscale", "mscale_all_dim")]
    if values["rotary_scaling"] != "yarn" or not all(scales):
        return None
    one, other = (yarn_attention_factor(values["rotary_scaling_factor"], m) for m in scales)
    return one / other


def _must_say_factor(fields: Values, context_length: int) -> bool:
    """Whether transformers 4 would scale longrope's tables otherwise: by the ratio of lengths."""
    if fields["rotary_scaling"] != "longrope" or fields["rotary_attention_factor"] is not None:
        return False
    ratio = context_length / fields["rotary_original_context_length"]
    return bool(fields["rotary_scaling_factor"] != ratio)


def _check_older_longrope(fields: Values, context_length: int, *, is_beside: bool) -> None:
    """Rejects a longrope in ``rope_scaling`` that transformers 4 and 5 read differently."""
    if fields["rotary_scaling"] != "longrope":
        return
    length = fields["rotary_original_context_length"]
    if not is_beside and length != context_length:
        words = "stand beside it, where transformers 4 reads it, or all must be in rope_parameters"
        raise unsupported(f"rope_scaling's {TRAINED_LENGTH}", words, length)
    if is_beside and _must_say_factor(fields, context_length):
        words = "follow from the two lengths, which transformers 4 reads, or there must be an "
        factor = fields["rotary_scaling_factor"]
        raise unsupported("rope_scaling's factor", words + "attention_factor", factor)


_TRAINED = _is("llama3", "yarn", "longrope")
_LLAMA3 = _is("llama3")
_PROPORTIONAL = _is("proportional")
PARAMETERS = (
    Mapped(("rope_type", "type"), "rotary_scaling", "default", KINDS),
    Mapped("rope_theta", "rotary_base", translation=FLOAT),
    Mapped(
        "partial_rotary_factor", "rotary_fraction", translation=FLOAT, omit=1.0,
        applies=lambda values: values["rotary_scaling"] != "proportional",
    ),
    Mapped("partial_rotary_factor", "rotary_proportion", translation=FLOAT, applies=_PROPORTIONAL),
    Mapped(
        TRAINED_LENGTH, "rotary_original_context_length",
        lambda source_model, values: values["context_length"], INTEGER, applies=_TRAINED,
    ),
    Mapped(
        "factor", "rotary_scaling_factor", translation=FLOAT,
        applies=_is("linear", "llama3", "dynamic"),
    ),
    Mapped(
        "factor", "rotary_scaling_factor", _default_factor, FLOAT,
        applies=_is("yarn", "longrope", "proportional"),
    ),
    Mapped("low_freq_factor", "rotary_low_frequency_factor", translation=FLOAT, applies=_LLAMA3),
    Mapped("high_freq_factor", "rotary_high_frequency_factor", translation=FLOAT, applies=_LLAMA3),
    Mapped("beta_fast", "rotary_beta_fast", 32.0, FLOAT, omit=32.0, applies=_is("yarn")),
    Mapped("beta_slow", "rotary_beta_slow", 1.0, FLOAT, omit=1.0, applies=_is("yarn")),
    Mapped("truncate", "rotary_truncate", True, BOOLEAN, omit=True, applies=_is("yarn")),
    Mapped(
        "attention_factor", "rotary_attention_factor", _attention_factor, omit=None,
        applies=_is("yarn", "longrope"),
    ),
    Mapped("short_factor", "rotary_short_factors", translation=FACTORS, applies=_is("longrope")),
    Mapped("long_factor", "rotary_long_factors", translation=FACTORS, applies=_is("longrope")),
    # Of kinds of scaling other than the one that is there.
    Inert(
        (
            "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
            "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
            "short_factor", "long_factor", "finetuned", "factor",
        )
    ),
)  # fmt: skip


@dataclass(frozen=True)
class RotaryPositions(Row):
    """Rotary positions, alike in all layers.

    Attributes:
        fraction: the share of a head that is turned where the config.json does not say; None where
            a whole head always is.
        base_name: the older name of ``rope_theta``, beside ``rope_scaling``.
        fraction_name: that of ``partial_rotary_factor``. Readers before transformers 5 take both in
            place of ``rope_parameters``.
        base: what ``rope_theta`` is where the config.json does not say.
        usual: the parameters where the config.json has none.
        rows: of the parameters.
        has_two_fields: whether transformers 4 lets ``rope_scaling`` have ``type`` and ``factor``
            alone.
    """

    fraction: float | None = None
    base_name: str = "rope_theta"
    fraction_name: str = "partial_rotary_factor"
    base: float = 1e4
    usual: Mapping[str, Any] = field(default_factory=dict)
    rows: tuple[Row, ...] = PARAMETERS
    has_two_fields: bool = False

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the fields of rotary positions."""
        # As in transformers, the older form goes first.
        forms = ("rope_scaling", "rope_parameters")
        found = [source_model.setting(name, default={}) for name in forms]
        given: Any = found[0] or found[1] or self.usual
        if not isinstance(given, Mapping) or any(isinstance(v, Mapping) for v in given.values()):
            raise unsupported("rope_parameters", "be one for all layers", given)
        # What stands beside them goes first.
        length = source_model.setting(TRAINED_LENGTH, default=None)
        beside = {} if length is None else {TRAINED_LENGTH: length}
        fields = self.read_parameters({**given, **beside}, source_model, values)
        if found[0]:
            _check_older_longrope(fields, values["context_length"], is_beside=bool(beside))
        return fields

    def read_parameters(
        self, given: Mapping[str, Any], source_model: SourceModel, values: Values
    ) -> dict[str, Any]:
        """Gives the fields, from parameters and from what stands beside them."""
        outside = {
            "rope_theta": source_model.setting(self.base_name, default=self.base),
            "partial_rotary_factor": source_model.setting(
                self.fraction_name, default=self.fraction or 1.0
            ),
        }
        inside = {name: value for name, value in given.items() if value is not None}
        parameters = SourceModel(
            {}, kind="rope_parameters", config=outside | inside, ignore=source_model.ignore
        )
        fields = read_settings(self.rows, parameters, values)
        check_all_read(parameters, {}, "rope_parameters")
        if self.fraction is None and fields.get("rotary_fraction", 1.0) != 1.0:
            raise unsupported("partial_rotary_factor", "be 1", fields["rotary_fraction"])
        if fields["rotary_scaling"] == "dynamic":
            # Nothing changes within the context, and no text is longer.
            fields["rotary_original_context_length"] = values["context_length"]
        return {**fields, "positions": "rotary"}

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives both forms."""
        parameters = write_settings(self.rows, config)
        rotary = config.position.rotary
        settings, scaled = dataclasses.asdict(rotary.scaling), make_rotary_scaling(rotary.scaling)
        if scaled and _must_say_factor(settings, config.context_length):
            parameters["attention_factor"] = scaled.table_factor
        scaling = {name: value for name, value in parameters.items() if name != "rope_theta"}
        if self.has_two_fields and scaling.keys() == {"rope_type", "factor"}:
            scaling = {"type": scaling["rope_type"], "factor": scaling["factor"]}
        # transformers 4 chooses between longrope's factors by this one alone.
        beside = {TRAINED_LENGTH: settings["rotary_original_context_length"]}
        # A whole head is what all readers take, where it is the usual.
        is_whole = self.fraction is None or self.fraction == rotary.rotary_fraction == 1.0
        return {
            "rope_parameters": parameters,
            "rope_theta": rotary.rotary_base,
            self.base_name: rotary.rotary_base,
            "rope_scaling": scaling if scaled else None,
            **(beside if scaled and scaled.kind == "longrope" else {}),
            **({} if is_whole else {self.fraction_name: rotary.rotary_fraction}),
        }


@dataclass(frozen=True)
class RotaryByLayerType(RotaryPositions):
    """Rotary positions of which layers with a sliding window have others: unscaled, another base.

    In transformers 5 ``rope_parameters`` has an entry for each type of layer.

    Attributes:
        window_base_name: the older name of the base of layers with a window.
        window_base: what it is where the config.json does not say.
    """

    window_base_name: str = "rope_local_base_freq"
    window_base: float = 1e4

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the fields of rotary positions; the rows above have given the window."""
        # transformers does not look for it beside parameters that each type of layer has.
        source_model.read.add(TRAINED_LENGTH)
        older = source_model.setting("rope_scaling", default={}) or {}
        newer = source_model.setting("rope_parameters", default={}) or {}
        if not all(isinstance(form, Mapping) for form in (older, newer)):
            raise unsupported("rope_parameters", "be an object", newer or older)
        if newer and not set(newer) & set(LAYER_TYPES):
            raise unsupported("rope_parameters", "have an entry for each type of layer", newer)
        full, window = (newer.get(kind) or {} for kind in LAYER_TYPES)
        if (kind := window.get("rope_type", "default")) != "default":
            raise unsupported("sliding_attention's rope_type", "be 'default'", kind)
        fields = self.read_parameters({**full, **older}, source_model, values)
        if older:
            _check_older_longrope(fields, values["context_length"], is_beside=False)
        base = source_model.setting(self.window_base_name, default=self.window_base)
        base = float(window.get("rope_theta", base))
        is_same = fields["rotary_scaling"] == "none" and fields["rotary_base"] == base
        if values.get("sliding_window") is None or is_same:
            return fields
        return {**fields, "window_rotary_base": base}

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives both forms."""
        written = super().write(config)
        base = config.layers.window_rotary_base
        base = config.position.rotary.rotary_base if base is None else base
        window = {"rope_type": "default", "rope_theta": base}
        by_type = dict(zip(LAYER_TYPES, (written["rope_parameters"], window), strict=True))
        return {**written, "rope_parameters": by_type, self.window_base_name: base}
