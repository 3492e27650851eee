"""How much memory devices and this machine have, and how much of it is in use, in bytes."""

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

# Where a container's limit stands, for both versions of Linux's control groups.
CONTAINER_LIMITS = (
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
)


def device_memory(devices: Sequence["jax.Device"]) -> int | None:
    """Returns the bytes that each of the devices has, or None where that is unknown.

    Only devices of this process are looked at. The devices of a CPU share their machine's memory.
    """
    import jax

    local = [device for device in devices if device.process_index == jax.process_index()]
    if not local:
        return None
    if local[0].platform == "cpu":
        return host_memory() // len(local)
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in local]
    known = [int(limit) for limit in limits if limit is not None]
    return min(known) if len(known) == len(limits) else None


def host_memory() -> int:
    """Returns the bytes that this machine has, or that its container may use."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CONTAINER_LIMITS:
        try:
            found.append(int(Path(path).read_text(encoding="ascii")))
        except (OSError, ValueError):
            continue  # there is none, or it is "max"
    return min(found)


def free_memory() -> int:
    """Returns the bytes that a program may still take without others being moved to disk."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        found = {name: value for name, _, value in (line.partition(":") for line in lines)}
        return min(host_memory(), int(found["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        return host_memory()


def release_freed() -> None:
    """Returns freed memory to the system, where the C library keeps it (glibc's, on Linux).

    It keeps freed arrays of up to 32 MB and what a compiler has used, in pieces that the large
    arrays of a step do not fit into.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


@contextlib.contextmanager
def without_collection(*, all_stays: bool = False) -> Iterator[None]:
    """Makes Python not search for unreachable objects within the block.

    Importing JAX, tracing a model or recording a run makes some hundred thousand objects. Python
    would go through all of them again and again: it takes a fifth of the time of an import, and a
    fifteenth of that of a comparison.

    Args:
        all_stays: count the objects as old ones afterwards, which are searched least often.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # What somebody else has frozen must stay so.
        if all_stays and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()


def describe_peak_memory() -> str:
    """Returns in words the most that the first accelerator held, or this process without one."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return f"peak {stats['peak_bytes_in_use'] / 2**30:.1f} GiB on device"
    return f"peak {_peak_resident_bytes() / 2**30:.1f} GiB"


def _peak_resident_bytes() -> int:
    """Returns the most memory of this process that was resident at once."""
    try:
        # Not that of getrusage, which begins with the peak of the program that started this one.
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        found = next(line for line in lines if line.startswith("VmHWM:"))
        return int(found.split()[1]) * 1024
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
