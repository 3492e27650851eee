"""Measures whose products are the fastest on this machine, and keeps the answer."""

import concurrent.futures
import contextlib
import functools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float

from jaxformer.execution.called_products import product
from jaxformer.hardware import custom_call_builds, custom_calls
from jaxformer.hardware.custom_call_builds import OF_A_STEP, UnavailableError, fast_options
from jaxformer.hardware.matrix_products import (
    LIBRARIES,
    Library,
    are_registered,
    check_products,
)
from jaxformer.hardware.processor import is_intel, processor_kind
from jaxformer.hardware.torch_library import torch_version
from jaxformer.hardware.user_folders import user_cache
from jaxformer.storage.durable_files import atomic_write_text

# How many times as fast as XLA's the products of others must be. A step gains more than these do,
# as custom calls bring no head of attention to another place: where this said 1.03, a step of nano
# was 1.12 times as fast.
LEAST_GAIN = 1.0
# All are measured in turn for so many seconds in all, and the fastest turn of each counts.
SECONDS, FEWEST_TURNS = 0.15, 5
# One is left out once half of its turns are so much slower than the fastest of another: whatever
# else the machine does makes turns longer, and none shorter.
CLEAR_GAIN, CLEAR_TURNS = 1.2, 3
# Larger products are as much faster, and would take long to measure, and memory: R, D and F.
LARGEST_SHAPE = 2048, 1024, 4096
# Products of a feed-forward in a turn, so that a turn is longer than what starts it.
OPERATIONS_IN_TURN = 1e9
# torch's are Intel's, which use less of the processors of others.
_LIBRARIES: tuple[Library, ...] = LIBRARIES if is_intel() else ("jaxformer",)
# Narrower products of jaxformer's are as fast as torch's, within 3 %, and a step with them is as
# fast, as GELU is made with them. To load torch's library, and to compile what is timed with it,
# takes half a second. D of a feed-forward.
LEAST_WIDTH_OF_TORCH = 1024
# How many times as fast as XLA's the products of each library are.
Gains = Mapping[Library, float]


def fastest_library(
    rows: int, inputs: int, outputs: int, devices: Sequence[jax.Device]
) -> Library | None:
    """Returns whose products are the fastest for a feed-forward, known to XLA; None for XLA's own.

    It is measured, forward and backward, once for each kind of processor, versions and shape, and
    kept in the user's cache. A machine that is busy meanwhile may answer otherwise than a quiet
    one.

    Args:
        rows: of each device, R.
        inputs: of the feed-forward, D.
        outputs: of its first matrix, F.
        devices: CPU devices, which compute at the same time.
    """
    available = [library for library in _LIBRARIES if _is_available(library)]
    if not available:
        return None
    if "jaxformer" in available and inputs < LEAST_WIDTH_OF_TORCH:
        available = ["jaxformer"]
    gains = _gains_here(available, (rows, inputs, outputs), devices)
    fastest = max(gains, key=lambda library: gains[library], default=None)
    if fastest is None or gains[fastest] < LEAST_GAIN or not are_registered(fastest):
        return None
    return fastest


def _is_available(library: Library) -> bool:
    try:
        check_products(library)
    except UnavailableError:
        return False
    return True


def _gains_here(
    libraries: Sequence[Library], shape: tuple[int, int, int], devices: Sequence[jax.Device]
) -> Gains:
    """Returns ``_measure_gains``, measured now or before."""
    versions = [metadata.version("jaxlib"), metadata.version("jaxformer"), *libraries]
    versions += [torch_version()] if "torch" in libraries else []
    rows, inputs, outputs = map(min, shape, LARGEST_SHAPE)
    shape = rows, inputs, outputs
    key = " ".join(map(str, (processor_kind(), *versions, *shape, len(devices))))
    path = user_cache() / "products.json"
    known = _read(path)
    if key not in known:
        known = {**_read(path), key: _measure_gains(libraries, shape, devices)}
        _write(path, known)
    return known[key]


def _read(path: Path) -> dict[str, Gains]:
    """Returns the gains that were measured before; none where the file is missing or damaged."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    items = known.items() if isinstance(known, dict) else ()
    return {key: gains for key, gains in items if _are_gains(gains)}


def _are_gains(found: Any) -> bool:
    return isinstance(found, dict) and all(
        library in LIBRARIES and isinstance(gain, float) for library, gain in found.items()
    )


def _write(path: Path, known: Mapping[str, Gains]) -> None:
    """Keeps them, where the cache can be written to; else they are measured again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(path, json.dumps(known, indent=1))


def _measure_gains(
    libraries: Sequence[Library], shape: tuple[int, int, int], devices: Sequence[jax.Device]
) -> Gains:
    """Returns XLA's time for a feed-forward divided by that of each library that can be used."""
    turns = max(1, round(OPERATIONS_IN_TURN / (12 * np.prod(shape) * len(devices))))
    prepare = functools.partial(_timed_call, turns=turns, shape=shape, devices=devices)

    def prepare_library(library: Library) -> Callable[[], Any] | None:
        multiply = functools.partial(product, library)
        return prepare(multiply) if are_registered(library) else None

    # Programs are compiled while a C compiler builds what others call, and what a run with called
    # products needs besides.
    besides = () if custom_call_builds.are_off() else OF_A_STEP
    with concurrent.futures.ThreadPoolExecutor(2 + len(libraries), "products") as threads:
        for name in besides:
            threads.submit(custom_calls.load, name, fast_options(name))
        call_of_xla = threads.submit(prepare, jnp.matmul)
        prepared = list(threads.map(prepare_library, libraries))
    found = zip(libraries, prepared, strict=True)
    calls = {library: call for library, call in found if call is not None}
    seconds = _time_in_turn({None: call_of_xla.result(), **calls})
    return {library: round(seconds[None] / seconds[library], 3) for library in calls}


def _time_in_turn(calls: Mapping[Any, Callable[[], Any]]) -> dict[Any, float]:
    """Returns the time of the fastest call of each; until it is clear which are not the fastest."""
    seconds: dict[Any, list[float]] = {name: [] for name in calls}
    left, turns, end = list(calls), 0, time.perf_counter() + SECONDS
    while len(left) > 1 and (turns < FEWEST_TURNS or time.perf_counter() < end):
        for name in left:
            begin = time.perf_counter()
            calls[name]()
            seconds[name].append(time.perf_counter() - begin)
        turns += 1
        if turns >= CLEAR_TURNS:
            left = [name for name in left if not _is_clearly_slower(name, seconds)]
    return {name: min(found) for name, found in seconds.items()}


def _is_clearly_slower(name: Any, seconds: Mapping[Any, Sequence[float]]) -> bool:
    fastest = min(seconds[name])
    return any(statistics.median(found) * CLEAR_GAIN < fastest for found in seconds.values())


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
