"""Dialect ``jaxformer``: its own names and layout, for the models that have a config."""

from typing import Any

from jaxformer.config_tree import from_dict, setting_types
from jaxformer.porting.mapping.abstract_modules import MODEL_OF_CONFIG, parameter_shapes
from jaxformer.porting.mapping.adapter import ConfigReader, ModuleMapping, StateDictAdapter
from jaxformer.porting.mapping.rules import Rule, Rules
from jaxformer.porting.mapping.source_model import SourceModel


def _rules(module: Any) -> Rules:
    """Returns rules that keep every name and layout."""
    return tuple(Rule((name,), (name,), transpose=False) for name in parameter_shapes(module))


def _module_mapping(model: Any, config: type) -> ModuleMapping:

    def read_config(source_model: SourceModel) -> Any:
        values = {
            name: source_model.config[name]
            for name in setting_types(config)
            if name in source_model.config
        }
        return from_dict(config, values)

    return ModuleMapping(
        (model.__name__,),
        model,
        ConfigReader(read_config),
        _rules,
        settings=lambda module: module.config.settings(),
    )


DIALECTS = (
    StateDictAdapter(
        "jaxformer",
        tuple(_module_mapping(model, config) for config, model in MODEL_OF_CONFIG.items()),
    ),
)
