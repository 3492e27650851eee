"""What a port writes, and how each format holds it."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxformer.errors import CheckpointError
from jaxformer.porting.dialects.common.known_settings import with_kept_parts
from jaxformer.porting.formats.raw_checkpoints import RECORD
from jaxformer.porting.formats.safetensors_files import write_safetensors
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.formats.torch_writer import write_torch_file
from jaxformer.porting.formats.trainer_folders import TAKEN, known_settings, write_trainer_files
from jaxformer.porting.mapping.abstract_modules import MODEL_OF_CONFIG
from jaxformer.porting.mapping.optimizer_state import OptimizerState, write_optimizer
from jaxformer.porting.mapping.plans import Plan
from jaxformer.porting.peft import SETTINGS, WEIGHTS, adapter_settings
from jaxformer.storage.durable_files import atomic_write_bytes, read_back_error

Format = Literal["safetensors", "torch", "huggingface", "trainer", "run", "peft"]
FOLDERS = ("huggingface", "trainer", "run", "peft")
Progress = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Output:
    """What a port writes.

    Attributes:
        format: a ``.safetensors`` file, a PyTorch file, a Hugging Face folder, one with which
            transformers' Trainer goes on, a run's folder, or one of PEFT's, which holds adapters
            alone.
        plan: from the model to the names that are written.
        vocabulary: the characters in the order of their ids, if they are known.
        token_ids: see ``Checkpoint``.
        companions: files of a tokenizer, by the name under which a folder gets a copy.
        step: how many optimizer steps the weights have been trained for.
        optimizer: the optimizer's state; PyTorch files, Trainer folders and runs hold one.
        class_plan: as ``plan``, to the arrays of the class that the optimizer updates; None where
            they are those that are written.
        order: the parameters' names in the order of the PyTorch model, if it is known.
        origin: see ``Checkpoint.origin_of``.
        base: the model that adapters are of, if they are all that is written.
        source_config: what is known of the config.json that the model came with, if its dialect is
            the plan's.
    """

    format: Format
    plan: Plan
    vocabulary: str | None = None
    token_ids: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    companions: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    step: int | None = None
    optimizer: OptimizerState | None = None
    class_plan: Plan | None = None
    order: Sequence[str] | None = None
    origin: Mapping[str, Any] | None = None
    base: str | None = None
    source_config: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_folder(self) -> bool:
        """Whether it is more than one file."""
        return self.format in FOLDERS

    @property
    def trainer_settings(self) -> dict[str, int]:
        """What the Trainer takes from its folder: as it was in the source, else its defaults."""
        return TAKEN | known_settings((self.origin or {}).get("trainer"))

    def record(self) -> dict[str, Any]:
        """Returns what is stored beside the arrays, for ``open_checkpoint``."""
        known = {
            "dialect": self.plan.origin.dialect.name,
            "class": self.plan.origin.kind,
            "config": self.config(),
            "vocabulary": self.vocabulary,
            "token_ids": dict(self.token_ids) or None,
            "step": self.step,
            "origin": dict(self.origin or {}) or None,
        }
        return {name: value for name, value in known.items() if value is not None}

    def config(self) -> dict[str, Any]:
        """Returns jaxformer's config if the model has one, else the settings of its class."""
        module = self.plan.module
        if type(module) in MODEL_OF_CONFIG.values():
            settings: dict[str, Any] = module.config.settings()
            return settings
        settings = self.plan.module_mapping.settings(module)
        # Some settings of torch_ref are modules, which cannot be written.
        plain = {name: value for name, value in settings.items() if _is_plain(value)}
        return {"class": self.plan.origin.kind, **plain}


@dataclasses.dataclass(frozen=True)
class Hashes:
    """What a writer knows of what it has written and read back.

    Attributes:
        tensors: the SHA-256 of each array's bytes, by its name.
        files: that of whole files, by path; the others are left to be read once more.
    """

    tensors: Mapping[str, str]
    files: Mapping[Path, str] = dataclasses.field(default_factory=dict)


def _write_safetensors(output: Output, path: Path, progress: Progress) -> Hashes:
    return _write_tensors(path, output.plan.tensors, output.record(), progress)


def _write_tensors(
    path: Path, tensors: Mapping[str, StoredTensor], record: Mapping[str, Any], progress: Progress
) -> Hashes:
    written = write_safetensors(path, tensors, _metadata(record), progress)
    return Hashes(written.digests, {path: written.sha256})


def _metadata(record: Mapping[str, Any]) -> dict[str, str]:
    """Returns the metadata of a safetensors file; other libraries look for its "format"."""
    known = {RECORD: json.dumps(record, ensure_ascii=False)} if record else {}
    return {"format": "pt", **known}


