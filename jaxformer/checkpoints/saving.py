"""One save: begun while training waits, finished in a thread beside it."""

import concurrent.futures
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from jaxformer.checkpoints import orbax_arrays
from jaxformer.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    Arrays,
    Manifest,
    array_bytes,
    describe,
    flatten,
    read_manifest,
    serialize_manifest,
    state_hash,
    versions,
)
from jaxformer.distributed.control_plane import ControlPlane, brief_reason, merge_parts
from jaxformer.errors import CheckpointError, ResourceError
from jaxformer.storage import durable_files as files

# An upper bound of what each array takes in the manifest and in Orbax's own files, beside its
# numbers; and of the rest of these files, some of which exist twice for a moment.
BYTES_PER_ARRAY = 2048
BYTES_PER_SAVE = 64 * 1024
FULL = "No space left on device"
HINTS = {
    FULL: "free some",
    "Permission denied": "make it writable",
    "File too large": "raise the limit of a file's size (ulimit -f)",
    "Disk quota exceeded": "free some",
}
# How often a failed save's folder is removed, and the seconds between two attempts.
ATTEMPTS, PAUSE = 20, 0.05


class CheckpointWriter:
    """Writes one step; it is made while training waits, as long as arrays must not change.

    All processes make it together; process 0 alone writes the manifest and renames. Arrays that
    lie whole in one process are hashed in its memory. Of others each process reads its share back
    from the disk, whole, and hashes that.

    Args:
        target: the step's folder.
        step: its number.
        arrays: see ``CheckpointFolder.save``.
        about: see ``CheckpointFolder.save``.
        rename: called in process 0 with the temporary folder, once that is complete.
        last_saved: returns which step is saved already, in words.

    Raises:
        ResourceError: there is no room, or it may not be written; nothing is left behind.
    """

    def __init__(
        self,
        target: Path,
        step: int,
        arrays: Arrays,
        about: Mapping[str, Any],
        rename: Callable[[Path], None],
        last_saved: Callable[[], str],
    ):
        self._target, self._step, self._about = target, step, about
        self._rename, self._last_saved = rename, last_saved
        self._control_plane = ControlPlane("save")
        named = flatten(arrays)
        self._sizes = {name: int(array.nbytes) for name, array in named.items()}
        self._arrays: Arrays = {}
        self._finish_write: Callable[[], None] | None = None
        self._temporary = files.temporary_path(target)
        try:
            self._temporary = Path(self._control_plane.on_primary(self._prepare))
            if any(map(orbax_arrays.is_distributed, named.values())):
                self._finish_write = orbax_arrays.begin_write(
                    self._arrays_folder, arrays, self._control_plane
                )
            elif self._control_plane.index == 0:
                self._arrays = orbax_arrays.on_host(arrays)
        except Exception as error:
            self._fail(error)

    def start(self) -> "concurrent.futures.Future[Manifest]":
        """Starts a thread that writes and commits the step; the future's result is the manifest."""
        future: concurrent.futures.Future[Manifest] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(self._write_and_commit())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name=f"save of step {self._step}").start()
        return future

    @property
    def _arrays_folder(self) -> Path:
        return self._temporary / "arrays"

    def _prepare(self) -> str:
        folder = self._target.parent
        if self._existing_manifest() is None:
            files.check_space(folder, self._bytes_needed())
        if not folder.exists():
            folder.mkdir(parents=True)
            files.sync_path(folder.parent)
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        return str(self._temporary)

    def _write_and_commit(self) -> Manifest:
        try:
            if self._finish_write is not None:
                return self._write_sharded(self._finish_write)
            manifest: Manifest = self._control_plane.on_primary(self._write_whole)
            return manifest
        except Exception as error:
            self._fail(error)
        finally:
            self._arrays = {}

    def _write_whole(self) -> Manifest:
        manifest = self._make_manifest(describe(self._arrays))
        if not self._is_committed(manifest):
            orbax_arrays.write(self._arrays_folder, self._arrays)
            manifest["files"] = self._digests(
                files.list_files(self._arrays_folder, self._arrays_folder)
            )
        return self._commit(manifest)

    def _write_sharded(self, finish_write: Callable[[], None]) -> Manifest:
        control_plane = self._control_plane
        try:
            finish_write()
        except Exception as error:
            if not control_plane.broken:
                # The others wait for this process: they receive its error instead of a value.
                reason = ResourceError(brief_reason(error))
                control_plane.all_gather(lambda: _raise(reason))
            raise
        found = control_plane.on_primary(
            lambda: files.list_files(self._arrays_folder, self._arrays_folder)
        )
        digests = merge_parts(
            control_plane.all_gather(lambda: self._digests(control_plane.share_of_work(found)))
        )
        described = control_plane.on_primary(lambda: orbax_arrays.read_shapes(self._arrays_folder))
        sizes = {name: array_bytes(what) for name, what in described.items()}
        share = {name: described[name] for name in control_plane.share_of_work(sizes)}
        hashes = merge_parts(
            control_plane.all_gather(lambda: orbax_arrays.read_and_hash(self._arrays_folder, share))
        )
        manifest = self._make_manifest({name: hashes[name] for name in self._sizes})
        manifest["files"] = dict(sorted(digests.items()))
        finished: Manifest = control_plane.on_primary(lambda: self._commit(manifest))
        return finished

    def _make_manifest(self, described: Mapping[str, Any]) -> Manifest:
        return {
            "format": FORMAT,
            "step": self._step,
            "state_sha256": state_hash(described),
            **self._about,
            "versions": versions(),
            "arrays": described,
        }

    def _digests(self, names: Iterable[str]) -> dict[str, str]:
        folder = self._arrays_folder
        return files.on_all_cores(lambda name: files.sha256_of_file(folder / name), names)

    def _bytes_needed(self) -> int:
        return sum(self._sizes.values()) + BYTES_PER_ARRAY * len(self._sizes) + BYTES_PER_SAVE

    def _existing_manifest(self) -> Manifest | None:
        """Returns the manifest of a folder that has the step's name already, if it is whole."""
        try:
            return read_manifest(self._target / MANIFEST, self._step)
        except CheckpointError:
            return None

    def _is_committed(self, manifest: Manifest) -> bool:
        known = self._existing_manifest()
        return known is not None and known["state_sha256"] == manifest["state_sha256"]

    def _commit(self, manifest: Manifest) -> Manifest:
        if self._is_committed(manifest):
            # The same state is on the disk already: only its manifest is new.
            manifest["files"] = (self._existing_manifest() or manifest)["files"]
            files.atomic_write_text(self._target / MANIFEST, serialize_manifest(manifest))
            shutil.rmtree(self._temporary, ignore_errors=True)
        else:
            files.sync_tree(self._temporary)
            files.atomic_write_text(self._temporary / MANIFEST, serialize_manifest(manifest))
            # A manifest that could not be read must not replace one that can.
            read_manifest(self._temporary / MANIFEST, self._step)
            self._rename(self._temporary)
        return manifest

    def _fail(self, error: Exception) -> NoReturn:
        room = files.describe_space(self._target.parent, self._bytes_needed())
        if self._control_plane.index == 0:
            _remove_for_good(self._temporary)
        if self._control_plane.lost:
            raise error
        reason = brief_reason(error)
        hint = f": {HINTS[reason]}" if reason in HINTS else ""
        if reason == FULL:
            reason = f"{reason} ({room})"
        failure = ResourceError.could_not(
            "save", self._target, f"{reason}{hint}; {self._last_saved()}"
        )
        failure.already_reported = self._control_plane.index != 0
        raise failure from error


def _remove_for_good(folder: Path) -> None:
    """Removes a folder in which other threads of a save that failed may still write for a moment.

    TensorStore makes the folders of what it writes anew. What is left after some attempts is
    temporary by its name, and is removed when the run is resumed.
    """
    for _ in range(ATTEMPTS):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(PAUSE)
        if not folder.exists():
            return


def _raise(error: Exception) -> NoReturn:
    raise error
