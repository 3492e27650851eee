"""Which runs may have products that are custom calls, as far as settings say; free of JAX."""

from jaxformer.hardware.custom_call_builds import OF_A_STEP, build_ahead
from jaxformer.hardware.nvidia_driver import has_driver
from jaxformer.training.config import TrainConfig

# Of a product in a feed-forward. A run with smaller ones is over soon, whatever computes them.
FEWEST_OPERATIONS = 1e7


def why_not_called(config: TrainConfig) -> str | None:
    """Returns why a run of these settings can have none, on a CPU; None if it can."""
    if config.dtype != "float32":
        return f"are float32, and dtype is {config.dtype}"
    if config.strategy == "mesh":
        return "cannot be divided over a mesh"
    return None


def rows_of_products(config: TrainConfig, devices: int) -> int:
    """Returns how many rows the products of a micro-batch have on each of so many devices."""
    return config.batch_size // config.accumulation // devices * config.window


def is_worthwhile(config: TrainConfig, devices: int) -> bool:
    """Returns whether a run on so many CPU devices takes long enough to measure its products."""
    rows = rows_of_products(config, devices)
    model = config.model
    return 2 * rows * model.d_model * model.feed_forward_width >= FEWEST_OPERATIONS


def build_what_is_called(config: TrainConfig) -> None:
    """Begins to build what a run of these settings may call, and does not wait.

    A C compiler then works while JAX is imported, which takes one core. Where there is a GPU, or
    nothing is called, it has nothing to do.
    """
    is_wanted = config.products == "jaxformer" or (
        # On one device products are the largest that they can be.
        config.products == "auto" and is_worthwhile(config, 1)
    )
    if is_wanted and why_not_called(config) is None and not has_driver():
        build_ahead(OF_A_STEP)
