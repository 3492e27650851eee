"""Safetensors files, read and written one tensor at a time.

The format: eight bytes with the length of the header, the header (JSON: dtype, shape and span of
every tensor), the data. There are three reasons not to use the library ``safetensors``: it maps
the whole file, so a process seems to need as much memory as the file has bytes; its numpy interface
has no bfloat16 and, in 0.8.0, writes transposed arrays wrongly without an error; and every error
here says what is wrong and where, before memory is allocated.
"""

import json
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxformer.errors import CheckpointError, UnsafeFileError
from jaxformer.porting.formats import tensors as t
from jaxformer.porting.formats.tensors import StoredTensor, Written
from jaxformer.storage.durable_files import atomic_write, read_back_error
from jaxformer.storage.local_files import LocalFile, safe_repr
from jaxformer.storage.strict_json import parse_json

# The limit of the library itself.
MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"

# In the order in which the library sorts tensors: by size of element, to keep each aligned.
DTYPES: dict[str, np.dtype] = {
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F64": np.dtype(np.float64),
    "C64": np.dtype(np.complex64),
    "F32": np.dtype(np.float32),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "BF16": t.BFLOAT16,
    "F16": np.dtype(np.float16),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "F8_E5M2FNUZ": t.FLOAT8_E5M2FNUZ,
    "F8_E4M3FNUZ": t.FLOAT8_E4M3FNUZ,
    "F8_E8M0": t.FLOAT8_E8M0FNU,
    "F8_E4M3": t.FLOAT8_E4M3FN,
    "F8_E5M2": t.FLOAT8_E5M2,
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def read_safetensors(path: str | Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Returns the tensors of a file, not yet read, and its metadata.

    Raises:
        CheckpointError: it is missing, cut short, damaged, or has an unknown dtype.
        UnsafeFileError: its header is too large, has a key twice, or claims more than there is.
        ResourceError: it cannot be read.
    """
    file = LocalFile(path)
    length = int.from_bytes(file.bytes(0, min(8, file.size)), "little") if file.size else 0
    if length > MAX_HEADER_BYTES:
        raise UnsafeFileError(
            f"{path} claims a header of {length} bytes, where {MAX_HEADER_BYTES} are the most that "
            "a safetensors file may have; do not use this file"
        )
    if file.size < 8 or 8 + length > file.size:
        raise _incomplete(path, f"it has {file.size} bytes and its header alone needs {8 + length}")
    header = parse_json(file.bytes(8, length), f"{path}: the header")
    metadata = header.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{path} is damaged: {METADATA} must map text to text")
    start = 8 + length
    spans: dict[str, tuple[int, int]] = {}
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        dtype, shape, spans[name] = _entry(entry, f"{path}: {safe_repr(name)}")
        where = f"{path}: {safe_repr(name)}"
        tensors[name] = t.file_tensor(file, where, shape, dtype, start + spans[name][0])
    _check_spans(path, spans, file.size - start)
    return tensors, metadata


def write_safetensors(
    path: str | Path,
    tensors: Mapping[str, StoredTensor],
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> Written:
    """Writes a file one tensor at a time, and reads it back before it appears under its name.

    The format has no ties: tensors with the same storage are written once for each name.

    Args:
        path: the file; an existing one is replaced at the end.
        tensors: by name.
        metadata: text by name, kept in the header.
        progress: called after each tensor with its size in bytes.

    Returns:
        What was read back.

    Raises:
        ValueError: a name, a dtype or the metadata cannot be written in this format.
        ResourceError: the disk is full or may not be written; nothing is left behind.
    """
    order = sorted(tensors, key=lambda name: (_rank(name, tensors[name]), name))
    header = _header(order, tensors, dict(metadata or {}))
    digests: dict[str, str] = {}

    def write(file: BinaryIO) -> None:
        file.write(header)
        # Neither writing nor hashing needs Python: they share the array and run side by side.
        with ThreadPoolExecutor(1) as pool:
            for name in order:
                array = t.read_checked(tensors[name], name)
                digest = pool.submit(t.digest, array)
                file.write(t.as_bytes(array))
                digests[name] = digest.result()
                progress(array.nbytes)
                del array  # before the next is read

    def check(temporary: Path) -> None:
        found, _ = read_safetensors(temporary)
        if digests != {name: t.digest(tensor.read()) for name, tensor in found.items()}:
            raise read_back_error(path)

    size = len(header) + sum(tensor.nbytes for tensor in tensors.values())
    sha256 = atomic_write(path, size, write, check)
    return Written({name: digests[name] for name in tensors}, sha256)


def read_sharded(index_path: str | Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Returns the tensors of all files that a ``model.safetensors.index.json`` names.

    Returns:
        The tensors by name, not yet read, and the metadata that all shards have in common.

    Raises:
        CheckpointError: a shard is missing or damaged, or the index and the shards disagree about
            which tensor is where; all differences are listed.
        UnsafeFileError: a shard's name leads out of the index's folder.
        ResourceError: a file cannot be read.
    """
    index_path = Path(index_path)
    weight_map = read_weight_map(index_path)
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (index_path.parent / shard).exists()]
    if missing:
        raise CheckpointError(
            f"{index_path} names files that are not beside it ({', '.join(missing)}); "
            "fetch them too"
        )
    read = {shard: read_safetensors(index_path.parent / shard) for shard in shards}
    problems = [
        f"{safe_repr(name)} is not in {shard}"
        for name, shard in weight_map.items()
        if name not in read[shard][0]
    ]
    problems += [
        f"{safe_repr(name)} is in {shard} but listed "
        + (f"in {weight_map[name]}" if name in weight_map else "nowhere")
        for shard in shards
        for name in read[shard][0]
        if weight_map.get(name) != shard
    ]
    if problems:
        raise CheckpointError(
            f"{index_path} does not fit its files: {'; '.join(problems)}; fetch all of them again"
        )
    tensors = {name: read[shard][0][name] for name, shard in weight_map.items()}
    common = set.intersection(*(set(metadata.items()) for _, metadata in read.values()))
    return tensors, dict(sorted(common))


def read_weight_map(index_path: str | Path) -> dict[str, str]:
    """Returns the name of the file, beside an index, that holds each tensor.

    Raises:
        CheckpointError: it is missing, or not an index.
        UnsafeFileError: a file's name leads elsewhere.
    """
    file = LocalFile(index_path)
    if file.size > MAX_HEADER_BYTES:
        raise UnsafeFileError(
            f"{index_path} has {file.size} bytes, where an index has at most {MAX_HEADER_BYTES}; "
            "do not use this file"
        )
    weight_map = parse_json(file.bytes(0, file.size), str(index_path)).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(shard, str) for shard in weight_map.values())
    ):
        raise CheckpointError(
            f"{index_path} is not an index: it needs a weight_map from tensor to file name"
        )
    for shard in weight_map.values():
        if (
            not shard.isprintable()
            or set(shard) & set("/\\:")
            or shard.startswith(".")
            or not shard
        ):
            raise UnsafeFileError(
                f"{index_path} names the file {safe_repr(shard)}, where only plain names in its "
                "own folder are allowed; do not use this file"
            )
    return weight_map


