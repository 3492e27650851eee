"""What a checkpoint of any format holds, before it is known which dialect its names belong to."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.errors import CheckpointError, Setting, UsageError
from jaxformer.porting.formats.detection import WEIGHTS, Kind, detect, find_weights
from jaxformer.porting.formats.plain_pickle import read_plain_pickle
from jaxformer.porting.formats.safetensors_files import (
    read_safetensors,
    read_sharded,
    read_weight_map,
)
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.formats.torch_entries import (
    find_optimizer,
    find_record,
    find_state_dict,
    find_unread,
)
from jaxformer.porting.formats.torch_files import read_torch_file
from jaxformer.porting.formats.trainer_folders import find_optimizer_file, unread_files
from jaxformer.storage.local_files import LocalFile
from jaxformer.storage.strict_json import parse_json

MAX_CONFIG_BYTES = 16 << 20
# What lies beside the weights of a Hugging Face folder: files of a tokenizer, chat templates, and
# settings of generation and of what prepares the inputs.
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "chat_template.jinja", "chat_template.json",
    "generation_config.json", "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
TOKEN_IDS = (
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "unk_token_id",
    "mask_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens", "begin_suppress_tokens",
)  # fmt: skip
# Where a model of two halves has those of its texts.
TEXTS = "text_config"
# The name of jaxformer's record in the metadata of a safetensors file.
RECORD = "jaxformer"
# What a record may hold, and of which type; anything else in it is ignored.
RECORDED: dict[str, type] = {
    "dialect": str, "class": str, "config": dict, "vocabulary": str, "token_ids": dict,
    "step": int, "origin": dict, "init_from": str,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Moments:
    """An optimizer's state in a training run of jaxformer.

    Attributes:
        moments: by optax's name and the paths of their parameters.
        manifest: of the step.
    """

    moments: dict[str, dict[str, StoredTensor]]
    manifest: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RawCheckpoint:
    """What a path holds, as it is stored.

    Attributes:
        kind: its format.
        files: all files that were read, the weights first.
        tensors: the model's arrays, by their names in the file.
        record: what else is known of them: some of the names in ``RECORDED``.
        companions: files of a tokenizer beside it.
        optimizer: a PyTorch optimizer's state dict, an ``OptimizerFile``, or ``Moments``.
        warnings: damaged steps of a run that were skipped.
        unread_optimizer: why an optimizer's state that is there is not read, "" if there is none.
        unread: what else lies beside the weights and is not read, by its key.
    """

    kind: Kind
    files: tuple[Path, ...]
    tensors: dict[str, StoredTensor]
    record: dict[str, Any] = dataclasses.field(default_factory=dict)
    companions: tuple[Path, ...] = ()
    optimizer: Any = None
    warnings: tuple[str, ...] = ()
    unread_optimizer: str = ""
    unread: tuple[str, ...] = ()


def read_raw_checkpoint(
    path: Path, step: int | None = None, *, best: bool = False
) -> RawCheckpoint:
    """Reads what a file or folder holds; the format is detected from the content.

    Args:
        path: the file or folder.
        step: which step of a run's folder; default the newest that verifies.
        best: the step with the lowest validation loss.

    Raises:
        CheckpointError: it is missing, damaged, or no checkpoint.
        UnsafeFileError: opening it could do harm.
        UsageError: a step was given, and the format has no steps.
        ResourceError: it cannot be read.
    """
    raw = _read(path, detect(path), step, best)
    record = {
        name: raw.record[name]
        for name, kind in RECORDED.items()
        if type(raw.record.get(name)) is kind
    }
    if not 0 <= record.get("step", 0) < 2**31:
        raise CheckpointError(f"{path} is damaged: it claims to be of step {record['step']}")
    if not _is_origin(record.get("origin", {})):
        del record["origin"]
    return dataclasses.replace(raw, record=record)


def _is_origin(found: dict[str, Any]) -> bool:
    """Whether this is what ``Checkpoint.origin_of`` gives; anybody may have written the file."""
    dialect, order = found.get("dialect", ""), found.get("order", [])
    names = [dialect, *order] if isinstance(order, list) else [None]
    try:
        json.dumps(found)
    except (TypeError, ValueError, RecursionError):
        return False
    return all(isinstance(name, str) for name in names)


def _read(path: Path, kind: Kind, step: int | None, best: bool) -> RawCheckpoint:
    if kind in ("run", "checkpoints", "checkpoint"):
        return _read_run(path, kind, step, best)
    if step is not None or best:
        raise UsageError(
            f"{path} has one checkpoint alone: leave out ",
            Setting("step"),
            " and ",
            Setting("best"),
        )
    if kind == "orbax":
        raise CheckpointError(
            f"{path} is an Orbax folder without jaxformer's MANIFEST.json, so it cannot be "
            "verified; name the run's folder"
        )
    if kind == "huggingface":
        return _read_folder(path)
    raw = READERS[kind](path, kind)
    config = path.parent / "config.json"
    if "config" not in raw.record and config.is_file():
        found = read_config(config)
        if "model_type" in found:
            return _with_sidecars(raw, path.parent, found)
    return with_optimizer(raw, path.parent) if path.name in WEIGHTS else raw


def read_config(path: Path) -> dict[str, Any]:
    """Reads settings from a JSON file.

    Raises:
        CheckpointError: it is missing or no JSON object.
        UnsafeFileError: it is too large, or names a setting twice.
        ResourceError: it cannot be read.
    """
    file = LocalFile(path)
    if file.size > MAX_CONFIG_BYTES:
        raise CheckpointError(f"{path} has {file.size} bytes, where settings have at most 16 MiB")
    return parse_json(file.bytes(0, file.size), str(path))


def read_meta(path: Path) -> str:
    """Reads the characters of nanoGPT's ``meta.pkl``, in the order of their ids.

    Raises:
        CheckpointError: it is missing, damaged, or holds no vocabulary of characters.
        UnsafeFileError: it holds more than plain values.
    """
    meta = read_plain_pickle(path)
    table = meta.get("itos") if isinstance(meta, dict) else None
    if not isinstance(table, dict) or not all(
        isinstance(table.get(i), str) and len(table[i]) == 1 for i in range(len(table))
    ):
        raise CheckpointError(
            f"{path} holds no vocabulary: it needs itos, with one character for each id from 0 on"
        )
    return "".join(table[i] for i in range(len(table)))


def _read_folder(path: Path) -> RawCheckpoint:
    weights = find_weights(path)
    assert weights is not None
    kind = detect(weights)
    raw = dataclasses.replace(READERS[kind](weights, kind), kind="huggingface")
    return _with_sidecars(raw, path, read_config(path / "config.json"))


def _with_sidecars(raw: RawCheckpoint, folder: Path, config: dict[str, Any]) -> RawCheckpoint:
    """Adds what lies beside the weights: settings, a tokenizer, and an optimizer's state."""
    record = {k: v for k, v in raw.record.items() if k in ("vocabulary", "step")}
    whole = dataclasses.replace(
        raw,
        files=(*raw.files, folder / "config.json"),
        record={**record, "config": config},
        companions=tuple(folder / name for name in COMPANIONS if (folder / name).is_file()),
    )
    return with_optimizer(whole, folder)


