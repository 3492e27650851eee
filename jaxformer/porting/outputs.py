"""Where a checkpoint is written, and under whose names: whole, or not at all."""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformer.errors import ResourceError, UsageError
from jaxformer.porting.dialects import DIALECTS, find_dialect
from jaxformer.porting.mapping.abstract_modules import MODEL_OF_CONFIG
from jaxformer.porting.mapping.plans import Plan, plan_export
from jaxformer.porting.writers import FOLDERS, WRITERS, Format, Output, Progress
from jaxformer.storage.durable_files import atomic_write_bytes, sync_path, temporary_path

CERTIFICATE = "certificate.json"
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")


def choose_format(path: Path, to: str | None) -> Format:
    """What to write at a path: as ``--to`` says, and by the suffix.

    Raises:
        UsageError: the two do not go together.
    """
    suffix = path.suffix.lower()
    if to == "hf":
        return "huggingface"
    if suffix == ".safetensors":
        return "safetensors"
    if to != "jax" and (to == "torch" or suffix in TORCH_SUFFIXES):
        return "torch"
    if suffix in TORCH_SUFFIXES:
        raise UsageError(f"{path}: --to jax writes a folder or a .safetensors file; name one")
    return "run"


def choose_plan(plan: Plan, to: Format, dialect: str | None, origin: Mapping[str, Any]) -> Plan:
    """How a model of ours is written.

    Args:
        plan: its import.
        to: what is written.
        dialect: whose names are wanted; default those it came with, else torch_ref's, and for a
            Hugging Face folder the first that can hold it.
        origin: the dialect and class that a run's names came from.

    Raises:
        UsageError: no dialect, or not the one asked for, can hold the model.
    """
    known = plan.origin
    if to == "run":
        if dialect is not None and find_dialect(dialect).name != "jaxformer":
            raise UsageError(
                f"a run's folder has jaxformer's names, not those of {dialect}: leave out --as, or "
                "name a .safetensors or .pt file"
            )
        if type(plan.module) not in MODEL_OF_CONFIG.values():
            raise UsageError(
                f"a run's folder holds whole models, and this is a {plan.origin.kind}: name a "
                ".safetensors or .pt file"
            )
        return plan_export(plan.module, plan.tensors, find_dialect("jaxformer"))
    came_with = known.dialect.name if known.dialect.name != "jaxformer" else origin.get("dialect")
    if to != "huggingface":
        wanted = find_dialect(dialect or came_with or "torch_ref")
        return plan_export(plan.module, plan.tensors, wanted, origin=known)
    if dialect is None and came_with in DIALECTS and find_dialect(came_with).model_types:
        dialect = came_with
    if dialect is not None:
        found = find_dialect(dialect)
        if not found.model_types:
            raise UsageError(f"{dialect} is not of Hugging Face: choose {', '.join(_published())}")
        return plan_export(plan.module, plan.tensors, found, origin=known)
    for name in _published():
        with contextlib.suppress(UsageError):
            return plan_export(plan.module, plan.tensors, find_dialect(name))
    raise UsageError(
        f"none of {', '.join(_published())} computes what this {plan.origin.kind} does: --as NAME "
        "says what stands against one"
    )


def _published() -> list[str]:
    """The dialects of Hugging Face."""
    return [name for name in DIALECTS if find_dialect(name).model_types]


def write_output(
    output: Output,
    path: Path,
    certify: Callable[[Path, dict[str, str]], str],
    certificates: Sequence[Path],
    *,
    overwrite: bool = False,
    progress: Progress = lambda count: None,
) -> dict[str, str]:
    """Writes a checkpoint under a temporary name, reads it back, and gives it its name at the end.

    Args:
        output: what.
        path: where; folders around it are made if need be.
        certify: makes the certificate, of the folder that holds what was written and the SHA-256
            of every array; a folder gets a copy of it.
        certificates: where else it is written.
        overwrite: whether to replace what has that name.
        progress: called after each array with its size in bytes.

    Returns:
        The SHA-256 of every array.

    Raises:
        UsageError: something has that name and is not to be replaced.
        ResourceError: the disk is full or may not be written; nothing is left behind.
    """
    check_free(path, output.format, overwrite=overwrite)
    made = [folder for folder in path.parents if not folder.exists()]
    new = [certificate for certificate in certificates if not certificate.exists()]
    temporary = temporary_path(path)
    written = temporary if output.is_folder else temporary / path.name
    try:
        temporary.mkdir(parents=True)
        digests = WRITERS[output.format](output, written, progress)
        text = certify(temporary, digests)
        for certificate in (
            *certificates,
            *([temporary / CERTIFICATE] if output.is_folder else []),
        ):
            atomic_write_bytes(certificate, text.encode())
        sync_path(temporary)
        _put(written, path)
        sync_path(path.parent)
    except BaseException as error:
        for certificate in new:
            certificate.unlink(missing_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise ResourceError(f"could not write {path}: {reason}; check the folder") from error
        if isinstance(error, ResourceError):
            raise _with_final_path(error, written, path) from error
        raise
    shutil.rmtree(temporary, ignore_errors=True)
    return digests


def _with_final_path(error: ResourceError, written: Path, path: Path) -> ResourceError:
    """Returns the error about the name that the user gave, not about a temporary one below it."""
    if error.path is None or not error.path.is_relative_to(written):
        return error
    final = path / error.path.relative_to(written)
    return ResourceError.could_not(error.action, final, error.reason)


def _put(written: Path, path: Path) -> None:
    """Gives what was written its name; a folder that has it goes away."""
    if not path.is_dir():
        written.replace(path)
        return
    old = written.with_suffix(".old")
    path.rename(old)
    try:
        written.rename(path)
    except BaseException:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def check_free(path: Path, to: Format, *, overwrite: bool) -> None:
    """Whether something may be written there.

    Raises:
        UsageError: it may not.
    """
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise UsageError(f"{path} exists: give another name, or --overwrite")
    is_folder = to in FOLDERS
    if path.is_dir() is not is_folder or path.is_symlink():
        raise UsageError(f"{path} is something else than would be written: give another name")
    if not is_folder:
        return
    try:
        certificate = json.loads((path / CERTIFICATE).read_bytes())
        target = {Path(file["path"]).parts[0] for file in certificate["target"]["files"]}
    except (OSError, ValueError, LookupError, TypeError):
        raise UsageError(
            f"{path} was not made by jaxformer port, and is not replaced: give another name"
        ) from None
    others = sorted({entry.name for entry in path.iterdir()} - target - {CERTIFICATE})
    if others:
        raise UsageError(
            f"{path} holds more than jaxformer port wrote ({', '.join(others[:5])}), and is not "
            "replaced: give another name"
        )
