"""A port: plan it, write it under a temporary name, read it back, certify it, rename it."""

import contextlib
import dataclasses
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxformer.config_optimizers import OPTIMIZERS
from jaxformer.errors import ResourceError, UsageError
from jaxformer.porting.certificate import file_record, make_certificate
from jaxformer.porting.checkpoint import Checkpoint
from jaxformer.porting.mapping.casts import DTYPES, cast, check_computes
from jaxformer.porting.mapping.optimizer_state import WITHOUT_TORCH_FORM, OptimizerState
from jaxformer.porting.mapping.plans import Plan, plan_class_export
from jaxformer.porting.parameter_order import parameter_order
from jaxformer.porting.peft import has_adapters
from jaxformer.porting.targets import (
    CERTIFICATE,
    FORMAT,
    PortTarget,
    check_replaceable,
    plan_target,
)
from jaxformer.porting.writers import FOLDERS, WRITERS, Output, Progress
from jaxformer.storage.durable_files import atomic_write_bytes, sync_path, temporary_path

# The optimizers of transformers' Trainer that are those of jaxformer.
OF_TRAINER = ("adamw", "sgd")


@dataclasses.dataclass(frozen=True)
class Port:
    """A port that can be written.

    Attributes:
        checkpoint: the source.
        target: where it is written.
        imported: the plan from the source's names to the model.
        output: what is written.
        rounding: the largest rounding error of each array that is cast, by its path in the model.
        without_optimizer: why the optimizer's state is left out, where the target could hold one.
    """

    checkpoint: Checkpoint
    target: PortTarget
    imported: Plan
    output: Output
    rounding: Mapping[str, float]
    without_optimizer: str = ""

    @property
    def has_same_dialect(self) -> bool:
        """Whether the source's names are those of the target."""
        return self.output.plan.origin.dialect.name == self.imported.origin.dialect.name

    @property
    def parameter_count(self) -> int:
        """How many parameters the model has; tied ones count once."""
        shapes = (shape for link in self.imported.links for shape in link.target_shapes)
        return sum(map(math.prod, shapes))

    @property
    def nbytes(self) -> int:
        """How many bytes of arrays will be read."""
        tensors = list(self.output.plan.tensors.values())
        if self.output.optimizer is not None:
            for kept in self.output.optimizer.moments.values():
                tensors += kept.values()
        return sum(tensor.nbytes for tensor in tensors)


def plan_port(checkpoint: Checkpoint, target: PortTarget, ignore: Sequence[str] = ()) -> Port:
    """Plans a port; only arrays that are cast are read.

    Args:
        checkpoint: the source.
        target: where it is to be written.
        ignore: patterns of names to leave out.

    Raises:
        UsageError: the source's dialect is unknown, or the target's cannot hold the model; or it
            has no optimizer's state, without which the Trainer does not go on; or a run would get
            weights in which no model computes.
        CheckpointError: arrays are missing, unexpected, misshapen or wrong; all are listed.
    """
    imported = checkpoint.plan(ignore)
    plan, rounding = imported, dict[str, float]()
    if target.dtype is not None:
        tensors, rounding = cast(imported.tensors, DTYPES[target.dtype])
        plan = dataclasses.replace(imported, tensors=tensors)
    elif target.format == "run":
        check_computes(imported.tensors)
    recorded = checkpoint.raw.record.get("origin") or {}
    exported = plan_target(plan, target, recorded)
    optimizer, reason = _plan_optimizer(checkpoint, imported, exported, target)
    if target.format == "trainer" and optimizer is None:
        raise UsageError(
            "transformers' Trainer goes on with the optimizer's state: "
            f"{reason or 'the source has none'}; ",
            FORMAT,
            " hf writes weights alone",
        )
    output = _plan_output(checkpoint, imported, exported, target, recorded, optimizer)
    return Port(checkpoint, target, imported, output, rounding, reason)


def _plan_optimizer(
    checkpoint: Checkpoint, imported: Plan, exported: Plan, target: PortTarget
) -> tuple[OptimizerState | None, str]:
    """Returns the optimizer's state that is written, or None and why it is left out."""
    if target.weights_only or target.format not in ("torch", "trainer", "run"):
        return None, ""
    optimizer = checkpoint.optimizer_state(imported)
    if optimizer is None:
        return None, ""
    if has_adapters(imported) and not has_adapters(exported):
        return None, "it is that of the adapters, which are merged into the weights"
    title = OPTIMIZERS[optimizer.kind].title
    if target.format == "torch" and optimizer.kind in WITHOUT_TORCH_FORM:
        return None, f"PyTorch has no place for what jaxformer's {title} keeps"
    if target.format == "trainer" and optimizer.kind not in OF_TRAINER:
        return None, f"it has no place for what jaxformer's {title} keeps"
    return optimizer, ""


