"""Checkpoints of PyTorch that must be rejected."""

import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support.malicious_pickles import (
    DAMAGED,
    HOOKS,
    UNSAFE,
    VIEW,
    doubling,
    nested,
    number,
    numbers,
    pickled,
    storage,
    system,
    text,
    view,
)  # fmt: skip


def archive(
    path: Path,
    data: bytes,
    entries: Mapping[str, bytes] | None = None,
    method: int = zipfile.ZIP_STORED,
) -> bytes:
    """A zip archive as torch.save makes it, with a storage of four zeros."""
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w", method) as file:
        warnings.simplefilter("ignore")
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/byteorder", b"little")
        for name, content in {"data/0": bytes(16), "version": b"3\n", **(entries or {})}.items():
            file.writestr("archive/" + name if name[0] not in "/." else name, content)
    result = path.read_bytes()
    path.unlink()
    return result


def bad_torch(folder: Path) -> Iterator[tuple[str, int, bytes]]:
    """Bad files with the name ckpt.pt: what is wrong, exit code, content."""
    scratch = folder / "scratch.zip"

    def zipped(data: bytes, *more: Any, **entries: Any) -> bytes:
        return archive(scratch, data, *more, **entries)

    good = pickled(view())
    values = {
        "reduce os.system": system(),
        "reduce posix.system": system("posix"),
        "reduce nt.system": system("nt"),
        "reduce builtins.eval": b"cbuiltins\neval\n" + text("1") + b"\x85R",
        "reduce builtins.getattr": b"c__builtin__\ngetattr\n(" + HOOKS + text("clear") + b"tR",
        "reduce subprocess": b"csubprocess\nPopen\n" + text("true") + b"\x85R",
        "stack global": text("os") + text("system") + b"\x93" + text("true") + b"\x85R",
        "stack global of a dotted name": text("torch") + text("os.system") + b"\x93",
        "stack global with line breaks": text("o\ns\x1b[31m") + text("x" * 5000) + b"\x93",
        "inst": b"(" + text("true") + b"ios\nsystem\n",
        "obj": b"(ccollections\nOrderedDict\no",
        "newobj": b"ccollections\nOrderedDict\n)\x81",
        "newobj_ex": b"ccollections\nOrderedDict\n)}\x92",
        "namespace": b"cargparse\nNamespace\n)\x81}" + text("lr") + number(1) + b"sb",
        "numpy scalar": b"cnumpy._core.multiarray\nscalar\n" + b"cnumpy\ndtype\n",
        "numpy array": b"cnumpy.core.multiarray\n_reconstruct\n",
        "whole module": b"ctorch.nn.modules.linear\nLinear\n)\x81}b",
        "sparse tensor": b"ctorch._utils\n_rebuild_sparse_tensor\n",
        "numpy tensor": b"ctorch._utils\n_rebuild_device_tensor_from_numpy\n",
        "torch.load": b"ctorch\nload\n" + text("x") + b"\x85R",
        "extension 1": b"\x82\x01",
        "extension 2": b"\x83\x01\x00",
        "extension 4": b"\x84\x01\x00\x00\x00",
        "reduce of text": text("os.system") + b")R",
        "reduce of a dtype": b"ctorch\nfloat32\n)R",
        "reduce of a tensor": view() + b")R",
        "build on a function": VIEW + b"}" + text("make") + system() + b"sb",
        "build on a stand-in": VIEW + b"}b",
        "build on a list": b"]}b",
        "a bare storage class as function": b"ctorch\nFloatStorage\n" + number(4) + b"\x85R",
        "too many arguments": view(more=b"N" * 9),
        "set of lists": b"c__builtin__\nset\n](]e\x85R",
        "bytes of a list": b"c_codecs\nencode\n]" + text("latin1") + b"\x86R",
        "bytes by another codec": b"c_codecs\nencode\n" + text("a") + text("zlib") + b"\x86R",
        "tuple as key": b"}" + b"N\x85" + b"Ns",
        "huge integer as key": b"}" + number(2**200) + b"Ns",
        "doubled tuples as key": b"}" + doubling(b")") + b"Ns",
        "doubled tuples": doubling(b")"),
        "doubled lists": doubling(b"]"),
        "recursion in a list": nested(200),
        "recursion without end": nested(300_000),
        "a list in itself": b"]q\x00h\x00a",
        "parameter of text": b"ctorch._utils\n_rebuild_parameter\n(" + text("x") + b"\x89}tR",
        "persistent id of text": text("storage") + b"Q",
        "persistent id of a tuple too short": text("storage") + b"\x85Q",
        "persistent id of a module": storage().replace(b"storage", b"modules", 1),
        "text persistent id": b"P0\n",
        "stride bomb": view((200_000, 200_000), (0, 0)),
        "small stride bomb": view((5,), (0,)),
        "overlapping stride bomb": view((4, 2), (1, 1), 0),
        "overflowing shape": view((2**62, 2**62), (1, 1)),
        "overflowing empty shape": view((0, 2**62, 2**62), (1, 1, 1)),
        "forty axes": view((1,) * 40, (1,) * 40),
        "sizes of a thousand bits": view((2**1000,), (1,)),
        "negative stride": view((4,), (-1,), 3),
        "negative offset": view((2,), (1,), -1),
        "offset behind the storage": view((0,), (1,), 5),
        "last element behind the storage": view((2, 2), (3, 1)),
        "more strides than sizes": view((4,), (1, 1)),
        "offset of text": VIEW
        + b"("
        + storage()
        + text("0")
        + numbers(4)
        + numbers(1)
        + b"\x89}tR",
        "storage claims more": view((4,), where=storage(count=10**12)),
        "storage claims less": view((2,), where=storage(count=2)),
        "negative storage": view((0,), where=storage(count=-4)),
        "storage of another dtype": view(where=storage(kind="torch\nDoubleStorage")),
        "storage without dtype": view(
            (16,), where=storage("0", 16, "torch.storage\nUntypedStorage")
        ),
        "storage key with ..": view(where=storage("../byteorder")),
        "list as shape": VIEW + b"(" + storage() + number(0) + b"]]\x89}tR",
        "storage that is a tensor": view(where=view()),
    }
    # A missing entry looks like a file that was cut.
    damaged = {"storage key with .."}
    for name, value in values.items():
        yield name, DAMAGED if name in damaged else UNSAFE, zipped(pickled(value))
    damage = {
        "negative size": view((-4,), (1,)),
        "size of text": VIEW + b"(" + storage() + number(0) + text("4") + b"\x85N\x85\x89}tR",
        "a function as value": VIEW,
        "a storage as value": storage(),
        "conjugated": view(more=b"}" + text("conj") + b"\x88s"),
        "missing storage": view(where=storage("7")),
        "byte that is no instruction": b"\xff",
        "huge text": b"X\xff\xff\xff\xff",
        "huge text of 8 bytes": b"\x8d" + b"\xff" * 8,
        "huge bytes": b"\x8e" + b"\xff" * 7 + b"\x7f",
        "text that is not UTF-8": b"X\x02\x00\x00\x00\xff\xfe",
        "half a surrogate pair": b"X\x03\x00\x00\x00\xed\xa0\x80",
        "memo that is not there": b"h\x63",
        "far memo that is not there": b"j\xff\xff\xff\x7f",
        "append to a dict": b"}Na",
        "items without a mark": b"u",
        "pairs without a value": b"}(Nu",
    }
    for name, value in damage.items():
        yield name, DAMAGED, zipped(pickled(value))
    big = view((25_000,), where=storage("1", 25_000))
    yield (
        "repeated claims",
        UNSAFE,
        zipped(
            pickled(b"](" + big + b"q\x05" + b"h\x05" * 3000 + b"e"), {"data/1": bytes(100_000)}
        ),
    )
    yield "old integer", UNSAFE, zipped(pickled(b"I5\n"))
    yield "stack underflow", DAMAGED, zipped(pickled(b"\x85\x85\x87"))
    yield "huge long", UNSAFE, zipped(pickled(b"\x8b\xff\xff\xff\x7f"))
    yield "huge bytearray", UNSAFE, zipped(pickled(b"\x96" + b"\xff" * 7 + b"\x7f"))
    yield "far memo", DAMAGED, zipped(b"\x80\x02Nr\xff\xff\xff\x7f")
    yield "many objects", UNSAFE, zipped(b"\x80\x04(" + b"\x8f" * 3_000_000 + b"l.")
    yield "many marks", UNSAFE, zipped(b"\x80\x04" + b"(" * 3_000_000)
    yield (
        "many memos",
        UNSAFE,
        zipped(b"\x80\x04N" + b"".join(b"r" + struct.pack("<I", i) for i in range(2_100_000))),
    )
    yield "pickle without end", DAMAGED, zipped(good[:-1])
    yield "pickle with more behind it", DAMAGED, zipped(good + good)
    yield "empty pickle", DAMAGED, zipped(b"")
    yield "huge pickle", UNSAFE, zipped(b"\x80\x02" + b"N0" * (17 << 20) + b"N.")
    yield (
        "zip bomb",
        UNSAFE,
        zipped(
            pickled(view((2**24,), where=storage("1", 2**24))),
            {"data/1": bytes(2**26)},
            zipfile.ZIP_DEFLATED,
        ),
    )
    yield "entry twice", UNSAFE, zipped(good, {"data.pkl": pickled(system())})
    yield "two pickles", DAMAGED, zipped(good, {"./data.pkl": good})
    yield "torchscript code", UNSAFE, zipped(good, {"code/__torch__.py": b"x"})
    yield "torchscript constants", UNSAFE, zipped(good, {"constants.pkl": b"x"})
    yield "entry with ..", UNSAFE, zipped(good, {"../../etc/passwd": b"x"})
    yield "absolute entry", UNSAFE, zipped(good, {"/etc/passwd": b"x"})
    yield "entry with backslashes", UNSAFE, zipped(good, {"data\\..\\x": b"x"})
    yield "big-endian", DAMAGED, zipped(good).replace(b"little", b"big!!!")
    yield "big-endian record", DAMAGED, _other_order(scratch, good)
    yield "not a checkpoint", DAMAGED, zipped(good).replace(b"data.pkl", b"dota.pkl")

    whole = zipped(good)
    end = whole.rindex(b"PK\x05\x06")
    central = struct.unpack_from("<L", whole, end + 16)[0]
    pickle_size = struct.pack("<L", len(good))

    def patched(place: int, data: bytes) -> bytes:
        return whole[:place] + data + whole[place + len(data) :]

    yield "entry larger than the file", UNSAFE, patched(central + 20, b"\xf0\xff\xff\x7f" * 2)
    yield "entry larger in one place", UNSAFE, patched(central + 24, b"\xf0\xff\xff\x7f")
    yield "entry behind the end", UNSAFE, patched(central + 42, b"\xf0\xff\xff\x7f")
    yield "entry is compressed in place", UNSAFE, patched(8, b"\x08")
    yield "entry has another name in place", UNSAFE, patched(30, b"orchive")
    yield "entry is encrypted", UNSAFE, patched(central + 8, b"\x01")
    yield "sizes in a field that is missing", UNSAFE, patched(central + 20, b"\xff" * 8)
    yield (
        "overlapping entries",
        UNSAFE,
        whole[: central + 46].replace(pickle_size * 2, struct.pack("<L", len(good) + 9) * 2)
        + whole[central + 46 :],
    )
    yield "too many entries claimed", DAMAGED, patched(end + 8, b"\xff\xff\xff\xff")
    yield "directory larger than the file", DAMAGED, patched(end + 12, b"\xff\xff\xff\x7f")
    yield "directory elsewhere", DAMAGED, patched(end + 16, b"\x00\x00\x00\x00")
    yield "comment behind the end", DAMAGED, patched(end + 20, b"\xff\xff")
    yield "something behind the end", DAMAGED, whole + b"x"
    yield "wrong checksum of the pickle", DAMAGED, patched(whole.index(good) + 12, b"v")
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, 2**62, 1)
    yield "far 64-bit directory", DAMAGED, whole[:end] + locator + whole[end:]
    record = struct.pack(
        "<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 2**40, 2**40, 2**34, central
    )
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
    yield "wide directory", DAMAGED, whole[:end] + record + locator + whole[end:]
    for place in (1, 3, 4, 30, 60, len(whole) // 2, central, central + 50, end, len(whole) - 1):
        yield f"cut at {place}", DAMAGED, whole[:place]
    yield "empty", DAMAGED, b""
    yield "zeros", DAMAGED, bytes(5000)
    yield "text", DAMAGED, b"I am not a checkpoint.\n" * 40
    yield "page of a server", DAMAGED, b"<!DOCTYPE html><html>404</html>"
    yield (
        "lfs pointer",
        DAMAGED,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
    )
    legacy = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03."
    yield "legacy", UNSAFE, legacy + pickled(view())
    yield "legacy with a call", UNSAFE, legacy + b"\x80\x02" + system() + b"."
    yield "legacy tar", UNSAFE, b"storages".ljust(257, b"\0") + b"ustar\x0000".ljust(800, b"\0")
    yield "bare pickle", UNSAFE, b"\x80\x04" + system() + b"."
    yield "bare pickle of protocol 0", UNSAFE, b"cos\nsystem\n(S'touch pwned'\ntR."
    yield "bare pickle with inst", UNSAFE, b"(S'touch pwned'\nios\nsystem\n."


def _other_order(scratch: Path, data: bytes) -> bytes:
    with zipfile.ZipFile(scratch, "w") as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/byteorder", b"big")
        file.writestr("archive/data/0", bytes(16))
    result = scratch.read_bytes()
    scratch.unlink()
    return result
