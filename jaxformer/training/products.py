"""Which library computes the products of a run on a CPU: XLA's, jaxformer's or torch's."""

import dataclasses
from collections.abc import Sequence

import jax

from jaxformer.errors import Setting, UsageError
from jaxformer.execution.cores import count_cores
from jaxformer.hardware.custom_call_builds import UnavailableError
from jaxformer.hardware.matrix_products import Library, named_library, register_products
from jaxformer.training.config import TrainConfig
from jaxformer.training.product_choice import fastest_library
from jaxformer.training.product_conditions import is_worthwhile, rows_of_products, why_not_called


def choose_products(
    config: TrainConfig, devices: Sequence[jax.Device], *, resumed: bool = False
) -> tuple[TrainConfig, list[str]]:
    """Returns the settings with the products decided, and what to tell the user.

    A run keeps what it began with, as the last bits of its numbers differ. What an older version of
    jaxformer began has XLA's.

    Args:
        config: the settings.
        devices: of all processes.
        resumed: whether the run began before.

    Raises:
        UsageError: the products of a library were asked for, and this run cannot have them here.
    """
    chosen, library = config.products, named_library(config.products)
    notes = []
    if chosen == "auto":
        chosen = "xla" if resumed else _fastest(config, devices) or "xla"
    elif library is not None:
        reason = _why_not(library, config, devices)
        if reason is not None and not resumed:
            message = f"{library}'s products {reason}: give another "
            raise UsageError(message, Setting("products"))
        if reason is not None:
            chosen = "xla"
            notes.append(f"the products are XLA's from here on, as {library}'s {reason}")
    return dataclasses.replace(config, products=chosen), notes


def _fastest(config: TrainConfig, devices: Sequence[jax.Device]) -> Library | None:
    """Returns whose products are to replace XLA's, None if those of nobody are."""
    # Devices beyond the cores only look like many, and wait for each other.
    if _not_for_run(config, devices) or len(devices) > count_cores():
        return None
    if not is_worthwhile(config, len(devices)):
        return None
    rows = rows_of_products(config, len(devices))
    model = config.model
    return fastest_library(rows, model.d_model, model.feed_forward_width, devices)


def _why_not(library: Library, config: TrainConfig, devices: Sequence[jax.Device]) -> str | None:
    """Returns why the products of a library cannot be used; None if they can."""
    reason = _not_for_run(config, devices)
    if reason is not None:
        return reason
    try:
        register_products(library)
    except UnavailableError as error:
        return f"cannot be used here ({error})"
    return None


def _not_for_run(config: TrainConfig, devices: Sequence[jax.Device]) -> str | None:
    if devices[0].platform != "cpu":
        return "are for CPUs"
    reason = why_not_called(config)
    if reason is not None:
        return reason
    if jax.process_count() > 1:
        return "are for a single process"
    return None
