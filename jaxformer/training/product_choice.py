"""Measures which products are faster on this machine, XLA's or torch's, and keeps the answer."""

import concurrent.futures
import contextlib
import functools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from jaxformer.execution.torch_products import product
from jaxformer.hardware.custom_calls import UnavailableError
from jaxformer.hardware.processor import processor_kind
from jaxformer.hardware.torch_library import check_products, register_products, torch_version
from jaxformer.hardware.user_folders import user_cache
from jaxformer.storage.durable_files import atomic_write_text

# How much faster torch's must be: below, a run gains too little to leave what XLA computes itself.
LEAST_GAIN = 1.05
# Both are measured in turn for so many seconds in all, and the fastest turn of each counts.
SECONDS, FEWEST_TURNS = 0.3, 5
# No more are made once half of the turns of one are so much faster than the fastest of the other:
# whatever else the machine does makes turns longer, and none shorter.
CLEAR_GAIN, CLEAR_TURNS = 1.2, 3
# Larger products are as much faster, and would take long to measure, and memory: R, D and F.
LARGEST_SHAPE = 2048, 1024, 4096
# Products of a feed-forward in a turn, so that a turn is longer than what starts it.
OPERATIONS_IN_TURN = 1e9


def is_torch_faster(rows: int, inputs: int, outputs: int, devices: Sequence[jax.Device]) -> bool:
    """Returns whether torch's products are faster for a feed-forward, and known to XLA.

    It is measured, forward and backward, once for each kind of processor, versions and shape, and
    kept in the user's cache. A machine that is busy meanwhile may answer otherwise than a quiet
    one.

    Args:
        rows: of each device, R.
        inputs: of the feed-forward, D.
        outputs: of its first matrix, F.
        devices: CPU devices, which compute at the same time.
    """
    try:
        if _gain_here(rows, inputs, outputs, devices) < LEAST_GAIN:
            return False
        register_products()
    except UnavailableError:
        return False
    return True


def _gain_here(rows: int, inputs: int, outputs: int, devices: Sequence[jax.Device]) -> float:
    """Returns ``_gain``, measured now or before.

    Raises:
        UnavailableError: torch's products cannot be used here.
    """
    versions = metadata.version("jaxlib"), torch_version()
    rows, inputs, outputs = map(min, (rows, inputs, outputs), LARGEST_SHAPE)
    key = " ".join(map(str, (processor_kind(), *versions, rows, inputs, outputs, len(devices))))
    path = user_cache() / "products.json"
    known = _read(path)
    if key not in known:
        known = {**_read(path), key: round(_gain(rows, inputs, outputs, devices), 3)}
        _write(path, known)
    return known[key]


def _read(path: Path) -> dict[str, float]:
    """Returns the gains that were measured before; none where the file is missing or damaged."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    items = known.items() if isinstance(known, dict) else ()
    return {name: gain for name, gain in items if isinstance(gain, float)}


def _write(path: Path, known: dict[str, float]) -> None:
    """Keeps them, where the cache can be written to; else they are measured again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, json.dumps(known, indent=1))


def _gain(rows: int, inputs: int, outputs: int, devices: Sequence[jax.Device]) -> float:
    """Returns XLA's time for a feed-forward divided by that of torch's products.

    Raises:
        UnavailableError: torch's products cannot be used here.
    """
    turns = max(1, round(OPERATIONS_IN_TURN / (12 * rows * inputs * outputs * len(devices))))
    prepare = functools.partial(
        _timed_call, turns=turns, shape=(rows, inputs, outputs), devices=devices
    )
    check_products()
    # XLA's is compiled while a C compiler builds what calls torch's.
    thread = concurrent.futures.ThreadPoolExecutor(1, "products")
    call_of_xla = thread.submit(prepare, jnp.matmul)
    thread.shutdown(wait=False)
    register_products()
    call_of_torch = prepare(product)
    return _time_in_turn(call_of_xla.result(), call_of_torch)


def _time_in_turn(call_of_xla: Callable[[], Any], call_of_torch: Callable[[], Any]) -> float:
    """Returns the time of the fastest call of XLA's divided by that of torch's."""
    of_xla: list[float] = []
    of_torch: list[float] = []
    end = time.perf_counter() + SECONDS
    while len(of_xla) < FEWEST_TURNS or time.perf_counter() < end:
        for call, seconds in ((call_of_xla, of_xla), (call_of_torch, of_torch)):
            begin = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - begin)
        if len(of_xla) >= CLEAR_TURNS and (
            _is_clearly_faster(of_xla, of_torch) or _is_clearly_faster(of_torch, of_xla)
        ):
            break
    return min(of_xla) / min(of_torch)


def _is_clearly_faster(seconds: Sequence[float], of_other: Sequence[float]) -> bool:
    return statistics.median(seconds) * CLEAR_GAIN < min(of_other)


def _timed_call(
    multiply: Callable[[Array, Array], Array],
    turns: int,
    shape: tuple[int, int, int],
    devices: Sequence[jax.Device],
) -> Callable[[], Any]:
    """Returns what computes the gradient of a feed-forward so many times, compiled."""
    rows, inputs, outputs = shape

    def loss(arrays: tuple[Array, Array, Array]) -> Float[Array, ""]:
        x_RD, in_DF, out_FD = arrays
        return jnp.sum(jnp.square(multiply(multiply(x_RD, in_DF), out_FD)))

    def turn(_: int, arrays: tuple[Array, Array, Array]) -> Any:
        # Each turn needs the one before, so that none can be left out.
        return jax.tree.map(lambda x, dx: x - 1e-9 * dx, arrays, jax.grad(loss)(arrays))

    mesh = Mesh(np.asarray(devices), ("data",))
    cut, whole = PartitionSpec("data"), PartitionSpec()
    program = jax.jit(
        jax.shard_map(
            lambda *arrays: jax.lax.fori_loop(0, turns, turn, arrays)[0],
            mesh=mesh,
            in_specs=(cut, whole, whole),
            out_specs=cut,
            check_vma=False,
        )
    )
    random = np.random.default_rng(0)
    sizes = (rows * len(devices), inputs), (inputs, outputs), (outputs, inputs)
    arrays = [random.standard_normal(size, np.float32) for size in sizes]
    compiled = program.lower(*arrays).compile()
    call = functools.partial(compiled, *arrays)
    jax.block_until_ready(call())
    return lambda: jax.block_until_ready(call())
