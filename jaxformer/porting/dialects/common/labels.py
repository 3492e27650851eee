"""The names of labels, as a config.json has them: by their numbers."""

from collections.abc import Sequence
from typing import Any

from jaxformer.porting.mapping.settings import unsupported
from jaxformer.porting.mapping.source_model import SourceModel


def read_labels(source_model: SourceModel) -> tuple[str, ...]:
    """Returns the names in the order of their numbers, of a config that has them.

    Raises:
        UsageError: they have not the numbers from 0 on, or not as many as are said.
    """
    named = source_model.setting("id2label")
    count = source_model.setting("num_labels", default=None)
    try:
        by_number = {int(number): str(label) for number, label in dict(named).items()}
    except (TypeError, ValueError):
        raise unsupported("id2label", "be an object of labels by number", named) from None
    if sorted(by_number) != list(range(len(by_number))):
        raise unsupported("id2label", "have the numbers from 0 on", named)
    if count not in (None, len(by_number)):
        raise unsupported("num_labels", f"be {len(by_number)}, as many as in id2label", count)
    return tuple(by_number[number] for number in range(len(by_number)))


def written_labels(labels: Sequence[str]) -> dict[str, Any]:
    """Returns the settings of names: them by number, and the numbers by name."""
    return {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }
