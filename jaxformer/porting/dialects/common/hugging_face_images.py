"""The adapter of a family that sees, from its rules and its table of settings, and shared rows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxformer.config_vision import PatchConfig, VisionTransformerConfig
from jaxformer.porting.dialects.common.hugging_face import read_fields
from jaxformer.porting.dialects.common.known_settings import DEFAULTS, SHARED
from jaxformer.porting.dialects.common.labels import read_labels, written_labels
from jaxformer.porting.dialects.common.transformers_types import TRANSFORMERS_TYPES
from jaxformer.porting.mapping.adapter import Buffer, ConfigReader, ModuleMapping, StateDictAdapter
from jaxformer.porting.mapping.packings import Reshaped
from jaxformer.porting.mapping.rules import Rule, Rules, names, under
from jaxformer.porting.mapping.settings import (
    Row,
    Values,
    read_settings,
    unsupported,
    write_settings,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import find_unread
from jaxformer.vision_transformer import VisionTransformer

# Of a model without its head.
BODY_HEAD = {"num_labels": 0, "image_labels": (), "pooling": "first"}


@dataclass(frozen=True)
class Sides(Row):
    """A height and a width, which are one number where they are equal.

    Attributes:
        source: the setting.
        height: the target field.
        width: the other.
    """

    source: str
    height: str
    width: str

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives both fields."""
        given = source_model.setting(self.source)
        sides = list(given) if isinstance(given, list | tuple) else [given, given]
        if len(sides) != 2 or not all(type(side) is int and side > 0 for side in sides):
            raise unsupported(self.source, "be a whole number above 0, or two of them", given)
        return {self.height: sides[0], self.width: sides[1]}

    def write(self, config: Any) -> dict[str, Any]:
        """Gives one number, or both."""
        settings = config.settings()
        height, width = settings[self.height], settings[self.width]
        return {self.source: height if height == width else [height, width]}


class Labels(Row):
    """The number of classes, and their names."""

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the number and the names, but those that transformers makes; a body has neither."""
        number = source_model.setting("num_labels", default=2)
        if source_model.setting("id2label", default=None) is None:
            if type(number) is not int or number < 1:
                raise unsupported("num_labels", "be a whole number above 0", number)
            return {"num_labels": number}
        labels = read_labels(source_model)
        if not labels:
            raise unsupported("id2label", "name a class", {})
        return {
            "num_labels": len(labels),
            "image_labels": () if labels == _numbered(len(labels)) else labels,
        }

    def write(self, config: VisionTransformerConfig) -> dict[str, Any]:
        """Gives names with numbers; without names those that transformers makes."""
        part = config.image_head
        labels = part.image_labels or _numbered(part.num_labels)
        return written_labels(labels) if labels else {}


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(f"LABEL_{n}" for n in range(count))


class Tokens(Row):
    """The number of tokens of an image, which follows from the rows above."""

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the number."""
        known = {name: values[name] for name in vars(PatchConfig()) if name in values}
        return {"context_length": PatchConfig(**known).num_tokens}

    def write(self, config: Any) -> dict[str, Any]:
        """Gives nothing."""
        return {}


IMAGES = (
    Sides("image_size", "image_height", "image_width"),
    Sides("patch_size", "patch_height", "patch_width"),
)


def patch_rules(module: VisionTransformer, projection: str) -> Rules:
    """Returns the rules of the projection of patches, which is a convolution in the source.

    Args:
        module: the target.
        projection: what the source calls it, as seen from what embeds patches.
    """
    config, part = module.config, module.config.patches
    kernel = (config.d_model, part.num_channels, part.patch_height, part.patch_width)
    return (
        Rule(("proj.kernel",), (f"{projection}.weight",), Reshaped(kernel)),
        *(
            (Rule(("proj.bias",), (f"{projection}.bias",), Reshaped(kernel[:1])),)
            if part.patch_bias
            else ()
        ),
    )


