"""Whether the work divides over the devices, and what would."""

from jaxformer.errors import DeviceError
from jaxformer.training.config import TrainConfig


def check_batch_size(batch_size: int, accumulation: int, devices: int, tensor: int = 1) -> None:
    """Checks that a batch divides over devices and micro-batches; ``tensor`` devices share a part.

    Raises:
        DeviceError: it does not; the message names the nearest sizes that do.
    """
    parts = devices // tensor
    unit = parts * accumulation
    if batch_size % unit:
        below = batch_size // unit * unit
        choices = [str(size) for size in (below, below + unit) if size]
        what = f"{devices} devices" if tensor == 1 else f"{parts} times {tensor} devices"
        raise DeviceError(
            f"--batch-size {batch_size} does not divide over {what} and "
            f"{accumulation} micro-batches: use {' or '.join(choices)}, or --devices"
        )


def check_mesh(devices: int, fsdp: int, tensor: int) -> None:
    """Checks that a mesh can be made of so many devices.

    Raises:
        DeviceError: it cannot; the message names what can.
    """
    if devices % (fsdp * tensor) == 0:
        return
    if devices % tensor == 0:
        most = devices // tensor
        choices = [str(n) for n in range(1, most + 1) if most % n == 0]
        way_out = f"use --fsdp {' or '.join(choices)}"
    else:
        choices = [str(n) for n in range(1, devices + 1) if devices % n == 0]
        way_out = f"use --tensor {' or '.join(choices)}"
    raise DeviceError(
        f"--fsdp {fsdp} times --tensor {tensor} does not divide {devices} devices: {way_out}, "
        f"or as many devices as a multiple of {fsdp * tensor}"
    )


def describe_devices(config: TrainConfig, count: int) -> str:
    """How so many devices share the work, in words; where two differ, losses do in last bits."""
    if config.strategy == "pmap":
        return f"{count} x pmap"
    data = count // (config.fsdp * config.tensor)
    return f"{count} x mesh of data {data}, fsdp {config.fsdp}, tensor {config.tensor}"
