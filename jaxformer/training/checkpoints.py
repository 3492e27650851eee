"""Checkpoints on disk: arrays by Orbax, and a manifest that says what they must be.

``checkpoints/<step>/arrays`` is an Orbax folder with the groups ``parameters``, ``mu`` and ``nu``
(each by parameter path) and ``step``. ``checkpoints/<step>/MANIFEST.json`` holds the settings, the
vocabulary, the corpus's hash, versions, and shape, dtype and SHA-256 of every array. A step is
written under a temporary name and renamed once all of it is on the disk, so a folder whose name is
a number is complete; it counts only if its manifest agrees with its arrays.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.errors import CheckpointError, ResourceError

FORMAT = 1
GROUPS = ("parameters", "mu", "nu")
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
            if path.name.isdecimal() and (path / "MANIFEST.json").is_file()
        )

    def save(self, step: int, arrays: Arrays, about: Mapping[str, Any]) -> dict[str, Any]:
        """Writes a checkpoint and returns its manifest.

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
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save((temporary / "arrays").absolute(), arrays)
            write_durably(temporary / "MANIFEST.json", json.dumps(manifest, indent=1))
            if target.exists():
                shutil.rmtree(target)
            temporary.rename(target)
            _sync_folder(self.folder)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise ResourceError(f"could not save {target}: {error}") from error
        return manifest

    def manifest(self, step: int) -> dict[str, Any]:
        """The manifest of a step.

        Raises:
            CheckpointError: it is missing or unreadable, or of a format this version does not know.
        """
        path = self.folder / str(step) / "MANIFEST.json"
        try:
            manifest = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not a checkpoint manifest of format {FORMAT}")
        return manifest

    def restore(self, step: int) -> tuple[Arrays, dict[str, Any]]:
        """The arrays and the manifest of a step, every array compared with the manifest.

        Raises:
            CheckpointError: something is missing or differs; all differences are named.
        """
        import orbax.checkpoint as ocp

        folder = self.folder / str(step)
        manifest = self.manifest(step)
        try:
            target = _empty_like(manifest["arrays"])
            with ocp.StandardCheckpointer() as checkpointer:
                arrays: Arrays = checkpointer.restore((folder / "arrays").absolute(), target)
            found = describe(arrays)
        except Exception as error:
            lines = str(error).strip().splitlines()
            reason = lines[0] if lines else type(error).__name__
            raise CheckpointError(f"{folder} cannot be read: {reason[:200]}") from error
        wrong = [name for name, what in manifest["arrays"].items() if found.get(name) != what]
        if wrong or manifest["state_sha256"] != state_hash(found):
            names = ", ".join(wrong[:5]) + (" …" if len(wrong) > 5 else "")
            raise CheckpointError(
                f"{folder} is damaged: {len(wrong)} arrays differ from its manifest ({names})"
            )
        return arrays, manifest

    def restore_latest(self) -> tuple[Arrays, dict[str, Any], list[str]]:
        """The newest step that verifies; damaged ones found on the way are moved to ``quarantine``.

        Returns:
            arrays, manifest, and a warning for each step that was moved.

        Raises:
            CheckpointError: no step verifies.
        """
        warnings = []
        for step in reversed(self.steps()):
            try:
                return *self.restore(step), warnings
            except CheckpointError as error:
                quarantine = self.folder / "quarantine"
                quarantine.mkdir(exist_ok=True)
                shutil.rmtree(quarantine / str(step), ignore_errors=True)
                (self.folder / str(step)).rename(quarantine / str(step))
                warnings.append(f"{error}; moved to {quarantine / str(step)}")
        raise CheckpointError(
            "; ".join(warnings) or f"there is no checkpoint in {self.folder}: train one first"
        )

    def best_step(self) -> int | None:
        """The step with the lowest validation loss, or None where none was evaluated."""
        losses = {step: self.manifest(step).get("val_loss") for step in self.steps()}
        scored = {step: loss for step, loss in losses.items() if loss is not None}
        return min(scored, key=lambda step: scored[step]) if scored else None

    def prune(self, keep: int) -> None:
        """Removes all but the last ``keep`` steps and the best one."""
        best = self.best_step()
        for step in self.steps()[:-keep]:
            if step != best:
                shutil.rmtree(self.folder / str(step))


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