def row_rules(module: VisionTransformer, axes: int = 3, **rows: str) -> Rules:
    """Returns the rules of single rows: target = source.

    Args:
        module: the target.
        axes: how many the source array has.
        rows: modules, and the arrays of the source.
    """
    shape = (1,) * (axes - 1) + (module.config.d_model,)
    return tuple(
        Rule((f"{target}.embedding",), (source,), Reshaped(shape))
        for target, source in rows.items()
        if getattr(module, target) is not None
    )


def image_model(
    name: str,
    settings: tuple[Row, ...],
    body: Callable[[Any], Rules],
    *,
    published: Callable[[Any], Rules] | None = None,
    head: str = "classifier",
    heads: tuple[str, ...] = (),
    old_names: Mapping[str, str] | None = None,
    published_names: Mapping[str, str],
    buffers: tuple[Buffer, ...] = (),
    body_head: Mapping[str, Any] = BODY_HEAD,
) -> StateDictAdapter:
    """Returns the adapter of a model that sorts images, and of its body alone.

    Args:
        name: the dialect's, which is the ``model_type`` in config.json.
        settings: the rows of all settings.
        body: rules of the body, for a target module.
        published: rules of the body in files, see ``ModuleMapping``.
        head: what the source calls the matrix of the classes.
        heads: what a third class calls those of the two tokens, where there is one (DeiT).
        old_names: see ``StateDictAdapter``.
        published_names: see ``StateDictAdapter``.
        buffers: of the body.
        body_head: the fields of a body alone.
    """
    known = TRANSFORMERS_TYPES[name]
    # Of half a model there may be the body alone.
    whole_class, body_class = (known.classes * 2)[:2]
    class_of_two = known.classes[2] if heads else None
    rows = (*settings, *SHARED)

    def read_config(source_model: SourceModel) -> VisionTransformerConfig:
        fields = read_fields(name, rows, source_model)
        if source_model.kind == body_class:
            fields |= body_head
        if source_model.kind == class_of_two:
            fields |= {"distillation_head": True}
        return VisionTransformerConfig(**fields)

    def overlooks(config: Mapping[str, Any]) -> dict[str, Any]:
        source_model = SourceModel({}, kind=whole_class, config=config)
        source_model = source_model.with_defaults(known.defaults)
        read_settings(rows, source_model)
        return find_unread(source_model, DEFAULTS)

    def write(module: VisionTransformer) -> dict[str, Any]:
        part = module.config.image_head
        kind = whole_class if part.num_labels else body_class
        return {
            "model_type": name,
            "architectures": [class_of_two if part.distillation_head else kind],
            **write_settings(settings, module.config),
        }

    def module_mapping(kind: str, start: str, head_rules: Rules, **more: Any) -> ModuleMapping:
        def rules(inside: Callable[[Any], Rules]) -> Callable[[Any], Rules]:
            return lambda module: (*under("", start.rstrip("."), inside(module)), *head_rules)

        return ModuleMapping(
            (kind,),
            VisionTransformer,
            ConfigReader(read_config),
            rules(body),
            published=None if published is None else rules(published),
            buffers=tuple(replace(b, source=start + b.source) for b in buffers),
            settings=write,
            **more,
        )

    whole = module_mapping(
        whole_class,
        known.prefix,
        names(classifier=head),
        prefix=known.prefix,
        outside=(f"{head}.",),
    )
    body_alone = module_mapping(body_class, "", ())
    of_two: tuple[ModuleMapping, ...] = ()
    if class_of_two is not None:
        pairs = dict(zip(("classifier", "distillation_classifier"), heads, strict=True))
        outside = tuple(f"{head}." for head in heads)
        of_two = (
            module_mapping(
                class_of_two, known.prefix, names(pairs), prefix=known.prefix, outside=outside
            ),
        )
    return StateDictAdapter(
        name,
        (body_alone,) if whole_class == body_class else (whole, body_alone, *of_two),
        prefix=known.prefix,
        model_types=(name,),
        old_names=old_names or {},
        published_names=published_names,
        overlooks=overlooks,
    )
