"""What a run starts from, as ``--init-from`` names it, and the settings that follow from it."""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxformer.cli.arguments import peek, peek_all
from jaxformer.errors import Setting, UsageError
from jaxformer.hardware.invocation import command
from jaxformer.training.config import TrainConfig
from jaxformer.training.presets import fine_tuning

if TYPE_CHECKING:
    from jaxformer.training.experiment import WarmStart

# Settings that messages name and that only a port takes.
OF_PORT = {"dialect", "config", "force"}


def read_start(
    arguments: Sequence[str], config: TrainConfig, *, with_arrays: bool = True
) -> tuple["WarmStart | None", TrainConfig]:
    """Returns the model of ``--init-from``, if that is given, and the settings of a run with it.

    Args:
        arguments: of the command.
        config: the settings without it.
        with_arrays: see ``read_warm_start``.

    Raises:
        JaxformerError: one of its kinds, see ``read_warm_start``.
    """
    source, meta = peek(arguments, "--init-from"), peek(arguments, "--meta")
    if source is None:
        return None, config
    from jaxformer.porting.train_states import read_warm_start

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            start = read_warm_start(
                Path(source),
                fresh="--fresh-optimizer" in arguments,
                ignore=peek_all(arguments, "--ignore"),
                meta=None if meta is None else Path(meta),
                with_arrays=with_arrays,
            )
        for warning in caught:
            print(f"jaxformer: warning: {warning.message}", file=sys.stderr)
    except UsageError as error:
        named = {part.name for part in error.args if isinstance(part, Setting)}
        if not named & OF_PORT:
            raise
        ported = command("port", source, "DIR", "--dialect", "D", "--config", "config.json")
        raise UsageError(
            *error.args,
            f". These are flags of jaxformer port: run {ported} first, and start from DIR",
        ) from error
    config = config.with_model(start.model)
    if peek(arguments, "--preset") is None and not start.step:
        config = fine_tuning(config)
    return start, config
