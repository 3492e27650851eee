"""Hugging Face's ``clip`` (arXiv 2103.00020) and ``siglip`` (arXiv 2303.15343) as a whole.

The models that read and that see are those of ``clip.py``, as a ``DualEncoder``. A config.json has
the settings of either as an object of its own; what a class takes them to be without one, each of
those classes says.

``*ForImageClassification`` is what sees alone, with classes of the mean of the patches: a
``VisionTransformer``. It keeps what makes the vector of an image, which the classes do not use.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.config_dual_encoder import DualEncoderConfig
from jaxformer.config_vision import VisionTransformerConfig
from jaxformer.dual_encoder import DualEncoder
from jaxformer.errors import UsageError
from jaxformer.porting.dialects.clip import (
    CLIP_TEXT,
    CLIP_VISION,
    SIGLIP_TEXT,
    SIGLIP_VISION,
    TEXT_BODY,
    VOCABULARY,
    LastToken,
    projection_width,
    siglip_vision_body,
    vision_body,
)
from jaxformer.porting.dialects.common.buffers import position_ids
from jaxformer.porting.dialects.common.hugging_face import NO_SPECIAL_TOKENS
from jaxformer.porting.dialects.common.hugging_face_images import Labels
from jaxformer.porting.dialects.common.known_settings import DEFAULTS, SHARED
from jaxformer.porting.dialects.common.transformers_types import TRANSFORMERS_TYPES
from jaxformer.porting.mapping.adapter import ConfigReader, ModuleMapping, StateDictAdapter
from jaxformer.porting.mapping.packings import Reshaped
from jaxformer.porting.mapping.rules import Rule, Rules, names, under
from jaxformer.porting.mapping.settings import (
    Conversion,
    Mapped,
    Required,
    Row,
    Values,
    fixed,
    read_settings,
    unsupported,
    write_settings,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert, check_all_read, find_unread
from jaxformer.vision_transformer import VisionTransformer

# With this id transformers takes the token with the highest one: that of the first files was wrong.
FIRST_CLIP = 2


@dataclass(frozen=True)
class Tower(Row):
    """The settings of one of the two models, which are an object in a config.json.

    Attributes:
        source: its name there.
        target: the field.
        config: the class of the field.
        model_type: of that model alone, whose class says what settings are that are not there.
        settings: the rows of the model's settings.
        of_pair: fields that it always has in a pair.
        beside: rows of that object that are about the pair.
        older: the name of an object that transformers takes in its place, where there is one.
    """

    source: str
    target: str
    config: type
    model_type: str
    settings: tuple[Row, ...]
    of_pair: Mapping[str, Any]
    beside: tuple[Row, ...] = ()
    older: str | None = None

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the config of the model, and what is said of the pair.

        Raises:
            UsageError: the settings are no object, or a setting is unsupported or unknown.
        """
        fields, beside = self.fields(source_model)
        return {self.target: self.config(**fields), **beside}

    def fields(self, source_model: SourceModel) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the fields of the model's config, and those of the pair. Raises as ``read``."""
        name = self.source
        given = source_model.setting(name, default={})
        if self.older is not None and (old := source_model.setting(self.older, default=None)):
            name, given = self.older, old
        if not isinstance(given, Mapping):
            raise UsageError(f"the {name} must be an object: got {given!r}")
        inner = SourceModel({}, config=given, ignore=source_model.ignore)
        if "model_type" in source_model.config:
            inner = inner.with_defaults(TRANSFORMERS_TYPES[self.model_type].defaults)
        rows = (*self.settings, Required("model_type", self.model_type), *SHARED)
        fields = read_settings(rows, inner)
        beside = read_settings(self.beside, inner)
        check_all_read(inner, DEFAULTS, f"{self.model_type} in {name}")
        return {**fields, **self.of_pair}, beside

    def write(self, config: DualEncoderConfig) -> dict[str, Any]:
        """Gives the object."""
        own = write_settings(self.settings, getattr(config, self.target))
        beside = write_settings(self.beside, config)
        tokens = NO_SPECIAL_TOKENS if self.config is TransformerLMConfig else {}
        return {self.source: {"model_type": self.model_type, **tokens, **own, **beside}}


