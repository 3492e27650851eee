"""Files that must be rejected; ``python -m tests.support.malicious_files FOLDER`` writes them.

Each is made without the library that it attacks, byte by byte, so none of them ever runs here.
"""

import dataclasses
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.malicious_pickles import DAMAGED, UNSAFE, bad_pickles
from tests.support.malicious_torch import bad_torch


@dataclasses.dataclass(frozen=True)
class BadFile:
    """A file that must be rejected.

    Args:
        name: what is wrong with it.
        path: the file.
        exit_code: 4 (damaged) or 5 (unsafe).
        kind: ``torch``, ``safetensors``, ``index`` or ``pickle``.
    """

    name: str
    path: Path
    exit_code: int
    kind: str


def corpus(folder: Path) -> list[BadFile]:
    """Writes every bad file into a folder, each in one of its own."""
    found = []
    makers = {"torch": bad_torch, "safetensors": bad_safetensors, "pickle": bad_pickles}
    suffixes = {"torch": "ckpt.pt", "safetensors": "model.safetensors", "pickle": "meta.pkl"}
    for kind, make in makers.items():
        for name, exit_code, data in make(folder):
            path = folder / kind / name / suffixes[kind]
            path.parent.mkdir(parents=True)
            path.write_bytes(data)
            found.append(BadFile(name, path, exit_code, kind))
    for name, exit_code, files in bad_indices():
        path = folder / "index" / name / "model.safetensors.index.json"
        path.parent.mkdir(parents=True)
        for file_name, data in {path.name: b"", **files}.items():
            (path.parent / file_name).write_bytes(data)
        found.append(BadFile(name, path, exit_code, "index"))
    # What a shard's name with .. would reach.
    (folder / "index" / "outside.safetensors").write_bytes(safetensors({"w": f32(2)}, bytes(8)))
    return found


def f32(*shape: Any, at: Any = None, **more: Any) -> dict[str, Any]:
    """A header's entry of float32."""
    size = 4
    for length in shape:
        size *= length
    return {"dtype": "F32", "shape": list(shape), "data_offsets": at or [0, size], **more}


def safetensors(header: Any, data: bytes, length: int | None = None) -> bytes:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(content) if length is None else length) + content + data


