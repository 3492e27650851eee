"""Measures what this machine reaches at most, in matrix products and in reading memory."""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from measure import on_gpu, rounded, seconds_of, torch_device, wait_for_torch
from stand_ins import uses_only_avx2


def measure_limits(
    dtypes: Sequence[str] = ("float32",), *, seconds: float | None = None
) -> dict[str, Any]:
    """Measures what this machine reaches in matrix products and in reading memory.

    Args:
        dtypes: ``float32`` and ``bfloat16``, of the matrix products; one that the processor has
            no instructions for is left out.
        seconds: how long each framework tries at each size; the fastest call counts. Default 0.5,
            and 0.2 on a GPU, which no one else uses meanwhile.

    Returns:
        ``matmul``: by dtype the best ``flops`` (per second) and, in ``tried``, the best of each
        framework at each size. ``memory``: ``read`` and ``copy`` in bytes per second, a copy
        counted as one read and one write.
    """
    import torch

    if seconds is None:
        seconds = 0.2 if on_gpu() else 0.5
    found: dict[str, Any] = {"matmul": {}, "memory": _bandwidth(seconds)}
    for dtype in dtypes:
        if dtype == "float32" or on_gpu() or "bf16" in _flags():
            tried = _matmul(dtype, seconds)
            found["matmul"][dtype] = {"flops": max(tried.values()), "tried": tried}
    # Torch keeps what it has freed; JAX is to have it.
    torch.cuda.empty_cache()
    return found


def stated_peak(dtype: str) -> float | None:
    """Returns the peak FLOP/s in matrix products that this accelerator's maker states, if known."""
    import jax

    from jaxformer.hardware.accelerators import find_accelerator

    accelerator = find_accelerator(jax.devices()[0].device_kind)
    return None if accelerator is None else accelerator.peak(dtype)


def products_for(
    tried: Mapping[str, float], dtype: str, seconds: float = 1.0
) -> tuple[Callable[[], None], float]:
    """Returns a call that repeats the fastest of the tried products for about ``seconds``.

    Timed in turn with what is measured, they show what a shared machine gives meanwhile.

    Args:
        tried: of ``measure_limits`` for this dtype.
        dtype: of the product.
        seconds: how long a call is to take.

    Returns:
        A call, and how many operations are made in it.
    """
    best = max(tried, key=lambda name: tried[name])
    framework, size = best.split()
    operations = 2 * int(size) ** 3
    times = max(1, round(seconds * tried[best] / operations))
    product = _product(framework, int(size), dtype)

    def call() -> None:
        for _ in range(times):
            product()

    return call, float(times * operations)


def _matmul(dtype: str, seconds: float) -> dict[str, float]:
    """Returns the FLOP/s of each framework's fastest product at each size."""
    sizes = (4096, 8192, 16384) if torch_device().type == "cuda" else (512, 1024, 2048)
    return {
        f"{framework} {size}": rounded(
            2 * size**3 / _fastest(_product(framework, size, dtype), seconds)
        )
        for size in sizes
        for framework in (("torch",) if uses_only_avx2() else ("jax", "torch"))
    }


def _product(framework: str, size: int, dtype: str) -> Callable[[], None]:
    """Returns a function that makes a square matrix product and returns when it is done."""
    import jax
    import jax.numpy as jnp
    import torch

    if framework == "jax":
        x = jax.random.normal(jax.random.key(0), (size, size), dtype)
        product: Any = jax.jit(jnp.matmul)
        return lambda: jax.block_until_ready(product(x, x))
    a = torch.randn(size, size, device=torch_device(), dtype=getattr(torch, dtype))
    out = torch.empty_like(a)

    def by_torch() -> None:
        torch.matmul(a, a, out=out)
        wait_for_torch()

    return by_torch


def _bandwidth(seconds: float) -> dict[str, float]:
    """Returns the bytes per second of the fastest read and copy, of arrays beyond the caches."""
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
    """Returns the seconds of the shortest of the calls that fit, after one that is not timed."""
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
