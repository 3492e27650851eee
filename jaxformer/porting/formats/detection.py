"""The format of a file or folder, detected from its content and never from its suffix."""

import re
from pathlib import Path
from typing import Literal

from jaxformer.errors import CheckpointError, JaxformerError, ResourceError
from jaxformer.porting.formats.safetensors_files import MAX_HEADER_BYTES
from jaxformer.porting.formats.torch_files import is_legacy, looks_like_pickle
from jaxformer.storage.local_files import LocalFile, safe_repr
from jaxformer.storage.strict_json import parse_json

Kind = Literal[
    "safetensors",
    "safetensors_index",
    "torch",
    "torch_index",
    "torch_legacy",
    "pickle",
    "huggingface",
    "run",
    "checkpoints",
    "checkpoint",
    "orbax",
]
# The formats as they are called in messages.
FORMAT_NAMES: dict[str, str] = {
    "safetensors": "safetensors file",
    "safetensors_index": "safetensors files",
    "torch": "PyTorch file",
    "torch_index": "PyTorch files",
    "huggingface": "Hugging Face folder",
    "trainer": "Trainer folder",
    "run": "run folder",
    "peft": "PEFT folder",
    "checkpoints": "run folder",
    "checkpoint": "run folder",
}
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# The same with the name of a variant, and what only looks like one.
VARIANTS = (
    "model.*.safetensors",
    "model.safetensors.index.*.json",
    "pytorch_model.*.bin",
    "pytorch_model.bin.index.*.json",
)
SHARD = re.compile(r"-\d+-of-\d+\.")
ORBAX = ("_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt")
KNOWN = (
    "a run folder, a Hugging Face folder, a .safetensors file or its index, or a file of torch.save"
)


def detect(path: str | Path) -> Kind:
    """Returns the format of a file or folder.

    =====================  ====================================================================
    ``safetensors``        a safetensors file
    ``safetensors_index``  the index of several
    ``torch``              a zip archive, as ``torch.save`` writes it; not yet checked
    ``torch_index``        the index of several
    ``torch_legacy``       a PyTorch file from before 1.6, which ``read_torch_file`` rejects
    ``pickle``             a bare pickle, such as nanoGPT's ``meta.pkl``
    ``huggingface``        a folder with config.json and weights
    ``run``                the folder of a training run
    ``checkpoints``        its ``checkpoints`` folder
    ``checkpoint``         one step in that
    ``orbax``              an Orbax folder without jaxformer's manifest
    =====================  ====================================================================

    Raises:
        CheckpointError: the path does not exist, or the format is unknown; the message says what
            was found.
        UnsafeFileError: an index has a key twice.
        ResourceError: it cannot be read.
    """
    path = Path(path)
    try:
        return _folder(path) if path.is_dir() else _file(path)
    except (OSError, ValueError) as error:
        raise ResourceError(f"{path} cannot be read: {error}; check its permissions") from error


def find_weights(folder: Path) -> Path | None:
    """Returns the file of weights of a Hugging Face folder, or the index of several; None without.

    A folder may have its weights under the name of a variant alone: ``model.fp16.safetensors``.

    Raises:
        CheckpointError: there are several variants and none without a name.
    """
    for name in WEIGHTS:
        if (folder / name).is_file():
            return folder / name
    for pattern in VARIANTS:
        found = sorted(file for file in folder.glob(pattern) if not SHARD.search(file.name))
        if len(found) > 1:
            names = ", ".join(file.name for file in found)
            raise CheckpointError(f"{folder} has several variants of the weights: name {names}")
        if found:
            return found[0]
    return None


def _folder(path: Path) -> Kind:
    names = {entry.name for entry in path.iterdir()}
    if "config.json" in names and find_weights(path) is not None:
        return "huggingface"
    if _has_steps(path / "checkpoints"):
        return "run"
    if "MANIFEST.json" in names:
        return "checkpoint"
    if _has_steps(path):
        return "checkpoints"
    if names & set(ORBAX):
        return "orbax"
    if "config.json" in names and {"config.toml", "metrics.jsonl"} & names:
        raise CheckpointError(f"{path} holds a run that has no checkpoint yet")
    if "config.json" in names:
        raise CheckpointError(
            f"{path} has a config.json and no weights: put one of {', '.join(WEIGHTS)} beside it"
        )
    found = ", ".join(safe_repr(name) for name in sorted(names)[:5]) or "nothing"
    raise CheckpointError(f"{path} is not a checkpoint: it holds {found}; name {KNOWN}")


def _has_steps(folder: Path) -> bool:
    return folder.is_dir() and any(
        re.fullmatch("0|[1-9][0-9]*", entry.name, re.ASCII) and (entry / "MANIFEST.json").is_file()
        for entry in folder.iterdir()
    )


def _file(path: Path) -> Kind:
    file = LocalFile(path)
    head = file.bytes(0, min(file.size, 512))
    if head.startswith(b"PK\x03\x04"):
        return "torch"
    if is_legacy(head):
        return "torch_legacy"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= file.size:
        return "safetensors"
    if head.lstrip()[:1] == b"{" and file.size <= MAX_HEADER_BYTES:
        return _index(file)
    if head[8:9] == b"{":
        return "safetensors"
    if looks_like_pickle(file):
        return "pickle"
    what = next((name for start, name in STARTS.items() if head.startswith(start)), None)
    what = what or (f"it begins with {safe_repr(head[:8])}" if head.strip(b"\0") else "it is empty")
    raise CheckpointError(f"{path} is not a checkpoint: {what}; name {KNOWN}")


def _index(file: LocalFile) -> Kind:
    try:
        weight_map = parse_json(file.bytes(0, file.size), str(file.path)).get("weight_map")
    except CheckpointError as error:
        raise CheckpointError(f"{error}, or name {KNOWN}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{file.path} is JSON, but not the index of a checkpoint: it has no weight_map; "
            f"name {KNOWN}"
        )
    for shard in weight_map.values():
        # The first shard that is there decides; the reader checks all names and reads all shards.
        if not isinstance(shard, str) or set(shard) & set("/\\:\0") or shard.startswith("."):
            break
        try:
            return (
                "torch_index" if _file(file.path.parent / shard) == "torch" else "safetensors_index"
            )
        except JaxformerError:
            continue
    return "safetensors_index"


STARTS = {
    b"PK\x05\x06": "it is an empty zip archive",
    b"\x89HDF": "it is HDF5, as Keras writes it",
    b"\x1f\x8b": "it is compressed with gzip",
    b"GGUF": "it is GGUF",
    b"\x93NUMPY": "it is one numpy array",
    b"version https://git-lfs": "it is a Git LFS pointer; run git lfs pull",
}