def bad_safetensors(folder: Path) -> Iterator[tuple[str, int, bytes]]:
    """Bad files with the name model.safetensors: what is wrong, exit code, content."""
    data = bytes(24)
    good = safetensors({"w": f32(2, 3)}, data)
    headers: dict[str, tuple[int, Any]] = {
        "absurd shape": (UNSAFE, {"w": f32(10**6, 10**6, at=[0, 24])}),
        "overflowing shape": (UNSAFE, {"w": f32(2**62, 2**62, at=[0, 24])}),
        "overflowing empty shape": (UNSAFE, {"w": f32(0, 2**62, 2**62, at=[0, 0])}),
        "forty axes": (UNSAFE, {"w": f32(*[1] * 40, at=[0, 4])}),
        "negative size": (DAMAGED, {"w": f32(-2, -3, at=[0, 24])}),
        "size that is a float": (DAMAGED, {"w": f32(2.0, 3, at=[0, 24])}),
        "size that is true": (DAMAGED, {"w": f32(True, 6, at=[0, 24])}),
        "size that is text": (DAMAGED, {"w": {**f32(6), "shape": ["6"]}}),
        "shape that is text": (DAMAGED, {"w": {**f32(6), "shape": "6"}}),
        "span too short": (UNSAFE, {"w": f32(7, at=[0, 24])}),
        "span too long": (DAMAGED, {"w": f32(5, at=[0, 24])}),
        "span behind the end": (DAMAGED, {"w": f32(6, at=[8, 32])}),
        "span backwards": (DAMAGED, {"w": f32(6, at=[24, 0])}),
        "span negative": (DAMAGED, {"w": f32(6, at=[-24, 0])}),
        "span of floats": (DAMAGED, {"w": f32(6, at=[0.0, 24.0])}),
        "span of three": (DAMAGED, {"w": f32(6, at=[0, 12, 24])}),
        "overlap": (UNSAFE, {"a": f32(4, at=[0, 16]), "b": f32(4, at=[8, 24])}),
        "same span": (UNSAFE, {"a": f32(6), "b": f32(6)}),
        "hole": (DAMAGED, {"a": f32(2, at=[0, 8]), "b": f32(2, at=[16, 24])}),
        "hole at the start": (DAMAGED, {"a": f32(4, at=[8, 24])}),
        "data behind the tensors": (DAMAGED, {"w": f32(5)}),
        "nothing but data": (DAMAGED, {}),
        "dtype that is not known": (DAMAGED, {"w": {**f32(6), "dtype": "F4"}}),
        "dtype that is a list": (DAMAGED, {"w": {**f32(6), "dtype": ["F32"]}}),
        "entry with more": (DAMAGED, {"w": f32(6, code="x")}),
        "entry with less": (DAMAGED, {"w": {"dtype": "F32"}}),
        "entry that is a list": (DAMAGED, {"w": []}),
        "metadata of numbers": (DAMAGED, {"__metadata__": {"a": 1}, "w": f32(6)}),
        "metadata that is text": (DAMAGED, {"__metadata__": "x", "w": f32(6)}),
        "list": (DAMAGED, [f32(6)]),
        "number": (DAMAGED, b"5"),
        "not JSON": (DAMAGED, b"{'w': 1}"),
        "UTF-16": (DAMAGED, json.dumps({"w": f32(6)}).encode("utf-16")),
        "half a surrogate pair": (DAMAGED, b'{"\\ud800": ' + json.dumps(f32(6)).encode() + b"}"),
        "huge integer": (DAMAGED, b'{"w": ' + b"9" * 5000 + b"}"),
        "nested header": (UNSAFE, b'{"w": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
        "many lists": (UNSAFE, b'{"w": [' + b"[]," * 3_100_000 + b"[]]}"),
        "many objects": (UNSAFE, b'{"w": [' + b"{}," * 3_100_000 + b"{}]}"),
        "key twice": (UNSAFE, b'{"w": %s, "w": %s}' % ((json.dumps(f32(6)).encode(),) * 2)),
        "line break in a name": (UNSAFE, {"a\nb\x1b[31m" + "x" * 999: f32(7, at=[0, 24])}),
    }
    for name, (exit_code, header) in headers.items():
        yield name, exit_code, safetensors(header, data)
    yield (
        "key twice in an entry",
        UNSAFE,
        safetensors(b'{"w":{"dtype":"F32","dtype":"F32","shape":[6],"data_offsets":[0,24]}}', data),
    )
    yield "oversized header", UNSAFE, safetensors({"w": f32(6)}, data, 2**63)
    yield "header of 100 MB and a byte", UNSAFE, safetensors({"w": f32(6)}, data, 100_000_001)
    yield "header larger than the file", DAMAGED, safetensors({"w": f32(6)}, data, 5000)
    yield "header cut", DAMAGED, safetensors({"w": f32(6)}, data, 20)
    yield (
        "boolean of two",
        DAMAGED,
        safetensors({"w": {"dtype": "BOOL", "shape": [2], "data_offsets": [0, 2]}}, b"\x02\x00"),
    )
    for place in (0, 1, 7, 8, 9, 20, len(good) - 24, len(good) - 23, len(good) - 1):
        yield f"cut at {place}", DAMAGED, good[:place]
    yield "a byte more", DAMAGED, good + b"x"


def bad_indices() -> Iterator[tuple[str, int, dict[str, bytes]]]:
    """Bad indices of several files: what is wrong, exit code, the files beside each."""
    index = "model.safetensors.index.json"
    shard = safetensors({"w": f32(2)}, bytes(8))
    other = safetensors({"v": f32(2)}, bytes(8))
    names = {
        "shard with ..": "../outside.safetensors",
        "shard with backslashes": "..\\..\\outside.safetensors",
        "absolute shard": "/etc/passwd",
        "shard on a drive": "C:outside.safetensors",
        "shard that is the folder above": "..",
        "shard without a name": "",
        "shard with a zero": "a\0.safetensors",
        "shard with a line break": "a\nb.safetensors",
        "shard in a folder": "sub/a.safetensors",
    }
    for name, place in names.items():
        yield name, UNSAFE, {index: json.dumps({"weight_map": {"w": place}}).encode()}
    maps: dict[str, tuple[int, Any]] = {
        "missing shard": (DAMAGED, {"w": "a.safetensors", "v": "c.safetensors"}),
        "tensor in no shard": (DAMAGED, {"w": "a.safetensors", "x": "a.safetensors"}),
        "tensor in another shard": (DAMAGED, {"w": "b.safetensors", "v": "a.safetensors"}),
        "tensor not listed": (DAMAGED, {"x": "a.safetensors"}),
        "map of numbers": (DAMAGED, {"w": 1}),
        "map that is a list": (DAMAGED, ["a.safetensors"]),
        "empty map": (DAMAGED, {}),
    }
    shards = {"a.safetensors": shard, "b.safetensors": other}
    for name, (exit_code, weight_map) in maps.items():
        yield name, exit_code, {**shards, index: json.dumps({"weight_map": weight_map}).encode()}
    yield "no map", DAMAGED, {index: b'{"metadata": {}}'}
    yield "not JSON", DAMAGED, {index: b'{"weight_map": {'}
    yield (
        "key twice",
        UNSAFE,
        {
            **shards,
            index: b'{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}',
        },
    )
    yield (
        "bad shard",
        UNSAFE,
        {
            index: b'{"weight_map": {"w": "a.safetensors"}}',
            "a.safetensors": safetensors({"w": f32(9, at=[0, 8])}, bytes(8)),
        },
    )


if __name__ == "__main__":
    for bad in corpus(Path(sys.argv[1])):
        sys.stdout.write(f"{bad.exit_code} {bad.path}\n")
