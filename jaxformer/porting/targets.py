"""Where a port writes: the path, its format, and the dialect whose names the arrays get."""

import dataclasses
import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from jaxformer.errors import Setting, UsageError
from jaxformer.porting.dialects import HUGGING_FACE, find_dialect
from jaxformer.porting.mapping.abstract_modules import MODEL_OF_CONFIG
from jaxformer.porting.mapping.plans import CannotHoldError, Plan, plan_export
from jaxformer.porting.peft import has_adapters, merge_plan, plan_adapter
from jaxformer.porting.writers import FOLDERS, Format

CERTIFICATE = "certificate.json"
# Dialects whose models hold adapters beside their weights; for all others these are merged.
WITH_ADAPTERS = ("jaxformer", "torch_ref")
WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")
TRANSFORMERS_FORMATS = ("huggingface", "trainer", "peft")
# What a caller names as the format; the path says which of them it is by default.
FORMATS = ("torch", "jax", "hf", "trainer", "peft")
FORMAT, OVERWRITE = Setting("format", flag="to"), Setting("overwrite")
TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
# Files of models that jaxformer does not write; a folder may have any other name.
FOREIGN_SUFFIXES = (
    ".onnx", ".gguf", ".ggml", ".h5", ".hdf5", ".keras", ".tflite", ".pb", ".npz", ".npy",
    ".msgpack", ".pkl", ".pickle", ".pt2", ".ptl", ".mlmodel", ".engine", ".json", ".zip", ".tar",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PortTarget:
    """What a port writes, and where.

    Attributes:
        path: the file or folder.
        format: what it is.
        certificates: where the certificate is written, besides ``CERTIFICATE`` in a folder.
        dialect: whose names the arrays get; None leaves the choice to ``plan_target``.
        dtype: what the weights are rounded to, or None.
        weights_only: whether the optimizer's state is left out.
        overwrite: whether to replace what has the path already.
    """

    path: Path
    format: Format
    certificates: tuple[Path, ...]
    dialect: str | None = None
    dtype: str | None = None
    weights_only: bool = False
    overwrite: bool = False


def choose_target(
    path: Path,
    to: Literal["torch", "jax", "hf", "trainer", "peft"] | None = None,
    certificate: Path | None = None,
    *,
    overwrite: bool = False,
    **settings: Any,
) -> PortTarget:
    """Chooses the format by ``to`` and the suffix, and checks that the target may be written.

    Args:
        path: the file or folder.
        to: a PyTorch file, a run's folder, a Hugging Face folder, one with which transformers'
            Trainer goes on, or PEFT's folder of adapters.
        certificate: where to write the certificate; by default beside a file.
        overwrite: whether what is there may be replaced.
        settings: ``dialect``, ``dtype`` and ``weights_only`` of ``PortTarget``.

    Raises:
        UsageError: ``to`` is no format or does not agree with the suffix, something is there
            already, or weights are not kept in such a dtype.
    """
    dtype = settings.get("dtype")
    if dtype is not None and dtype not in WEIGHT_DTYPES:
        raise UsageError(f"dtype must be one of {', '.join(WEIGHT_DTYPES)}: got {dtype!r}")
    kind = _choose_format(path, to)
    if kind == "trainer" and settings.get("weights_only"):
        raise UsageError(
            "a Trainer folder has the optimizer's state: ", FORMAT, " hf writes weights alone"
        )
    certificates = [path.with_name(f"{path.name}.{CERTIFICATE}")] if kind not in FOLDERS else []
    if certificate is not None:
        certificates = [certificate]
    check_replaceable(path, kind, overwrite=overwrite)
    for file in certificates:
        if file.exists() and not overwrite:
            raise UsageError(f"{file} exists: give another name, or ", OVERWRITE)
    return PortTarget(path, kind, tuple(certificates), overwrite=overwrite, **settings)


def _choose_format(path: Path, to: str | None) -> Format:
    if to is not None and to not in FORMATS:
        raise UsageError(FORMAT, f" must be one of {', '.join(FORMATS)}: got {to!r}")
    suffix = path.suffix.lower()
    if suffix in FOREIGN_SUFFIXES:
        raise UsageError(
            f"{path}: jaxformer writes no {suffix} files: name a .safetensors or .pt file, or a "
            "folder"
        )
    if to == "hf":
        return "huggingface"
    if to == "trainer":
        return "trainer"
    if to == "peft":
        return "peft"
    if suffix == ".safetensors":
        return "safetensors"
    if to != "jax" and (to == "torch" or suffix in TORCH_SUFFIXES):
        return "torch"
    if suffix in TORCH_SUFFIXES:
        raise UsageError(
            f"{path}: ", FORMAT, " jax writes a folder or a .safetensors file; name one"
        )
    return "run"


def check_replaceable(path: Path, to: Format, *, overwrite: bool) -> None:
    """Checks that the path is free, or holds only what a port wrote and may be replaced.

    Raises:
        UsageError: it may not be replaced.
    """
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise UsageError(f"{path} exists: give another name, or ", OVERWRITE)
    is_folder = to in FOLDERS
    if path.is_dir() is not is_folder or path.is_symlink():
        raise UsageError(f"{path} is something else than would be written: give another name")
    if not is_folder:
        return
    try:
        certificate = json.loads((path / CERTIFICATE).read_bytes())
        written = {Path(file["path"]).parts[0] for file in certificate["target"]["files"]}
    except (OSError, ValueError, LookupError, TypeError):
        raise UsageError(
            f"{path} was not made by jaxformer port, and is not replaced: give another name"
        ) from None
    others = sorted({entry.name for entry in path.iterdir()} - written - {CERTIFICATE})
    if others:
        raise UsageError(
            f"{path} holds more than jaxformer port wrote ({', '.join(others[:5])}), and is not "
            "replaced: give another name"
        )


def plan_target(plan: Plan, target: PortTarget, recorded: Mapping[str, Any]) -> Plan:
    """Plans how an imported model is exported to a target.

    Args:
        plan: the import.
        target: by default it gets the names that the arrays came with, or else those of torch_ref;
            a Hugging Face folder gets those of the first dialect that can hold the model.
        recorded: the dialect and class from which a run's arrays were ported.

    Raises:
        UsageError: no dialect, or not the one that is wanted, can hold the model.
    """
    if target.format == "run" and type(plan.module) not in MODEL_OF_CONFIG.values():
        raise UsageError(
            f"a run's folder holds whole models, and this is a {plan.origin.kind}: name a "
            ".safetensors or .pt file"
        )
    if target.format == "peft" and not has_adapters(plan):
        raise UsageError("a PEFT folder holds adapters, and this model has none: ", FORMAT, " hf")
    source = plan.origin.dialect.name
    names = _choose_dialects(target, recorded.get("dialect") if source == "jaxformer" else source)
    keeps_adapters = not has_adapters(plan) or names[0] in WITH_ADAPTERS
    whole = plan if keeps_adapters else merge_plan(plan)
    is_folder = target.format in TRANSFORMERS_FORMATS
    exported = _export_to_first(whole, names, is_published=is_folder)
    if is_folder:
        exported = _under_published_names(exported)
    return plan_adapter(plan, exported) if target.format == "peft" else exported


def _choose_dialects(target: PortTarget, source: str | None) -> list[str]:
    """Returns the dialects that a target may have, the best first.

    Args:
        target: it may name one.
        source: the dialect that the arrays came with.
    """
    name = target.dialect
    if target.format == "run":
        if name not in (None, "jaxformer"):
            raise UsageError(
                f"a run's folder has jaxformer's names, not those of {name}: leave out ",
                Setting("dialect", flag="as"),
                ", or name a .safetensors or .pt file",
            )
        return ["jaxformer"]
    if target.format not in TRANSFORMERS_FORMATS:
        return [name or source or "torch_ref"]
    if name is not None and name not in HUGGING_FACE:
        raise UsageError(f"{name} is not of Hugging Face: choose {', '.join(HUGGING_FACE)}")
    name = name or (source if source in HUGGING_FACE else None)
    return [name] if name is not None else list(HUGGING_FACE)


def _export_to_first(plan: Plan, names: Sequence[str], *, is_published: bool) -> Plan:
    """Returns the export to the first dialect that can hold the model."""
    export = functools.partial(plan_export, plan.module, plan.tensors, is_published=is_published)
    if len(names) == 1:
        return export(find_dialect(names[0]), origin=plan.origin)
    nearest: CannotHoldError | None = None
    for name in names:
        try:
            return export(find_dialect(name))
        except CannotHoldError as error:
            if nearest is None or error.distance < nearest.distance:
                nearest = error
        except UsageError:
            continue  # it has no class of such a kind
    raise UsageError(
        f"no model type of Hugging Face computes what this {type(plan.module).__name__} does"
        + (f"; the nearest: {nearest}" if nearest else "")
    )


def _under_published_names(plan: Plan) -> Plan:
    """Returns an export whose arrays have the names that all versions of transformers read."""
    rename = plan.origin.dialect.published
    linked = {name for link in plan.links for name in link.source}
    links = [
        dataclasses.replace(link, source=tuple(map(rename, link.source))) for link in plan.links
    ]
    tensors = {rename(n) if n in linked else n: tensor for n, tensor in plan.tensors.items()}
    return dataclasses.replace(plan, links=links, tensors=tensors)
