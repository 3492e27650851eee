"""The checkpoints of one run."""

import concurrent.futures
import contextlib
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxformer.checkpoints.manifest import MANIFEST, Arrays, Manifest, read_manifest
from jaxformer.checkpoints.restoring import Accept, restore, restore_newest, verify
from jaxformer.checkpoints.saving import CheckpointWriter
from jaxformer.distributed.control_plane import ControlPlane
from jaxformer.errors import CheckpointError, JaxformerError, ResourceError, Setting
from jaxformer.hardware.invocation import command
from jaxformer.storage.durable_files import is_temporary, sync_path

QUARANTINE = "quarantine"
# Suffix of a step that is being removed; an interrupted save leaves ``.STEP.PROCESS.tmp``.
REMOVED = ".removed.tmp"


class CheckpointFolder:
    """The checkpoints of one run.

    Several processes make the same calls in the same order; process 0 alone renames and removes.

    Args:
        folder: holds one folder a step.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self._pending: concurrent.futures.Future[Manifest] | None = None

    def steps(self) -> list[int]:
        """Returns the steps that have a folder with a manifest, in order of step."""
        if not self.folder.is_dir():
            return []
        return sorted(int(path.name) for path in self.folder.iterdir() if _is_step(path))

    def save(
        self, step: int, arrays: Arrays, about: Mapping[str, Any], *, keep: int | None = None
    ) -> None:
        """Begins to write a checkpoint, and returns once the arrays may change.

        A thread writes it, until ``wait``; one save at a time. If the same state is already on the
        disk, only its manifest is replaced. Anything else with the step's name is moved to
        ``quarantine``.

        Args:
            step: how many optimizer steps the state has behind it.
            arrays: ``parameters``, ``mu`` and ``nu`` by path, and ``step``: numpy arrays, which
                must stay as they are until ``wait``, or jax arrays, whole or in parts.
            about: further entries of the manifest: config, vocabulary, corpus, val_loss.
            keep: how many of the last steps to keep beside the best one; the others are removed
                once this one is on the disk.

        Raises:
            ResourceError: this save or the one before could not be written; the steps before are
                untouched.
        """
        self.wait()

        def rename(temporary: Path) -> None:
            target = self.folder / str(step)
            if os.path.lexists(target):
                self._quarantine(step)
            temporary.rename(target)
            sync_path(self.folder)
            if keep is not None:
                self.prune(keep)

        target = self.folder / str(step)
        self._pending = CheckpointWriter(
            target, step, arrays, about, rename, self.last_saved
        ).start()

    def wait(self) -> Manifest | None:
        """Waits until the last save is on the disk; returns its manifest, or None without a save.

        Raises:
            ResourceError: it could not be written; the steps before are untouched.
        """
        if self._pending is None:
            return None
        try:
            return self._pending.result()
        finally:
            if self._pending.done():
                self._pending = None

    def settle(self) -> None:
        """Waits until no save is under way, whether or not the last one succeeded."""
        with contextlib.suppress(Exception):
            self.wait()

    def manifest(self, step: int) -> Manifest:
        """Returns the manifest of a step.

        Raises:
            CheckpointError: it is missing or damaged, or of a format this version does not know.
        """
        return read_manifest(self.folder / str(step) / MANIFEST, step)

    def restore(
        self,
        step: int,
        shardings: Arrays | None = None,
        accept: Accept | None = None,
    ) -> tuple[Arrays, Manifest]:
        """Reads the arrays and the manifest of a step and compares them with each other.

        Every file is hashed, by one of the processes. Every array is hashed whole: if no process
        needs all of it, each process first reads a share of the arrays whole to hash them, and
        then the parts that its devices hold.

        Args:
            step: its number.
            shardings: of the arrays, in the same groups; None gives numpy arrays.
            accept: called with the manifest before any array is read. It may return a function
                that is called with each name and array and returns the array to use instead.

        Raises:
            CheckpointError: something is missing or differs; all differences are named.
        """
        return restore(self.folder / str(step), step, shardings, accept)

    def verify(self, step: int) -> None:
        """Reads a step as ``restore`` does, in this process alone, and keeps nothing of it.

        Raises:
            CheckpointError: something is missing or differs; all differences are named.
        """
        verify(self.folder / str(step), step)

    def restore_latest(
        self,
        *,
        quarantine: bool,
        shardings: Arrays | None = None,
        accept: Accept | None = None,
    ) -> tuple[Arrays, Manifest, list[str]]:
        """Reads the newest step that verifies.

        Args:
            quarantine: whether to move newer, damaged steps to ``quarantine`` once a step
                verifies.
            shardings: see ``restore``.
            accept: see ``restore``. A step that it rejects is not damaged; its error ends the
                search.

        Returns:
            arrays, manifest, and a warning for each step passed over.

        Raises:
            CheckpointError: no step verifies.
        """
        control_plane = ControlPlane("search")

        def move_away(step: int) -> str:
            return str(control_plane.on_primary(lambda: self._quarantine(step)))

        steps = control_plane.on_primary(self.steps)
        move = move_away if quarantine else None
        try:
            return restore_newest(self.folder, steps, shardings, accept, move)
        except JaxformerError as error:
            error.already_reported = control_plane.index != 0
            raise

    def choose(
        self, step: int | None = None, *, best: bool = False
    ) -> tuple[Arrays, Manifest, list[str]]:
        """Reads one checkpoint: by its number, the best, or the newest that verifies.

        It is for this process alone, however many there are.

        Args:
            step: its number.
            best: take the one with the lowest validation loss.

        Returns:
            arrays, manifest, and a warning for each step passed over.

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged.
        """
        run, steps = self.folder.parent, self.steps()
        if not steps:
            raise CheckpointError(
                f"{run} holds no checkpoint: train one with {command('train', '--out', run)}"
            )
        if step is not None and step not in steps:
            raise CheckpointError(f"{run} has no step {step}: it has {', '.join(map(str, steps))}")
        if best:
            step = self.best_step()
            if step is None:
                raise CheckpointError(
                    f"{run} has no checkpoint with a validation loss: leave out ", Setting("best")
                )
        if step is not None:
            return *restore(self.folder / str(step), step, alone=True), []
        while True:
            steps = self.steps()
            try:
                return restore_newest(self.folder, steps, alone=True)
            except CheckpointError:
                # A run that trains saves new steps and removes old ones while they are read.
                if self.steps() == steps:
                    raise

    def check_writable(self) -> None:
        """Checks that checkpoints can be saved, if there is a folder for them already.

        Raises:
            ResourceError: they cannot.
        """
        if not os.path.lexists(self.folder):
            return
        if not self.folder.is_dir():
            raise ResourceError(f"cannot write to {self.folder}: it is no folder")
        if not os.access(self.folder, os.W_OK | os.X_OK):
            raise ResourceError(f"cannot write to {self.folder}: no permission")

    def others(self) -> list[Path]:
        """Returns what is in the folder and is neither a checkpoint nor temporary."""
        if not self.folder.is_dir():
            return []
        return sorted(
            path for path in self.folder.iterdir() if not _is_step(path) and not is_temporary(path)
        )

    def tidy(self) -> list[str]:
        """Removes what interrupted saves have left; returns warnings, also of unexpected files."""
        if not self.folder.is_dir():
            return []
        temporary = [path for path in self.folder.iterdir() if is_temporary(path)]
        for path in temporary:
            shutil.rmtree(path, ignore_errors=True)
        return [
            f"the save to {path} was cut short: removed"
            for path in temporary
            if not path.name.endswith(REMOVED)
        ] + [
            f"{path} is {_fault(path)}: ignored"
            for path in self.others()
            if path.name != QUARANTINE
        ]

    def best_step(self) -> int | None:
        """Returns the step with the lowest validation loss, or None if none was evaluated."""
        scored = {}
        for step in self.steps():
            try:
                loss = self.manifest(step).get("val_loss")
            except CheckpointError:
                continue
            if loss is not None:
                scored[step] = loss
        return min(scored, key=lambda step: scored[step]) if scored else None

    def prune(self, keep: int) -> None:
        """Removes all but the last ``keep`` steps and the best one."""
        best = self.best_step()
        for step in self.steps()[:-keep]:
            if step != best:
                # A step that is half removed must not look like a damaged one.
                removed = self.folder / f".{step}{REMOVED}"
                shutil.rmtree(removed, ignore_errors=True)
                with contextlib.suppress(FileNotFoundError):
                    (self.folder / str(step)).rename(removed)
                shutil.rmtree(removed, ignore_errors=True)

    def _quarantine(self, step: int) -> str:
        """Moves a step to a new place in ``quarantine`` and returns it."""
        folder = self.folder / QUARANTINE
        try:
            folder.mkdir(exist_ok=True)
            number, place = 1, folder / str(step)
            while os.path.lexists(place):
                number += 1
                place = folder / f"{step}.{number}"
            (self.folder / str(step)).rename(place)
            sync_path(folder)
            sync_path(self.folder)
        except OSError as error:
            raise ResourceError(
                f"could not move {self.folder / str(step)} to {folder}: {error.strerror}"
            ) from error
        return str(place)

    def last_saved(self) -> str:
        """Returns which step is on the disk, in words that can end an error message."""
        steps = self.steps()
        return f"step {steps[-1]} is the last one saved" if steps else "no step was saved"


def _is_step(path: Path) -> bool:
    """Returns whether a path is a folder, not a link, named like a step, with a manifest."""
    return not _fault(path)


def _fault(path: Path) -> str:
    """Returns why a path is not a checkpoint, or an empty string."""
    if path.is_symlink():
        return "a link, not a checkpoint"
    named = re.fullmatch("0|[1-9][0-9]{0,17}", path.name, re.ASCII)
    if not named or not (path / MANIFEST).is_file():
        return "not a checkpoint"
    return ""
