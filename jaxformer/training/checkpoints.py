"""Checkpoints on disk: arrays by Orbax, and a manifest that says what they must be.

``checkpoints/<step>/arrays`` is an Orbax folder with the groups ``parameters``, ``mu`` and ``nu``
(each by parameter path) and ``step``. ``checkpoints/<step>/MANIFEST.json`` holds the settings, the
vocabulary, the corpus's hash, versions, and shape, dtype and SHA-256 of every array. A step is
written under a temporary name and renamed once all of it is on the disk, so a folder whose name is
a number is complete; it counts only if its manifest agrees with itself, with every file and with
every array.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.errors import CheckpointError, ResourceError

FORMAT = 1
GROUPS = ("parameters", "mu", "nu")
MANIFEST = "MANIFEST.json"
Arrays = dict[str, Any]


class CheckpointFolder:
    """The checkpoints of one run.

    Args:
        folder: holds one folder a step.
    """

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    def steps(self) -> list[int]:
        """The steps that have a folder with a manifest, in order of step."""
        if not self.folder.is_dir():
            return []
        return sorted(
            int(path.name)
            for path in self.folder.iterdir()
            if re.fullmatch("0|[1-9][0-9]*", path.name, re.ASCII) and (path / MANIFEST).is_file()
        )

    def save(self, step: int, arrays: Arrays, about: Mapping[str, Any]) -> dict[str, Any]:
        """Writes a checkpoint and returns its manifest.

        Where the same state is already there, only its manifest is written anew. Anything else
        that bears the step's name is put into ``quarantine``.

        Args:
            step: how many optimizer steps the state has behind it.
            arrays: ``parameters``, ``mu`` and ``nu`` by path, and ``step``.
            about: what else the manifest is to hold: config, vocabulary, corpus, val_loss.

        Raises:
            ResourceError: it could not be written; earlier checkpoints are untouched.
        """
        import orbax.checkpoint as ocp

        target = self.folder / str(step)
        temporary = self.folder / f".{step}.{os.getpid()}.tmp"
        digests = describe(arrays)
        manifest = {
            "format": FORMAT,
            "step": step,
            "state_sha256": state_hash(digests),
            **about,
            "versions": _versions(),
            "arrays": digests,
        }
        try:
            if step in self.steps():
                before = self.manifest(step)
                if before["state_sha256"] == manifest["state_sha256"]:
                    manifest["files"] = before["files"]
                    write_durably(target / MANIFEST, _seal(manifest))
                    return manifest
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save((temporary / "arrays").absolute(), arrays)
            manifest["files"] = _file_digests(temporary / "arrays")
            write_durably(temporary / MANIFEST, _seal(manifest))
            if target.exists():
                self._quarantine(step)
            temporary.rename(target)
            _sync_folder(self.folder)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise ResourceError(f"could not save {target}: {error}") from error
        return manifest

    def manifest(self, step: int) -> dict[str, Any]:
        """The manifest of a step.

        Raises:
            CheckpointError: it is missing or damaged, or of a format this version does not know.
        """
        path = self.folder / str(step) / MANIFEST
        try:
            data = path.read_bytes()
            manifest = json.loads(data)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not a checkpoint manifest of format {FORMAT}")
        if data != _seal(manifest).encode():
            raise CheckpointError(f"{path} is damaged: it is not as it was written")
        return manifest

    def restore(self, step: int) -> tuple[Arrays, dict[str, Any]]:
        """The arrays and the manifest of a step, every file and array compared with the manifest.

        Raises:
            CheckpointError: something is missing or differs; all differences are named.
        """
        import orbax.checkpoint as ocp

        folder = self.folder / str(step)
        manifest = self.manifest(step)
        _check_same("files", folder, manifest["files"], _file_digests(folder / "arrays"))
        try:
            target = _empty_like(manifest["arrays"])
            with ocp.StandardCheckpointer() as checkpointer:
                arrays: Arrays = checkpointer.restore((folder / "arrays").absolute(), target)
        except (OSError, ValueError, KeyError, TypeError) as error:
            lines = str(error).strip().splitlines()
            reason = lines[0] if lines else type(error).__name__
            raise CheckpointError(f"{folder} cannot be read: {reason[:200]}") from error
        _check_same("arrays", folder, manifest["arrays"], describe(arrays))
        return arrays, manifest

    def restore_latest(self, *, quarantine: bool) -> tuple[Arrays, dict[str, Any], list[str]]:
        """The newest step that verifies.

        Args:
            quarantine: whether to move damaged steps found on the way to ``quarantine``.

        Returns:
            arrays, manifest, and a warning for each step passed over.

        Raises:
            CheckpointError: no step verifies.
        """
        warnings: list[str] = []
        for step in reversed(self.steps()):
            try:
                return *self.restore(step), warnings
            except CheckpointError as error:
                moved = f"; moved to {self._quarantine(step)}" if quarantine else ""
                warnings.append(f"{error}{moved}")
        raise CheckpointError(
            "; ".join(warnings) or f"there is no checkpoint in {self.folder}: train one first"
        )

    def choose(
        self, step: int | None = None, *, best: bool = False
    ) -> tuple[Arrays, dict[str, Any], list[str]]:
        """The checkpoint asked for: by number, the best, or the newest that verifies.

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
            return *self.restore(step), []
        return self.restore_latest(quarantine=False)

    def others(self) -> list[Path]:
        """All that is in the folder and is neither a checkpoint nor a save cut short."""
        if not self.folder.is_dir():
            return []
        steps = set(map(str, self.steps()))
        return sorted(
            path
            for path in self.folder.iterdir()
            if path.name not in steps and not _is_temporary(path)
        )

    def tidy(self) -> list[str]:
        """Removes what saves cut short have left, and names what is not a checkpoint."""
        if not self.folder.is_dir():
            return []
        cut = [path for path in self.folder.iterdir() if _is_temporary(path)]
        for path in cut:
            shutil.rmtree(path, ignore_errors=True)
        return [f"the save to {path} was cut short: removed" for path in cut] + [
            f"{path} is not a checkpoint: ignored"
            for path in self.others()
            if path.name != "quarantine"
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
                shutil.rmtree(self.folder / str(step))

    def _quarantine(self, step: int) -> Path:
        place = self.folder / "quarantine" / str(step)
        place.parent.mkdir(exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        (self.folder / str(step)).rename(place)
        return place


def describe(arrays: Arrays) -> dict[str, dict[str, Any]]:
    """Shape, dtype and SHA-256 of every array, by ``group/path``."""

    def one(array: Any) -> dict[str, Any]:
        array = np.asarray(array)
        digest = hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        return {"shape": list(array.shape), "dtype": array.dtype.name, "sha256": digest.hexdigest()}

    digests = {
        f"{group}/{name}": one(value)
        for group in GROUPS
        for name, value in sorted(arrays.get(group, {}).items())
    }
    digests["step"] = one(arrays["step"])
    return digests


def state_hash(digests: Mapping[str, Any]) -> str:
    """One SHA-256 over the description of all arrays."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def write_durably(path: Path, text: str) -> None:
    """Writes a file under a temporary name, syncs it to the disk and renames it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_folder(path.parent)


def _is_temporary(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".tmp")


def _seal(manifest: Mapping[str, Any]) -> str:
    """A manifest as it is written: with the SHA-256 of all else that it says."""
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1)


def _file_digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of every file in a folder and below."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256")
            digests[path.relative_to(folder).as_posix()] = digest.hexdigest()
    return digests


def _check_same(
    what: str, folder: Path, expected: Mapping[str, Any], found: Mapping[str, Any]
) -> None:
    problems = [f"missing {name}" for name in sorted(expected.keys() - found.keys())]
    problems += [f"unexpected {name}" for name in sorted(found.keys() - expected.keys())]
    problems += [
        f"changed {name}"
        for name in sorted(expected.keys() & found.keys())
        if expected[name] != found[name]
    ]
    if problems:
        raise CheckpointError(
            f"{folder} is damaged: {len(problems)} {what} differ from its manifest "
            f"({', '.join(problems)})"
        )


def _empty_like(digests: Mapping[str, Any]) -> Arrays:
    import jax.numpy as jnp

    target: Arrays = {}
    for full_name, what in digests.items():
        array = np.empty(what["shape"], jnp.dtype(what["dtype"]))
        group, _, name = full_name.partition("/")
        if name:
            target.setdefault(group, {})[name] = array
        else:
            target[group] = array
    return target


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _versions() -> dict[str, str]:
    packages = ("jaxformer", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    versions = {"python": platform.python_version()}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions
