"""Steps read back, and compared with their manifests."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.checkpoints import arrays as stored
from jaxformer.checkpoints.manifest import (
    MANIFEST,
    Arrays,
    Manifest,
    check_same,
    describe_array,
    flat,
    nested,
    read_manifest,
    size_of,
)
from jaxformer.distributed.control_plane import ControlPlane, merged
from jaxformer.errors import CheckpointError
from jaxformer.storage import durable_files as files

Change = Callable[[str, np.ndarray], np.ndarray]
Accept = Callable[[Manifest], Change | None]


def restore(
    folder: Path,
    step: int,
    shardings: Arrays | None = None,
    accept: Accept | None = None,
    *,
    alone: bool = False,
) -> tuple[Arrays, Manifest]:
    """See ``CheckpointFolder.restore``; ``alone`` is for a process that shares it with nobody."""
    control_plane = ControlPlane("restore", alone=alone)
    manifest = control_plane.first(lambda: read_manifest(folder / MANIFEST, step))
    change = None if accept is None else control_plane.all_or_raise(lambda: accept(manifest))
    _check_files(folder, manifest, control_plane)
    inside, described = folder / "arrays", manifest["arrays"]
    control_plane.first(lambda: stored.check_stored(inside, described))
    if shardings is None:
        control_plane.each(lambda: _check_memory(folder, described))
    placed = None if shardings is None else flat(shardings)

    def hashed(names: list[str], keep: Callable[[str, np.ndarray], None]) -> dict[str, Any]:
        found = {}
        for part in stored.batches({name: described[name] for name in names}):
            for name, array in stored.read(inside, part).items():
                found[name] = describe_array(array)
                keep(name, array)
        return found

    if shardings is None or change is not None or control_plane.count == 1:
        named: dict[str, Any] = {}

        def keep(name: str, array: np.ndarray) -> None:
            array = array if change is None else change(name, array)
            named[name] = array if placed is None else _place(array, placed[name])

        found = control_plane.each(lambda: hashed(list(described), keep))[control_plane.index]
        check_same("arrays", folder, manifest, found)
        return nested(named), manifest
    mine = control_plane.share({name: size_of(what) for name, what in described.items()})
    found = merged(control_plane.each(lambda: hashed(mine, lambda name, array: None)))
    check_same("arrays", folder, manifest, found)
    arrays = control_plane.all_or_raise(lambda: stored.read_placed(inside, described, shardings))
    return arrays, manifest


def newest(
    folder: Path,
    steps: list[int],
    shardings: Arrays | None = None,
    accept: Accept | None = None,
    put_aside: Callable[[int], str] | None = None,
    *,
    alone: bool = False,
) -> tuple[Arrays, Manifest, list[str]]:
    """See ``CheckpointFolder.restore_latest``.

    Args:
        folder: of the checkpoints.
        steps: those to try, in order of step.
        shardings: see ``CheckpointFolder.restore``.
        accept: see ``CheckpointFolder.restore_latest``.
        put_aside: moves a damaged step out of the way, and says where.
        alone: see ``restore``.
    """
    damaged: dict[int, str] = {}
    refusals: list[Exception] = []

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            try:
                return function(*arguments)
            except Exception as error:
                refusals.append(error)
                raise

        return call

    def accepted(manifest: Manifest) -> Change | None:
        change = None if accept is None else noted(accept)(manifest)
        return None if change is None else noted(change)

    for step in reversed(steps):
        try:
            found = restore(folder / str(step), step, shardings, accepted, alone=alone)
        except CheckpointError as error:
            if refusals:
                raise
            damaged[step] = str(error)
            continue
        # Only now: a search that ends in a refusal changes nothing.
        moved = {step: f"; moved to {put_aside(step)}" for step in damaged if put_aside is not None}
        return *found, [f"{why}{moved.get(step, '')}" for step, why in damaged.items()]
    raise CheckpointError(
        "; ".join(damaged.values()) or f"there is no checkpoint in {folder}: train one first"
    )


def _check_files(folder: Path, manifest: Manifest, control_plane: ControlPlane) -> None:
    """Each process hashes its share of the files."""
    inside = folder / "arrays"
    found = control_plane.first(
        lambda: {
            name: size
            for name, size in files.list_files(folder, inside).items()
            # A manifest that was about to be written anew leaves a temporary one behind.
            if name != f"../{MANIFEST}" and not re.fullmatch(rf"\.\./\.{MANIFEST}\.\d+\.tmp", name)
        }
    )
    strange = dict.fromkeys(found.keys() - manifest["files"].keys(), "")
    known = {name: size for name, size in found.items() if name not in strange}
    parts = control_plane.each(lambda: {n: _digest(inside / n) for n in control_plane.share(known)})
    check_same("files", folder, manifest, merged(parts) | strange)


def _digest(path: Path) -> str:
    try:
        return files.sha256_of_file(path)
    except OSError as error:
        return f"unreadable: {error.strerror}"


def _check_memory(folder: Path, described: dict[str, Any]) -> None:
    """Checks that the arrays can be held at all, as this process holds all of them."""
    need = sum(map(size_of, described.values()))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > memory:
        raise CheckpointError(
            f"{folder} claims arrays of {need / 1e9:,.1f} GB: this machine has {memory / 1e9:,.1f}"
        )


def _place(array: np.ndarray, sharding: Any) -> Any:
    import jax

    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