def _write_torch(output: Output, path: Path, progress: Progress) -> Hashes:
    tensors = output.plan.tensors
    # In the order of the model's state dict, by which PyTorch's optimizers count.
    names = dict.fromkeys(name for name in (*(output.order or ()), *tensors) if name in tensors)
    tree: dict[str, Any] = {"model": {n: tensors[n] for n in names}, **output.record()}
    if output.optimizer is not None:
        tree["optimizer"] = write_optimizer(output.optimizer, output.plan, output.order)
    if tree["dialect"] == "nanogpt":
        # nanoGPT's own scripts read these.
        tree["model_args"] = output.plan.module_mapping.settings(output.plan.module)
        tree |= {"iter_num": output.step or 0, "best_val_loss": 1e9}
    written = write_torch_file(path, tree, progress)
    digests = {
        place.removeprefix("model/"): digest
        for place, digest in written.digests.items()
        if place.startswith("model/")
    }
    return Hashes(digests, {path: written.sha256})


def _write_hugging_face(output: Output, folder: Path, progress: Progress) -> Hashes:
    plan = output.plan
    # The format has no ties: transformers ties the arrays that the config says are tied.
    aliases = plan.module_mapping.aliases
    linked = {name for link in plan.links for name in link.source}
    # What some version of transformers does not tie is written twice.
    dialect, settings = plan.origin.dialect, plan.module_mapping.settings(plan.module)
    kept = linked | dialect.untied_names
    if settings.get("tie_word_embeddings") is False:
        kept |= dialect.head_names
    tensors = {n: t for n, t in plan.tensors.items() if n in kept or n not in aliases}
    record = {k: v for k, v in output.record().items() if k in ("vocabulary", "step")}
    written = _write_tensors(folder / "model.safetensors", tensors, record, progress)
    dtypes = {tensors[name].dtype.name for name in linked}
    config = {
        **{
            k: v
            for k, v in output.source_config.items()
            if k not in ("torch_dtype", "_name_or_path")
        },
        **with_kept_parts(_with_token_ids(settings, output.token_ids), output.source_config),
        "dtype": dtypes.pop() if len(dtypes) == 1 else "float32",
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    atomic_write_bytes(folder / "config.json", text.encode())
    _copy(output.companions, folder)
    return written


def _write_trainer(output: Output, folder: Path, progress: Progress) -> Hashes:
    written = _write_hugging_face(output, folder, progress)
    optimizer = output.optimizer
    assert optimizer is not None
    plan = output.class_plan or output.plan
    state = write_optimizer(optimizer, plan, output.order, for_trainer=True)
    write_trainer_files(folder, state, optimizer.count, output.trainer_settings, progress)
    return written


def _with_token_ids(settings: Mapping[str, Any], ids: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with the ids of special tokens, nested ones where settings are nested."""
    found = dict(settings)
    for name, value in ids.items():
        part, dot, last = name.rpartition(".")
        if not dot:
            found[name] = value
        elif isinstance(found.get(part), Mapping):
            found[part] = {**found[part], last: value}
    return found


def _write_peft(output: Output, folder: Path, progress: Progress) -> Hashes:
    settings = adapter_settings(output.plan, output.base)
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    atomic_write_bytes(folder / SETTINGS, text.encode())
    return _write_tensors(folder / WEIGHTS, output.plan.tensors, {}, progress)


def _write_run(output: Output, folder: Path, progress: Progress) -> Hashes:
    from jaxformer.checkpoints import CheckpointFolder

    def read(tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
        arrays: dict[str, Any] = {}
        for name, tensor in tensors.items():
            arrays[name] = tensor.read()
            progress(tensor.nbytes)
        return arrays

    step = output.step or 0
    arrays: dict[str, Any] = {
        "parameters": read(output.plan.tensors),
        "step": np.array(step, np.int32),
    }
    about: dict[str, Any] = {
        "config": {"model": output.config()},
        "vocabulary": output.vocabulary,
        "corpus": None,
        "val_loss": None,
        "token_ids": dict(output.token_ids),
        "origin": output.origin,
    }
    if output.base is not None:
        about["init_from"] = output.base
    if output.optimizer is not None:
        arrays |= {name: read(kept) for name, kept in output.optimizer.moments.items()}
        about["optimizer"] = {"optimizer": output.optimizer.kind, **output.optimizer.settings}
    checkpoints = CheckpointFolder(folder / "checkpoints")
    checkpoints.save(step, arrays, about)
    manifest = checkpoints.wait()
    arrays.clear()
    assert manifest is not None
    try:
        checkpoints.verify(step)
    except CheckpointError as error:
        raise read_back_error(folder / "checkpoints") from error
    _copy(output.companions, folder)
    return Hashes(
        {
            name.removeprefix("parameters/"): what["sha256"]
            for name, what in manifest["arrays"].items()
            if name.startswith("parameters/")
        },
        {
            checkpoints.folder / str(step) / "arrays" / name: sha256
            for name, sha256 in manifest["files"].items()
        },
    )


def _copy(files: Mapping[str, Path], folder: Path) -> None:
    for name, file in files.items():
        atomic_write_bytes(folder / name, file.read_bytes())


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


# Each writes a file, or into a folder.
WRITERS: dict[Format, Callable[[Output, Path, Progress], Hashes]] = {
    "safetensors": _write_safetensors,
    "torch": _write_torch,
    "huggingface": _write_hugging_face,
    "trainer": _write_trainer,
    "run": _write_run,
    "peft": _write_peft,
}
