"""The model types of Hugging Face, as transformers declares them, read without importing JAX.

``transformers_types.json`` is the table: by ``model_type`` the file of ``dialects`` that declares
the rest, the classes, the names of the body and of the token embedding in it, and what its class
takes settings to be that a config.json does not have, and the order of its modules.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any


@dataclass(frozen=True)
class TransformersType:
    """What is declared of a model type.

    Attributes:
        file: the module of ``dialects`` with its names and settings.
        classes: that of the whole model, with a language-modelling head; that of the body; and that
            of a causal model, where it is another class with the same arrays.
        prefix: of the body's names in the whole model, with its dot.
        embedding: what the body calls the token embedding, which the head may be tied to.
        defaults: settings where config.json has none, as far as they are not a row's own default.
        order: the names of modules and parameters in the order in which the classes make them;
            ``parent.name`` where one parent has another order than the others.
    """

    file: str
    classes: tuple[str, ...]
    prefix: str
    embedding: str
    defaults: Mapping[str, Any]
    order: tuple[str, ...]


def _read() -> dict[str, TransformersType]:
    text = resources.files("jaxformer.porting").joinpath("transformers_types.json")
    entries = json.loads(text.read_text("utf-8"))
    return {
        name: TransformersType(**{**entry, "order": tuple(entry["order"].split())})
        for name, entry in entries.items()
    }


TRANSFORMERS_TYPES = _read()
