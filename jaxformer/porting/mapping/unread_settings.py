"""Settings that nobody reads: known to be without effect on the numbers, or rejected."""

from dataclasses import dataclass
from typing import Any

from jaxformer.errors import Setting, UsageError
from jaxformer.porting.mapping.settings import Row, Values
from jaxformer.porting.mapping.source_model import SourceModel


@dataclass(frozen=True)
class Inert(Row):
    """Source settings that have no effect on the numbers of the models that are ported.

    Attributes:
        source: their names.
    """

    source: tuple[str, ...]

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Notes that they are known, and gives nothing."""
        source_model.read.update(self.source)
        return {}

    def write(self, config: Any) -> dict[str, Any]:
        """Gives nothing."""
        return {}


def check_all_read(source_model: SourceModel, defaults: Values, reader: str) -> None:
    """Checks that no setting of a config was overlooked: it might change what the model computes.

    Args:
        source_model: after all settings that are known were read.
        defaults: values by name with which a setting that is not known has no effect.
        reader: whose settings these are, for the message.

    Raises:
        UsageError: settings are left that nobody has read; all are listed.
    """
    left = find_unread(source_model, defaults)
    if left:
        raise UsageError(
            f"unsupported: {reader} does not know what the config's {listed(left)} does: if it has "
            "no effect on the numbers, name it in ",
            Setting("ignore"),
        )


def find_unread(source_model: SourceModel, defaults: Values) -> dict[str, Any]:
    """Returns the settings that nobody has read and that are not what they are by default."""
    return {
        name: value
        for name, value in source_model.unread().items()
        if name not in defaults or value != defaults[name]
    }


def listed(settings: Values) -> str:
    """Returns settings as a message lists them: ``a=1, b=2``."""
    return ", ".join(f"{name}={_shortened(value)}" for name, value in sorted(settings.items()))


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