def _plan_output(
    checkpoint: Checkpoint,
    imported: Plan,
    exported: Plan,
    target: PortTarget,
    recorded: Mapping[str, Any],
    optimizer: OptimizerState | None,
) -> Output:
    has_same_dialect = exported.origin.dialect.name == imported.origin.dialect.name
    order, class_plan = None, None
    if target.format == "trainer":
        # The class may hold other arrays than its files.
        class_plan = plan_class_export(imported.module, imported.tensors, exported.origin)
        order = parameter_order(class_plan, (), {})
    if target.format == "torch":
        keeps_order = has_same_dialect and exported.origin.dialect.name != "jaxformer"
        came = checkpoint.known_order(imported) if keeps_order else ()
        order = parameter_order(exported, came, recorded)
    step = checkpoint.raw.record.get("step") if optimizer is None else optimizer.count
    return Output(
        target.format,
        exported,
        vocabulary=checkpoint.vocabulary,
        token_ids=checkpoint.token_ids,
        companions=checkpoint.files_beside(),
        step=step or None,
        optimizer=optimizer,
        class_plan=class_plan,
        order=order,
        origin=checkpoint.origin_of(imported),
        base=checkpoint.base,
        source_config=_source_config(checkpoint, imported, exported),
    )


def _source_config(checkpoint: Checkpoint, imported: Plan, exported: Plan) -> Mapping[str, Any]:
    """Returns what is known of the config.json that a model of this dialect came with."""
    dialect = exported.origin.dialect.name
    kept = checkpoint.recorded_settings(dialect)
    return {**kept, **(imported.origin.config if imported.origin.dialect.name == dialect else {})}


def write_port(
    port: Port, *, source: str, command: str, progress: Progress = lambda count: None
) -> int:
    """Writes a port under a temporary name, reads it back, and renames it when all is correct.

    Args:
        port: what is written, and where; missing folders above it are created.
        source: what the user called the source, for the certificate.
        command: the whole command, for the certificate.
        progress: called after each array with its size in bytes.

    Returns:
        The number of arrays that were written, read back and compared.

    Raises:
        UsageError: something has the target's path and is not to be replaced.
        ResourceError: the disk is full or may not be written; nothing is left behind.
    """
    target, raw = port.target, port.checkpoint.raw
    path, output = target.path, port.output
    check_replaceable(path, target.format, overwrite=target.overwrite)
    with ThreadPoolExecutor(1) as pool, _temporary_folder(target) as temporary:
        # Hashing needs no Python while it runs: the source is hashed while the target is written.
        hashes = pool.submit(_file_records, port.checkpoint.files, port.checkpoint.path)
        written = temporary if output.is_folder else temporary / path.name
        found = WRITERS[target.format](output, written, progress)
        files = [file for file in sorted(temporary.rglob("*")) if file.is_file()]
        record = make_certificate(
            command=command,
            source={
                "path": source,
                "format": raw.kind,
                "files": hashes.result(),
                "not_read": list(raw.unread),
            },
            target={
                "path": str(path),
                "format": target.format,
                "files": [file_record(file, temporary, found.files.get(file)) for file in files],
            },
            imported=port.imported,
            exported=output.plan,
            digests=found.tensors,
            rounding=port.rounding,
        )
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        inside = [temporary / CERTIFICATE] if output.is_folder else []
        for file in (*target.certificates, *inside):
            atomic_write_bytes(file, text.encode())
        sync_path(temporary)
        _replace(written, path)
        sync_path(path.parent)
    return len(found.tensors)


@contextlib.contextmanager
def _temporary_folder(target: PortTarget) -> Iterator[Path]:
    """A folder beside the target that is removed at the end; after an error nothing is left."""
    path = target.path
    made = [folder for folder in path.parents if not folder.exists()]
    new = [file for file in target.certificates if not file.exists()]
    temporary = temporary_path(path)
    try:
        temporary.mkdir(parents=True)
        yield temporary
    except BaseException as error:
        for file in new:
            with contextlib.suppress(OSError):
                file.unlink()
        shutil.rmtree(temporary, ignore_errors=True)
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        if isinstance(error, OSError):
            reason = f"{error.strerror or error}; check the folder"
            raise ResourceError.could_not("write", path, reason) from error
        if isinstance(error, ResourceError) and error.path is not None:
            raise _with_final_path(error, error.path, temporary, target) from error
        raise
    shutil.rmtree(temporary, ignore_errors=True)


def _with_final_path(
    error: ResourceError, path: Path, temporary: Path, target: PortTarget
) -> ResourceError:
    """Returns the error about the path that the user knows, in place of a temporary one."""
    if not path.is_relative_to(temporary):
        return error
    is_folder = target.format in FOLDERS
    final = (target.path if is_folder else target.path.parent) / path.relative_to(temporary)
    return ResourceError.could_not(error.action, final, error.reason)


def _replace(written: Path, path: Path) -> None:
    """Renames what was written; a folder that has the name is removed."""
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


def _file_records(files: Sequence[Path], source: Path) -> list[dict[str, Any]]:
    root = source if source.is_dir() else source.parent
    return [file_record(path, root) for path in files]
