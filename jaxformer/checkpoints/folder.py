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
from jaxformer.checkpoints.restoring import Accept, newest, restore
from jaxformer.checkpoints.saving import Save
from jaxformer.distributed.control_plane import ControlPlane
from jaxformer.errors import CheckpointError, JaxformerError, ResourceError
from jaxformer.storage.durable_files import is_temporary, sync_path

QUARANTINE = "quarantine"
# What is being removed; a save that is cut short leaves ``.STEP.PROCESS.tmp``.
REMOVED = ".removed.tmp"


class CheckpointFolder:
    """The checkpoints of one run.

    Several processes make the same calls in the same order; process 0 alone renames, moves and
    removes.

    Args:
        folder: holds one folder a step.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)
        self._pending: concurrent.futures.Future[Manifest] | None = None

    def steps(self) -> list[int]:
        """The steps that have a folder with a manifest, in order of step."""
        if not self.folder.is_dir():
            return []
        return sorted(int(path.name) for path in self.folder.iterdir() if _is_step(path))

    def save(
        self, step: int, arrays: Arrays, about: Mapping[str, Any], *, keep: int | None = None
    ) -> None:
        """Begins to write a checkpoint, and returns once the arrays may change.

        The rest goes on in a thread of its own, until ``wait``; one save at a time. Where the
        same state is already there, only its manifest is written anew. Anything else that bears
        the step's name is put into ``quarantine``.

        Args:
            step: how many optimizer steps the state has behind it.
            arrays: ``parameters``, ``mu`` and ``nu`` by path, and ``step``: numpy arrays, which
                must stay as they are until ``wait``, or jax arrays, whole or in parts.
            about: what else the manifest is to hold: config, vocabulary, corpus, val_loss.
            keep: once it is on the disk, remove all but the last so many steps and the best.

        Raises:
            ResourceError: this save or the one before could not be written; the steps before are
                untouched.
        """
        self.wait()

        def place(temporary: Path) -> None:
            target = self.folder / str(step)
            if os.path.lexists(target):
                self._quarantine(step)
            temporary.rename(target)
            sync_path(self.folder)
            if keep is not None:
                self.prune(keep)

        target = self.folder / str(step)
        self._pending = Save(target, step, arrays, about, place, self.last_saved).start()

    def wait(self) -> Manifest | None:
        """Returns once the last save is on the disk: its manifest, or None where none was begun.

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
        """Returns once no save is under way, whatever became of the last one."""
        with contextlib.suppress(Exception):
            self.wait()

    def manifest(self, step: int) -> Manifest:
        """The manifest of a step.

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
        """The arrays and the manifest of a step, compared with each other.

        Every file is hashed, by one of the processes. Every array is hashed whole: where no
        process needs all of it, each reads a share of the arrays for that, one after the other,
        and then the parts that its devices hold, from the files that were hashed.

        Args:
            step: which.
            shardings: where the arrays are to lie, in the same groups; None gives numpy arrays.
            accept: called with the manifest before an array is read; what it returns, if
                anything, is called with each name and array, and gives what is to take its place.

        Raises:
            CheckpointError: something is missing or differs; all differences are named.
        """
        return restore(self.folder / str(step), step, shardings, accept)

    def restore_latest(
        self,
        *,
        quarantine: bool,
        shardings: Arrays | None = None,
        accept: Accept | None = None,
    ) -> tuple[Arrays, Manifest, list[str]]:
        """The newest step that verifies.

        Args:
            quarantine: whether to move damaged steps found on the way to ``quarantine``, once
                there is one that verifies.
            shardings: see ``restore``.
            accept: see ``restore``. What it refuses is not damaged, and ends the search.

        Returns:
            arrays, manifest, and a warning for each step passed over.

        Raises:
            CheckpointError: no step verifies.
        """
        control_plane = ControlPlane("search")

        def put_aside(step: int) -> str:
            return str(control_plane.first(lambda: self._quarantine(step)))

        steps = control_plane.first(self.steps)
        aside = put_aside if quarantine else None
        try:
            return newest(self.folder, steps, shardings, accept, aside)
        except JaxformerError as error:
            error.already_reported = control_plane.index != 0
            raise

    def choose(
        self, step: int | None = None, *, best: bool = False
    ) -> tuple[Arrays, Manifest, list[str]]:
        """The checkpoint asked for: by number, the best, or the newest that verifies.

        For this process alone, whoever else there is.

        Args:
            step: its number.
            best: the one with the lowest validation loss.

        Returns:
            arrays, manifest, and a warning for each step passed over.

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged.
        """
        run, steps = self.folder.parent, self.steps()
        if not steps:
            raise CheckpointError(f"{run} holds no checkpoint: train one with train.py --out {run}")
        if step is not None and step not in steps:
            raise CheckpointError(f"{run} has no step {step}: it has {', '.join(map(str, steps))}")
        if best:
            step = self.best_step()
            if step is None:
                raise CheckpointError(
                    f"{run} has no checkpoint with a validation loss: leave out --best"
                )
        if step is not None:
            return *restore(self.folder / str(step), step, alone=True), []
        return newest(self.folder, self.steps(), alone=True)

    def others(self) -> list[Path]:
        """All that is in the folder and is neither a checkpoint nor on its way in or out."""
        if not self.folder.is_dir():
            return []
        return sorted(
            path for path in self.folder.iterdir() if not _is_step(path) and not is_temporary(path)
        )

    def tidy(self) -> list[str]:
        """Removes what saves cut short have left, and names what is not a checkpoint."""
        if not self.folder.is_dir():
            return []
        cut = [path for path in self.folder.iterdir() if is_temporary(path)]
        for path in cut:
            shutil.rmtree(path, ignore_errors=True)
        return [
            f"the save to {path} was cut short: removed"
            for path in cut
            if not path.name.endswith(REMOVED)
        ] + [
            f"{path} is {_fault(path)}: ignored"
            for path in self.others()
            if path.name != QUARANTINE
        ]

    def best_step(self) -> int | None:
        """The step with the lowest validation loss, or None where none was evaluated."""
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
                # What is half removed must not look like a damaged step.
                removed = self.folder / f".{step}{REMOVED}"
                shutil.rmtree(removed, ignore_errors=True)
                with contextlib.suppress(FileNotFoundError):
                    (self.folder / str(step)).rename(removed)
                shutil.rmtree(removed, ignore_errors=True)

    def _quarantine(self, step: int) -> str:
        """Moves a step out of the way, to a place that was never taken."""
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
        """Which step is on the disk, in words that can follow what went wrong."""
        steps = self.steps()
        return f"step {steps[-1]} is the last one saved" if steps else "no step was saved"


def _is_step(path: Path) -> bool:
    """Whether a path is a folder of its own, named like a step, with a manifest."""
    return not _fault(path)


def _fault(path: Path) -> str:
    """Why a path is not a checkpoint, or an empty string."""
    if path.is_symlink():
        return "a link, not a checkpoint"
    named = re.fullmatch("0|[1-9][0-9]{0,17}", path.name, re.ASCII)
    if not named or not (path / MANIFEST).is_file():
        return "not a checkpoint"
    return ""
