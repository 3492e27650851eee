"""Reads steps back and compares them with their manifests."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.checkpoints import orbax_arrays
from jaxformer.checkpoints.manifest import (
    MANIFEST,
    Arrays,
    Manifest,
    array_bytes,
    check_same,
    flatten,
    read_manifest,
    unflatten,
)
from jaxformer.distributed.control_plane import ControlPlane, merge_parts
from jaxformer.errors import CheckpointError
from jaxformer.storage import durable_files as files

Transform = Callable[[str, np.ndarray], np.ndarray]
Accept = Callable[[Manifest], Transform | None]


def restore(
    folder: Path,
    step: int,
    shardings: Arrays | None = None,
    accept: Accept | None = None,
    *,
    alone: bool = False,
) -> tuple[Arrays, Manifest]:
    """Reads one step; see ``CheckpointFolder.restore``.

    Args:
        folder: of the step.
        step: its number.
        shardings: see ``CheckpointFolder.restore``.
        accept: see ``CheckpointFolder.restore``.
        alone: whether this process works by itself, however many there are.
    """
    control_plane = ControlPlane("restore", alone=alone)
    manifest = control_plane.on_primary(lambda: read_manifest(folder / MANIFEST, step))
    transform = None if accept is None else control_plane.all_or_raise(lambda: accept(manifest))
    _check_files(folder, manifest, control_plane)
    inside, described = folder / "arrays", manifest["arrays"]
    control_plane.on_primary(lambda: orbax_arrays.check_shapes(inside, described))
    if shardings is None:
        control_plane.all_gather(lambda: _check_memory(folder, described))
    placed = None if shardings is None else flatten(shardings)

    if shardings is None or transform is not None or control_plane.count == 1:
        named: dict[str, Any] = {}

        def keep(name: str, array: np.ndarray) -> None:
            array = array if transform is None else transform(name, array)
            named[name] = array if placed is None else _place(array, placed[name])

        hashes = control_plane.all_gather(
            lambda: orbax_arrays.read_and_hash(inside, described, keep)
        )
        found = hashes[control_plane.index]
        check_same("arrays", folder, manifest, found)
        return unflatten(named), manifest
    sizes = {name: array_bytes(what) for name, what in described.items()}
    share = {name: described[name] for name in control_plane.share_of_work(sizes)}
    hashes = control_plane.all_gather(lambda: orbax_arrays.read_and_hash(inside, share))
    found = merge_parts(hashes)
    check_same("arrays", folder, manifest, found)
    arrays = control_plane.all_or_raise(
        lambda: orbax_arrays.read_sharded(inside, described, shardings)
    )
    return arrays, manifest


def verify(folder: Path, step: int) -> None:
    """Reads one step, keeps nothing of it, and compares it with its manifest.

    This process works by itself, however many there are.

    Args:
        folder: of the step.
        step: its number.

    Raises:
        CheckpointError: something is missing or differs; all differences are named.
    """
    manifest = read_manifest(folder / MANIFEST, step)
    _check_files(folder, manifest, ControlPlane("verify", alone=True))
    inside, described = folder / "arrays", manifest["arrays"]
    orbax_arrays.check_shapes(inside, described)
    check_same("arrays", folder, manifest, orbax_arrays.read_and_hash(inside, described))


def restore_newest(
    folder: Path,
    steps: list[int],
    shardings: Arrays | None = None,
    accept: Accept | None = None,
    quarantine: Callable[[int], str] | None = None,
    *,
    alone: bool = False,
) -> tuple[Arrays, Manifest, list[str]]:
    """Reads the newest step that verifies; see ``CheckpointFolder.restore_latest``.

    Args:
        folder: of the checkpoints.
        steps: those to try, in order of step.
        shardings: see ``CheckpointFolder.restore``.
        accept: see ``CheckpointFolder.restore_latest``.
        quarantine: moves a damaged step away and returns where.
        alone: see ``restore``.
    """
    damaged: dict[int, str] = {}
    rejections: list[Exception] = []

    def record_rejection(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except Exception as error:
                rejections.append(error)
                raise

        return call

    def accepted(manifest: Manifest) -> Transform | None:
        transform = None if accept is None else record_rejection(accept)(manifest)
        return None if transform is None else record_rejection(transform)

    for step in reversed(steps):
        try:
            found = restore(folder / str(step), step, shardings, accepted, alone=alone)
        except CheckpointError as error:
            if rejections:
                raise
            damaged[step] = str(error)
            continue
        # Only now: a search that ends in an error changes nothing on the disk.
        moved = {
            step: f"; moved to {quarantine(step)}" for step in damaged if quarantine is not None
        }
        return *found, [f"{why}{moved.get(step, '')}" for step, why in damaged.items()]
    raise CheckpointError(
        "; ".join(damaged.values()) or f"there is no checkpoint in {folder}: train one first"
    )


def _check_files(folder: Path, manifest: Manifest, control_plane: ControlPlane) -> None:
    """Compares the files with the manifest; each process hashes its share of them."""
    inside = folder / "arrays"
    found = control_plane.on_primary(
        lambda: {
            name: size
            for name, size in files.list_files(folder, inside).items()
            # A process that ended while it replaced the manifest leaves a temporary one behind.
            if name != f"../{MANIFEST}" and not re.fullmatch(rf"\.\./\.{MANIFEST}\.\d+\.tmp", name)
        }
    )
    unexpected = dict.fromkeys(found.keys() - manifest["files"].keys(), "")
    known = {name: size for name, size in found.items() if name not in unexpected}
    share = control_plane.share_of_work(known)
    parts = control_plane.all_gather(
        lambda: files.on_all_cores(lambda name: _digest(inside / name), share)
    )
    check_same("files", folder, manifest, merge_parts(parts) | unexpected)


def _digest(path: Path) -> str:
    try:
        return files.sha256_of_file(path)
    except OSError as error:
        return f"unreadable: {error.strerror}"


def _check_memory(folder: Path, described: dict[str, Any]) -> None:
    """Checks that this process, which reads all arrays, has the memory for them."""
    need = sum(map(array_bytes, described.values()))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > memory:
        raise CheckpointError(
            f"{folder} claims arrays of {need / 1e9:,.1f} GB: this machine has {memory / 1e9:,.1f}"
        )


def _place(array: np.ndarray, sharding: Any) -> Any:
    import jax

    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