def with_optimizer(raw: RawCheckpoint, folder: Path) -> RawCheckpoint:
    """Adds an optimizer's state that lies beside the weights in a file of its own.

    Args:
        raw: the weights.
        folder: where the file may lie.
    """
    found = find_optimizer_file(folder)
    if found is None or raw.optimizer is not None:
        return raw
    files = (*raw.files, *found.files)
    unread = (*raw.unread, *unread_files(folder))
    return dataclasses.replace(raw, files=files, optimizer=found, unread=unread)


def known_token_ids(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the ids of special tokens among settings; ``text_config.`` is before nested ones."""
    texts = settings.get(TEXTS)
    nested = {f"{TEXTS}.{k}": v for k, v in texts.items()} if isinstance(texts, dict) else {}
    known = {*TOKEN_IDS, *(f"{TEXTS}.{name}" for name in TOKEN_IDS)}
    return {k: v for k, v in {**settings, **nested}.items() if k in known and v is not None}


def _read_safetensors(path: Path, kind: Kind) -> RawCheckpoint:
    files = [path]
    if kind == "safetensors_index":
        tensors, metadata = read_sharded(path)
        files += [path.parent / name for name in sorted(set(read_weight_map(path).values()))]
    else:
        tensors, metadata = read_safetensors(path)
    record = {}
    if RECORD in metadata:
        record = parse_json(metadata[RECORD].encode(), f"{path}: the metadata {RECORD}")
    return RawCheckpoint(kind, tuple(files), tensors, record)


def _read_torch(path: Path, kind: Kind) -> RawCheckpoint:
    tree = read_torch_file(path)
    place, tensors = find_state_dict(tree, path)
    if place is None:
        return RawCheckpoint(kind, (path,), tensors)
    optimizer, unread_optimizer = find_optimizer(tree)
    return RawCheckpoint(
        kind,
        (path,),
        tensors,
        find_record(tree),
        optimizer=optimizer,
        unread_optimizer=unread_optimizer,
        unread=find_unread(tree, place, optimizer),
    )


def _read_torch_shards(path: Path, kind: Kind) -> RawCheckpoint:
    weight_map = read_weight_map(path)
    shards = {name: _read_torch(path.parent / name, kind) for name in set(weight_map.values())}
    found = {name: shard for shard, part in shards.items() for name in part.tensors}
    wrong = [
        name for name in found.keys() | weight_map.keys() if found.get(name) != weight_map.get(name)
    ]
    if wrong:
        raise CheckpointError(
            f"{path} does not fit its files, which disagree about {', '.join(sorted(wrong))}; "
            "fetch all of them again"
        )
    tensors = {name: shards[shard].tensors[name] for name, shard in weight_map.items()}
    return RawCheckpoint(kind, (path, *(path.parent / name for name in sorted(shards))), tensors)


def _read_run(path: Path, kind: Kind, step: int | None, best: bool) -> RawCheckpoint:
    from jaxformer.checkpoints import GROUPS, CheckpointFolder

    folder = {"run": path / "checkpoints", "checkpoints": path, "checkpoint": path.parent}[kind]
    if kind == "checkpoint":
        if step is not None or best:
            raise UsageError(
                f"{path} is one step alone: leave out ", Setting("step"), " and ", Setting("best")
            )
        if not path.resolve().name.isdecimal():
            raise CheckpointError(f"{path} must have its step's number as its name")
        path = path.resolve()
        folder, step = path.parent, int(path.name)
    try:
        arrays, manifest, warnings = CheckpointFolder(folder).choose(step, best=best)
        here, parameters = folder / str(manifest["step"]), _stored(arrays["parameters"])
        # What is evaluated; an optimizer's state is not of these weights.
        average = _stored(arrays.get("ema", {}))
    except (LookupError, TypeError, AttributeError) as error:
        # A manifest with a correct seal, but not written by jaxformer.
        raise CheckpointError(f"{folder} has a manifest that lacks {error}") from error
    root = folder.parent
    kept = {
        group: _stored(arrays[group]) for group in GROUPS[1:] if group in arrays and not average
    }
    return RawCheckpoint(
        kind,
        tuple(sorted(path for path in here.rglob("*") if path.is_file())),
        parameters | average,
        {**manifest, "dialect": "jaxformer"},
        companions=tuple(root / name for name in COMPANIONS if (root / name).is_file()),
        optimizer=Moments(kept, manifest) if kept else None,
        warnings=tuple(warnings),
    )


def _stored(arrays: Mapping[str, Any]) -> dict[str, StoredTensor]:
    return {name: StoredTensor.of(np.asarray(array)) for name, array in arrays.items()}


READERS: dict[Kind, Callable[[Path, Kind], RawCheckpoint]] = {
    "safetensors": _read_safetensors,
    "safetensors_index": _read_safetensors,
    "torch": _read_torch,
    # ``read_torch_file`` rejects these two, each with its reason.
    "torch_legacy": _read_torch,
    "pickle": _read_torch,
    "torch_index": _read_torch_shards,
}
