"""Which devices a run uses, and whether its mesh and its batch divide over them."""

import contextlib
import os

import jax

from jaxformer.errors import DeviceError, Setting, UsageError
from jaxformer.training.config import TrainConfig

# In d_model. At 128 two CPU devices make a step 1.1 times as fast as one that shares each product
# between two cores, and steadier; at 384 they make no difference.
WIDEST_NARROW_MODEL = 256
# Whether ``reserve_cpu_devices`` has made as many devices as there are cores.
_is_reserved = False


def reserve_cpu_devices() -> None:
    """Configures a CPU as one device for each core, of which ``choose_devices`` then takes some.

    For what starts JAX before it is known how many devices training wants. It does nothing if JAX
    uses the CPU already, or if somebody has chosen how many it is.
    """
    global _is_reserved
    if not _is_configured():
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
            _is_reserved = True


def choose_devices(config: TrainConfig) -> list[jax.Device]:
    """Returns the first ``config.devices`` of each process, or all of them, process by process.

    Where there is only a CPU, it is configured as that many devices, unless JAX already uses it.
    By default a narrow model is spread over all cores that its batch divides by: its products are
    so small that sharing each of them among cores costs more than it saves.

    Raises:
        DeviceError: there are fewer.
    """
    count, cores = config.devices, os.cpu_count() or 1
    wanted = 1 if count is None else count
    if count is None and config.model.d_model <= WIDEST_NARROW_MODEL:
        wanted = max(n for n in range(1, cores + 1) if _divides(config, n))
    if 1 < wanted <= cores and not _is_configured():
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", wanted)
    here, is_set = len(jax.local_devices()), _is_set_in_environment()
    if count is not None and count > here:
        if jax.default_backend() != "cpu" or is_set or count <= cores:
            raise DeviceError(Setting("devices", value=str(count)), f": this process has {here}")
        raise DeviceError(
            Setting("devices", value=str(count)),
            f": a CPU has as many devices as cores, here {cores}; XLA_FLAGS="
            f"--xla_force_host_platform_device_count={count} makes as many as are wanted",
        )
    if _is_reserved and jax.default_backend() == "cpu":
        count = wanted
    return [
        device
        for process in range(jax.process_count())
        for device in jax.local_devices(process)[:count]
    ]


def _is_set_in_environment() -> bool:
    return "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")


def _is_configured() -> bool:
    """Whether it is chosen how many devices a CPU is."""
    return _is_set_in_environment() or jax.config.values["jax_num_cpu_devices"] > 0


def _divides(config: TrainConfig, devices: int) -> bool:
    """Whether mesh and batch divide over so many devices; where nothing does, one is as good."""
    with contextlib.suppress(DeviceError, UsageError):
        check_devices(config, devices)
        return True
    return devices == 1


def check_devices(config: TrainConfig, count: int) -> None:
    """Checks that the mesh and the batch divide over so many devices.

    Raises:
        DeviceError: they do not; the message names the numbers that do.
        UsageError: there is one gradient a step where the noise scale needs several.
    """
    check_mesh(count, config.fsdp, config.tensor, config.expert)
    check_batch_size(config.batch_size, config.accumulation, count, config.tensor)
    parts = config.accumulation * (count if config.strategy == "pmap" else 1)
    if config.optimizer.noise_scale and parts == 1:
        raise UsageError(
            Setting("noise_scale"),
            " compares a step's gradient with those of its parts: give ",
            Setting("accumulation"),
            " 2 or more, or more devices to the strategy pmap",
        )


def check_batch_size(batch_size: int, accumulation: int, devices: int, tensor: int = 1) -> None:
    """Checks that a batch divides over devices and micro-batches.

    Args:
        batch_size: windows per step.
        accumulation: micro-batches per step.
        devices: of all processes.
        tensor: how many devices share the same windows.

    Raises:
        DeviceError: it does not; the message names the nearest sizes that do.
    """
    shards = devices // tensor
    unit = shards * accumulation
    if batch_size % unit:
        below = batch_size // unit * unit
        choices = [str(size) for size in (below, below + unit) if size]
        what = f"{devices} devices" if tensor == 1 else f"{shards} times {tensor} devices"
        raise DeviceError(
            Setting("batch_size", value=str(batch_size)),
            f" does not divide over {what} and "
            f"{accumulation} micro-batches: use {' or '.join(choices)}, or ",
            Setting("devices"),
        )


def check_mesh(devices: int, fsdp: int, tensor: int, expert: int = 1) -> None:
    """Checks that a mesh can be made of so many devices.

    Raises:
        DeviceError: it cannot; the message names the sizes that can.
    """
    if devices % (fsdp * tensor * expert) == 0:
        return
    if expert > 1:
        raise DeviceError(
            Setting("fsdp", value=str(fsdp)),
            " times ",
            Setting("expert", value=str(expert)),
            " times ",
            Setting("tensor", value=str(tensor)),
            f" does not divide {devices} devices: use as many as a multiple of "
            f"{fsdp * expert * tensor}",
        )
    if devices % tensor == 0:
        most = devices // tensor
        choices = [str(n) for n in range(1, most + 1) if most % n == 0]
        fitting = Setting("fsdp")
    else:
        choices = [str(n) for n in range(1, devices + 1) if devices % n == 0]
        fitting = Setting("tensor")
    raise DeviceError(
        Setting("fsdp", value=str(fsdp)),
        " times ",
        Setting("tensor", value=str(tensor)),
        f" does not divide {devices} devices: use ",
        fitting,
        f" {' or '.join(choices)}, or as many devices as a multiple of {fsdp * tensor}",
    )