def _entry(entry: Any, where: str) -> tuple[np.dtype, tuple[int, ...], tuple[int, int]]:
    """Returns dtype, shape and span of one tensor, after checking that they fit together."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(
            f"{where} is damaged: it needs dtype, shape and data_offsets, and nothing else"
        )
    name, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(name, str) or name not in DTYPES:
        raise CheckpointError(
            f"{where} has the dtype {safe_repr(name)}, which is unsupported; "
            f"convert it to one of {', '.join(DTYPES)}"
        )
    if not isinstance(shape, list) or not isinstance(span, list) or len(span) != 2:
        raise CheckpointError(f"{where} is damaged: shape and data_offsets must be lists")
    sizes = t.check_shape(shape, DTYPES[name], where)
    if not all(type(place) is int for place in span) or not 0 <= span[0] <= span[1]:
        raise CheckpointError(f"{where} is damaged: it cannot lie at the bytes {safe_repr(span)}")
    claimed = StoredTensor(sizes, DTYPES[name], lambda: np.empty(0)).nbytes
    if claimed > span[1] - span[0]:
        raise UnsafeFileError(
            f"{where} claims {claimed} bytes ({name} of shape {safe_repr(shape)}) and has "
            f"{span[1] - span[0]}; do not use this file"
        )
    if claimed < span[1] - span[0]:
        raise CheckpointError(
            f"{where} is damaged: {name} of shape {safe_repr(shape)} needs {claimed} bytes, "
            f"it has {span[1] - span[0]}"
        )
    return DTYPES[name], sizes, (span[0], span[1])


def _check_spans(path: str | Path, spans: Mapping[str, tuple[int, int]], size: int) -> None:
    """Checks that every byte of the data belongs to exactly one tensor."""
    end = 0
    for name, (first, last) in sorted(spans.items(), key=lambda item: item[1]):
        if first < end:
            raise UnsafeFileError(
                f"{path}: {safe_repr(name)} overlaps another tensor; do not use this file"
            )
        if first > end:
            raise CheckpointError(
                f"{path} is damaged: the {first - end} bytes before {safe_repr(name)} belong to no "
                "tensor; fetch it again"
            )
        end = last
    if end > size:
        raise _incomplete(path, f"its tensors need {end} bytes and it has {size}")
    if end < size:
        raise CheckpointError(
            f"{path} is damaged: its last {size - end} bytes belong to no tensor; fetch it again"
        )


def _header(
    order: list[str], tensors: Mapping[str, StoredTensor], metadata: dict[str, str]
) -> bytes:
    if METADATA in tensors:
        raise ValueError(f"a tensor cannot be called {METADATA}: the format keeps that name")
    if not all(isinstance(v, str) for pair in metadata.items() for v in pair):
        raise ValueError(f"metadata must map text to text: got {metadata}")
    header: dict[str, Any] = {METADATA: metadata} if metadata else {}
    end = 0
    for name in order:
        tensor = tensors[name]
        span = [end, end + tensor.nbytes]
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": span,
        }
        end = span[1]
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    # So that the data begins at a multiple of eight.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _rank(name: str, tensor: StoredTensor) -> int:
    if tensor.dtype not in NAMES:
        raise ValueError(
            f"{name} has dtype {tensor.dtype}, which safetensors cannot hold: one of "
            f"{', '.join(str(dtype) for dtype in NAMES)} is needed"
        )
    return list(NAMES).index(tensor.dtype)


def _incomplete(path: str | Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path} is not a complete safetensors file: {why}; fetch it again")
