"""The model types of Hugging Face, as a table that is read without importing JAX.

``model_types.json`` is written from the dialects' declarations and from what their models are
built of, by docs/write_models.py; a test fails where it is out of date.
"""

import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True)
class ModelType:
    """What is known of a model type.

    Attributes:
        name: the ``model_type`` of config.json, and the dialect.
        classes: the classes of transformers that are read and written.
        generates: whether one of them writes text token by token.
        parts: the parts of jaxformer that its models are built of.
        text_part: of a model that sees, the type of the language model in it where its config.json
            does not say; that part alone is ported. Otherwise None.
    """

    name: str
    classes: tuple[str, ...]
    generates: bool
    parts: tuple[str, ...]
    text_part: str | None = None

    @property
    def state(self) -> str:
        """What works: ``ported`` both ways or the ``text part``, and ``generation``."""
        ported = "ported" if self.text_part is None else "text part"
        return f"{ported}, generation" if self.generates else ported


def model_types() -> list[ModelType]:
    """Returns all model types, in the order of the dialects."""
    text = resources.files(__package__).joinpath("model_types.json").read_text("utf-8")
    return [
        ModelType(
            name,
            tuple(known["classes"]),
            known["generates"],
            tuple(known["parts"]),
            known.get("text_part"),
        )
        for name, known in json.loads(text).items()
    ]


def list_model_types() -> str:
    """Returns the table that ``jaxformer port --list`` prints."""
    rows = [(t.name, t.state, ", ".join(t.parts)) for t in model_types()]
    rows.insert(0, ("model type", "state", "parts"))
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "".join(
        f"{name:<{widths[0]}}  {state:<{widths[1]}}  {parts}\n" for name, state, parts in rows
    )