class EndToken(Row):
    """The token that ends a text, whose output a text becomes."""

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the id; one of all first files means the token with the highest id."""
        token = source_model.nullable("eos_token_id", 49407)
        if type(token) is not int:
            raise unsupported("eos_token_id", "be a whole number", token)
        if token == FIRST_CLIP:
            return {"text_vector": "highest_token"}
        return {"text_vector": "end_token", "end_token": token}

    def write(self, config: DualEncoderConfig) -> dict[str, Any]:
        """Gives the id."""
        is_first = config.text_vector == "highest_token"
        return {"eos_token_id": FIRST_CLIP if is_first else config.end_token}


# Both objects have the width of the projections too, which only half a model reads.
WIDTH = Mapped("projection_dim", "projection_width", is_read=False)
CLIP_SIGHT = Tower(
    "vision_config",
    "vision",
    VisionTransformerConfig,
    "clip_vision_model",
    CLIP_VISION,
    {"num_labels": 0},
    (WIDTH,),
    older="vision_config_dict",
)
SIGLIP_SIGHT = Tower(
    "vision_config", "vision", VisionTransformerConfig, "siglip_vision_model", SIGLIP_VISION, {}
)
CLIP = (
    Tower(
        "text_config",
        "text",
        TransformerLMConfig,
        "clip_text_model",
        (*(row for row in CLIP_TEXT if not isinstance(row, LastToken)), *VOCABULARY),
        {},
        (EndToken(), WIDTH),
        older="text_config_dict",
    ),
    CLIP_SIGHT,
    Mapped("projection_dim", "projection_width", 512, Conversion(projection_width)),
    # Where training begins, and what belongs to half a model.
    Inert(("logit_scale_init_value", "tie_word_embeddings")),
)
SIGLIP = (
    Tower(
        "text_config",
        "text",
        TransformerLMConfig,
        "siglip_text_model",
        (*SIGLIP_TEXT, *VOCABULARY),
        {},
    ),
    # Without its pooling an image has no vector.
    replace(SIGLIP_SIGHT, settings=(*SIGLIP_VISION, Required("vision_use_head", True))),
    *fixed(text_vector="pooler", similarity_bias=True),
    Inert(("tie_word_embeddings",)),
)


@dataclass(frozen=True)
class Alone(Row):
    """The settings of the model that sees, where it is alone and has classes.

    Attributes:
        tower: its row in a pair.
    """

    tower: Tower

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the fields of the model."""
        return self.tower.fields(source_model)[0]

    def write(self, config: VisionTransformerConfig) -> dict[str, Any]:
        """Gives the object."""
        of_pair = {"num_labels": 0, "image_labels": (), "classes_from": "vector"}
        alone = VisionTransformerConfig(**{**config.settings(), **of_pair})
        return {
            self.tower.source: {
                "model_type": self.tower.model_type,
                **write_settings(self.tower.settings, alone),
            }
        }


def _image_classifier(
    name: str, kind: str, sight: Tower, body: Callable[[Any], Rules]
) -> ModuleMapping:
    """Returns the mapping of what sees, with classes of the mean of its patches.

    Args:
        name: the dialect's.
        kind: the class.
        sight: the settings of the model that sees.
        body: the rules of it.
    """
    # Of what reads, and of what a pair has beside its two models.
    unused = Inert(
        (
            "text_config", "text_config_dict", "projection_dim", "logit_scale_init_value",
            "tie_word_embeddings",
        )
    )  # fmt: skip
    own = (Alone(sight), Labels(), *fixed(classes_from="patches", label_bias=True))

    def read_config(source_model: SourceModel) -> VisionTransformerConfig:
        fields = read_settings((*own, unused, *SHARED), source_model)
        check_all_read(source_model, DEFAULTS, name)
        return VisionTransformerConfig(**fields)

    def write(module: VisionTransformer) -> dict[str, Any]:
        about = {"model_type": name, "architectures": [kind]}
        return {**about, **write_settings(own, module.config)}

    return ModuleMapping(
        (kind,),
        VisionTransformer,
        ConfigReader(read_config),
        lambda module: (
            *under("", "vision_model", body(module)),
            *names(classifier="classifier"),
        ),
        buffers=(position_ids("vision_model.embeddings.position_ids"),),
        settings=write,
        outside=("classifier.",),
    )


def _adapter(
    name: str,
    settings: tuple[Row, ...],
    seeing: Callable[[Any], Rules],
    sight: Tower,
    scale: tuple[int, ...],
) -> StateDictAdapter:
    """Returns the adapter of a pair, and of what sees in it, with classes.

    Args:
        name: the dialect's, which is the ``model_type`` in config.json.
        settings: the rows of all settings.
        seeing: the rules of the model that sees.
        sight: the settings of the model that sees, alone.
        scale: the shape of the array of the scale.
    """
    kind, image_kind = TRANSFORMERS_TYPES[name].classes
    rows = (*settings, *SHARED)

    def read_config(source_model: SourceModel) -> DualEncoderConfig:
        fields = read_settings(rows, source_model)
        check_all_read(source_model, DEFAULTS, name)
        return DualEncoderConfig(**fields)

    def overlooks(config: Mapping[str, Any]) -> dict[str, Any]:
        source_model = SourceModel({}, kind=kind, config=config)
        read_settings(rows, source_model)
        return find_unread(source_model, DEFAULTS)

    def rules(module: DualEncoder) -> Rules:
        return (
            *under("text", "text_model", TEXT_BODY),
            *under("vision", "vision_model", seeing(module.vision)),
            *names(text_projection="text_projection", image_projection="visual_projection"),
            Rule(("similarity.scale",), ("logit_scale",), Reshaped(scale)),
            Rule(("similarity.bias",), ("logit_bias",)),
        )

    def write(module: DualEncoder) -> dict[str, Any]:
        return {
            "model_type": name,
            "architectures": [kind],
            **write_settings(settings, module.config),
        }

    buffers = tuple(
        position_ids(f"{tower}_model.embeddings.position_ids", of=tower)
        for tower in ("text", "vision")
    )
    mapping = ModuleMapping(
        (kind,), DualEncoder, ConfigReader(read_config), rules, buffers=buffers, settings=write
    )
    images = _image_classifier(name, image_kind, sight, seeing)
    return StateDictAdapter(name, (mapping, images), model_types=(name,), overlooks=overlooks)


DIALECTS = (
    _adapter("clip", CLIP, vision_body, CLIP_SIGHT, ()),
    _adapter("siglip", SIGLIP, siglip_vision_body, SIGLIP_SIGHT, (1,)),
)
