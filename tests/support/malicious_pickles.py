"""Pickles that must be rejected, instruction by instruction."""

import pickle
import struct
from collections.abc import Iterator
from pathlib import Path

# What a malicious pickle would leave if it ever ran.
TRACE = "pwned"
HOOKS = b"ccollections\nOrderedDict\n)R"
VIEW = b"ctorch._utils\n_rebuild_tensor_v2\n"
UNSAFE, DAMAGED = 5, 4


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def numbers(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(key: str = "0", count: int = 4, kind: str = "torch\nFloatStorage") -> bytes:
    return (
        b"(" + text("storage") + f"c{kind}\n".encode() + text(key) + text("cpu") + number(count)
        + b"tQ"
    )  # fmt: skip


def view(
    shape: tuple[int, ...] = (4,),
    strides: tuple[int, ...] = (1,),
    offset: int = 0,
    where: bytes = storage(),
    more: bytes = b"",
) -> bytes:
    arguments = where + number(offset) + numbers(*shape) + numbers(*strides) + b"\x89" + HOOKS
    return VIEW + b"(" + arguments + more + b"tR"


def pickled(value: bytes) -> bytes:
    """A checkpoint's pickle with one value, called w."""
    return b"\x80\x02}" + text("w") + value + b"s."


def system(module: str = "os") -> bytes:
    """The instructions that would leave TRACE behind."""
    return f"c{module}\nsystem\n".encode() + text(f"touch {TRACE}") + b"\x85R"


def doubling(empty: bytes, levels: int = 60) -> bytes:
    """A value that contains the one before it twice, again and again."""
    value = b"(" + empty + b"q\x00"
    for _ in range(levels):
        pair = b"h\x00h\x00\x86" if empty == b")" else b"](h\x00h\x00e"
        value += pair + b"q\x00"
    return value + b"t"


def nested(levels: int) -> bytes:
    return b"]" * levels + b"a" * (levels - 1)


def bad_pickles(folder: Path) -> Iterator[tuple[str, int, bytes]]:
    """Bad files with the name meta.pkl: what is wrong, exit code, content."""
    good = pickle.dumps({"stoi": {"a": 0, "b": 1}, "itos": {0: "a", 1: "b"}, "vocab_size": 2})
    yield "reduce os.system", UNSAFE, b"\x80\x04" + system() + b"."
    yield "protocol 0", UNSAFE, b"cos\nsystem\n(S'touch pwned'\ntR."
    yield "inst", UNSAFE, b"(S'touch pwned'\nios\nsystem\n."
    yield "namespace", UNSAFE, b"\x80\x02cargparse\nNamespace\n)\x81."
    yield "numpy scalar", UNSAFE, b"\x80\x02cnumpy.core.multiarray\nscalar\n."
    yield "ordered dict", UNSAFE, b"\x80\x02" + HOOKS + b"."
    yield "tensor", UNSAFE, b"\x80\x02" + view() + b"."
    yield "persistent id", UNSAFE, b"\x80\x02NQ."
    yield "extension", UNSAFE, b"\x80\x02\x82\x01."
    yield "too large", UNSAFE, good + bytes(17 << 20)
    yield "recursion", UNSAFE, b"\x80\x04" + nested(300_000) + b"."
    yield "doubled lists", UNSAFE, b"\x80\x04" + doubling(b"]") + b"."
    yield "far memo", DAMAGED, b"\x80\x02Nr\xff\xff\xff\x7f"
    yield "huge frame", DAMAGED, b"\x80\x04\x95" + b"\xff" * 8 + b"N"
    yield "byte that is no instruction", DAMAGED, b"\x80\x04\xff."
    for place in (2, 10, 20, len(good) - 1):
        yield f"cut at {place}", DAMAGED, good[:place]
