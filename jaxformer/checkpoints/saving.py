"""One save: begun while training waits, finished beside it."""

import concurrent.futures
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from jaxformer.checkpoints import arrays as stored
from jaxformer.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    Arrays,
    Manifest,
    describe,
    describe_array,
    flat,
    read_manifest,
    seal,
    size_of,
    state_hash,
    versions,
)
from jaxformer.distributed.control_plane import ControlPlane, merged, one_line
from jaxformer.errors import CheckpointError, ResourceError
from jaxformer.storage import durable_files as files

# What an array takes in the manifest and in Orbax's own files, beside its numbers, at most; and
# what these files take beside that, some of them twice for a moment.
BYTES_PER_ARRAY = 2048
BYTES_PER_SAVE = 64 * 1024
FULL = "No space left on device"
HINTS = {FULL: "free some", "Permission denied": "make it writable"}


class Save:
    """One step on its way to the disk; made while training waits.

    All processes make it together; process 0 alone names, seals and renames. Arrays that a process
    sees the whole of are hashed in its memory. Of others each process reads its share back from
    the disk, whole, and hashes that.

    Args:
        target: the step's folder.
        step: its number.
        arrays: see ``CheckpointFolder.save``.
        about: see ``CheckpointFolder.save``.
        place: called on process 0 with the temporary folder once it is whole.
        safe: says in words what is saved already.

    Raises:
        ResourceError: there is no room, or it may not be written; nothing is left behind.
    """

    def __init__(
        self,
        target: Path,
        step: int,
        arrays: Arrays,
        about: Mapping[str, Any],
        place: Callable[[Path], None],
        safe: Callable[[], str],
    ):
        self._target, self._step, self._about = target, step, about
        self._place, self._safe = place, safe
        self._exchange = ControlPlane("save")
        named = flat(arrays)
        self._sizes = {name: int(array.nbytes) for name, array in named.items()}
        self._arrays: Arrays = {}
        self._written: Callable[[], None] | None = None
        self._temporary = files.temporary_path(target)
        try:
            self._temporary = Path(self._exchange.first(self._prepare))
            if any(map(stored.is_shared, named.values())):
                self._written = stored.begin_writing(self._inside, arrays, self._exchange)
            elif self._exchange.index == 0:
                self._arrays = stored.on_host(arrays)
        except Exception as error:
            self._fail(error)

    def start(self) -> "concurrent.futures.Future[Manifest]":
        """Goes on in a thread of its own; gives the manifest."""
        future: concurrent.futures.Future[Manifest] = concurrent.futures.Future()

        def run() -> None:
            try:
                future.set_result(self._complete())
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name=f"save of step {self._step}").start()
        return future

    @property
    def _inside(self) -> Path:
        return self._temporary / "arrays"

    def _prepare(self) -> str:
        folder = self._target.parent
        if self._known() is None:
            files.check_space(folder, self._need())
        if not folder.exists():
            folder.mkdir(parents=True)
            files.sync_path(folder.parent)
        shutil.rmtree(self._temporary, ignore_errors=True)
        self._temporary.mkdir()
        return str(self._temporary)

    def _complete(self) -> Manifest:
        try:
            if self._written is not None:
                return self._write_together(self._written)
            manifest: Manifest = self._exchange.first(self._write_alone)
            return manifest
        except Exception as error:
            self._fail(error)
        finally:
            self._arrays = {}

    def _write_alone(self) -> Manifest:
        manifest = self._manifest(describe(self._arrays))
        if not self._is_there(manifest):
            stored.write(self._inside, self._arrays)
            manifest["files"] = self._digests(files.list_files(self._inside, self._inside))
        return self._finish(manifest)

    def _write_together(self, written: Callable[[], None]) -> Manifest:
        control_plane = self._exchange
        try:
            written()
        except Exception as error:
            if not control_plane.broken:
                # The others wait for this process: they hear it instead.
                reason = ResourceError(one_line(error))
                control_plane.each(lambda: _raise(reason))
            raise
        found = control_plane.first(lambda: files.list_files(self._inside, self._inside))
        digests = merged(control_plane.each(lambda: self._digests(control_plane.share(found))))
        described = control_plane.first(lambda: stored.stored_shapes(self._inside))
        mine = control_plane.share({name: size_of(what) for name, what in described.items()})

        def hashed() -> dict[str, Any]:
            return {
                name: describe_array(array)
                for part in stored.batches({name: described[name] for name in mine})
                for name, array in stored.read(self._inside, part).items()
            }

        hashes = merged(control_plane.each(hashed))
        manifest = self._manifest({name: hashes[name] for name in self._sizes})
        manifest["files"] = dict(sorted(digests.items()))
        finished: Manifest = control_plane.first(lambda: self._finish(manifest))
        return finished

    def _manifest(self, described: Mapping[str, Any]) -> Manifest:
        return {
            "format": FORMAT,
            "step": self._step,
            "state_sha256": state_hash(described),
            **self._about,
            "versions": versions(),
            "arrays": described,
        }

    def _digests(self, names: Iterable[str]) -> dict[str, str]:
        return {name: files.sha256_of_file(self._inside / name) for name in names}

    def _need(self) -> int:
        return sum(self._sizes.values()) + BYTES_PER_ARRAY * len(self._sizes) + BYTES_PER_SAVE

    def _known(self) -> Manifest | None:
        """The manifest of what has the step's name already."""
        try:
            return read_manifest(self._target / MANIFEST, self._step)
        except CheckpointError:
            return None

    def _is_there(self, manifest: Manifest) -> bool:
        known = self._known()
        return known is not None and known["state_sha256"] == manifest["state_sha256"]

    def _finish(self, manifest: Manifest) -> Manifest:
        if self._is_there(manifest):
            # The state is on the disk: only what is said of it is new.
            manifest["files"] = (self._known() or manifest)["files"]
            files.atomic_write_text(self._target / MANIFEST, seal(manifest))
            shutil.rmtree(self._temporary, ignore_errors=True)
        else:
            files.sync_tree(self._temporary)
            files.atomic_write_text(self._temporary / MANIFEST, seal(manifest))
            # What could not be read must not take the place of what can.
            read_manifest(self._temporary / MANIFEST, self._step)
            self._place(self._temporary)
        return manifest

    def _fail(self, error: Exception) -> NoReturn:
        room = files.describe_space(self._target.parent, self._need())
        if self._exchange.index == 0:
            shutil.rmtree(self._temporary, ignore_errors=True)
        if self._exchange.lost:
            raise error
        reason = one_line(error)
        hint = f": {HINTS[reason]}" if reason in HINTS else ""
        if reason == FULL:
            reason = f"{reason} ({room})"
        refusal = ResourceError.could_not("save", self._target, f"{reason}{hint}; {self._safe()}")
        refusal.already_reported = self._exchange.index != 0
        raise refusal from error


def _raise(error: Exception) -> NoReturn:
    raise error
