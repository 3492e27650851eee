"""What this machine reaches at most, by measurement: matrix products and memory."""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from measure import on_gpu, rounded, seconds_of, torch_device, wait_for_torch


def measure_limits(dtypes: Sequence[str] = ("float32",), *, seconds: float = 0.5) -> dict[str, Any]:
    """What this machine reaches on matrix products and on reading memory, by measurement.

    Args:
        dtypes: ``float32`` and ``bfloat16``, of the matrix products; one that the processor has
            no instructions for is left out.
        seconds: how long each framework tries at each size; the fastest call counts.

    Returns:
        ``matmul``: by dtype the best ``flops`` (per second) and, in ``tried``, the best of each
        framework at each size. ``memory``: ``read`` and ``copy`` in bytes per second, a copy
        counted as one read and one write.
    """
    import torch

    found: dict[str, Any] = {"matmul": {}, "memory": _bandwidth(seconds)}
    for dtype in dtypes:
        if dtype == "float32" or on_gpu() or "bf16" in _flags():
            tried = _matmul(dtype, seconds)
            found["matmul"][dtype] = {"flops": max(tried.values()), "tried": tried}
    # Torch keeps what it has freed; JAX is to have it.
    torch.cuda.empty_cache()
    return found


def stated_peak(dtype: str) -> float | None:
    """What the maker of this accelerator states for its matrix products, in FLOP/s, if known."""
    import jax

    from jaxformer.training.devices import find_accelerator

    accelerator = find_accelerator(jax.devices()[0].device_kind)
    return None if accelerator is None else accelerator.peak(dtype)


def _matmul(dtype: str, seconds: float) -> dict[str, float]:
    """FLOP/s of each framework's fastest product at each size."""
    import jax
    import jax.numpy as jnp
    import torch

    device = torch_device()
    sizes = (4096, 8192, 16384) if device.type == "cuda" else (512, 1024, 2048)
    product: Any = jax.jit(jnp.matmul)
    tried = {}
    for size in sizes:
        x = jax.random.normal(jax.random.key(0), (size, size), dtype)
        a = torch.randn(size, size, device=device, dtype=getattr(torch, dtype))
        out = torch.empty_like(a)

        def by_jax(x: Any = x) -> None:
            jax.block_until_ready(product(x, x))

        def by_torch(a: Any = a, out: Any = out) -> None:
            torch.matmul(a, a, out=out)
            wait_for_torch()

        for name, call in (("jax", by_jax), ("torch", by_torch)):
            tried[f"{name} {size}"] = rounded(2 * size**3 / _fastest(call, seconds))
    return tried


def _bandwidth(seconds: float) -> dict[str, float]:
    """Bytes per second of the fastest read and copy of either framework, far beyond the caches."""
    import jax
    import jax.numpy as jnp
    import torch

    device = torch_device()
    rows, columns = (2**15, 2**15) if device.type == "cuda" else (2**13, 2**13)
    size = 4 * rows * columns
    x, v = jnp.ones((rows, columns)), jnp.ones(columns)
    a = torch.ones(rows, columns, device=device)
    b, w = torch.empty_like(a), torch.ones(columns, device=device)
    product: Any = jax.jit(jnp.matmul)
    total: Any = jax.jit(jnp.sum)

    def wait(work: Callable[[], Any]) -> Callable[[], None]:
        def call() -> None:
            jax.block_until_ready(work())
            wait_for_torch()

        return call

    reads: list[Callable[[], Any]] = [
        lambda: product(x, v), lambda: total(x), lambda: torch.mv(a, w), lambda: a.sum()
    ]  # fmt: skip
    return {
        "read": rounded(max(size / _fastest(wait(work), seconds) for work in reads)),
        "copy": rounded(2 * size / _fastest(wait(lambda: b.copy_(a)), seconds)),
    }


def _fastest(call: Callable[[], None], seconds: float) -> float:
    """The shortest of as many calls as fit, at least three, after one that does not count."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        times.append(seconds_of(call))
    return min(times)


def _flags() -> str:
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        return next(line for line in file if line.startswith("flags"))
    return ""
