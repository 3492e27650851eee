"""Pickles of plain data, read by a machine that can build nothing else.

A pickle is a program. ``pickle.Unpickler`` runs all of it: even with ``find_class`` overridden, an
instruction of five bytes makes it allocate 32 GiB (a memo index), and sixty nested pairs used as a
key keep it hashing for centuries. So the instructions are carried out here: those that make
numbers, text and containers, with every length held to what the file has left and every key text
or a small integer. What else a file needs (PyTorch's tensors) a subclass adds as inert stand-ins:
no name found in a file is ever imported, looked up or called.
"""

import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any, NoReturn

from jaxformer.errors import CheckpointError, UnsafeFileError
from jaxformer.porting.formats.pickle_operations import OPERATIONS
from jaxformer.porting.formats.trees import check_tree
from jaxformer.storage.local_files import LocalFile, safe_repr

# A vocabulary of 50,000 tokens takes about one MiB.
MAX_PLAIN_BYTES = 16 << 20
# About twenty objects go into one tensor: room for a hundred thousand tensors.
MAX_OBJECTS = 2_000_000
# Python hashes integers modulo 2^61 - 1: of larger ones any number can be made to collide.
MAX_KEY = 2**63
INSTRUCTIONS = {opcode.code: opcode for opcode in pickletools.opcodes}
BUILDS_OBJECTS = {
    *("EXT1", "EXT2", "EXT4", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "PERSID"),
    *("BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER", "FROZENSET"),
}
SAVE_AGAIN = (
    "open it where it was made, if you trust it, and save only its state_dict and plain values"
)


class PlainUnpickler:
    """Reads one pickle of protocol 2 to 5.

    Args:
        data: the pickle.
        where: what it is called, for messages.

    Raises:
        CheckpointError: the pickle is cut short, damaged, or uses what plain data never does.
        UnsafeFileError: it names or builds something other than plain data, or is a bomb.
    """

    def __init__(self, data: bytes, where: str):
        self.data = data
        self.where = where
        self.at = 0
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.objects = 0

    def load(self) -> Any:
        """The value that the pickle describes."""
        while True:
            code = self.take(1)
            if code == pickle.STOP:
                break
            if code not in OPERATIONS:
                self.refuse_code(code)
            OPERATIONS[code](self)
        if self.at != len(self.data) or len(self.stack) != 1 or self.outer:
            self.damaged("it does not end where its value does")
        return self.stack[0]

    # What a subclass may allow.

    def find(self, module: str, name: str) -> Any:
        """The stand-in for a name; here there are none."""
        raise UnsafeFileError(
            f"{self.where} holds {safe_repr(f'{module}.{name}')}, and only plain "
            "values and tensors "
            f"are read; {SAVE_AGAIN}"
        )

    def reduce(self, function: Any, arguments: Any) -> Any:
        """The value that a stand-in makes of its arguments."""
        self.unsafe("calls something that is not a function")

    def build(self, target: Any, state: Any) -> None:
        """Takes notice of the state that a pickle gives to an object."""
        self.unsafe("sets the state of an object")

    def persistent(self, identity: Any) -> Any:
        """What a pickle says lies outside it."""
        self.unsafe("refers to something outside itself")

    # Refusals.

    def damaged(self, why: str) -> NoReturn:
        """Refuses a pickle that nobody can have written so."""
        raise CheckpointError(f"{self.where} is not a complete pickle: {why}; fetch the file again")

    def unsafe(self, what: str) -> NoReturn:
        """Refuses a pickle that does more than to describe plain data."""
        raise UnsafeFileError(f"{self.where} {what}, as plain data never does; {SAVE_AGAIN}")

    def refuse_code(self, code: bytes) -> NoReturn:
        """Refuses an instruction."""
        known = INSTRUCTIONS.get(code.decode("latin-1"))
        if known is None:
            self.damaged(f"byte {self.at - 1} is no instruction")
        if known.name in BUILDS_OBJECTS:
            self.unsafe(f"uses the instruction {known.name}")
        raise UnsafeFileError(
            f"{self.where} uses the pickle instruction {known.name}, which is not carried out; "
            "save it again with pickle protocol 2 or later"
        )

    # The machine's parts.

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        if count > len(self.data) - self.at:
            self.damaged(f"it ends at byte {len(self.data)}, in the middle")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, layout: str) -> Any:
        """The next number, of a ``struct`` layout."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def line(self) -> str:
        """The bytes up to the end of the line."""
        end = self.data.find(b"\n", self.at)
        if end < 0:
            self.damaged("a name has no end")
        return self.text(self.take(end + 1 - self.at)[:-1])

    def text(self, data: bytes) -> str:
        """Bytes as text."""
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            self.damaged(f"the text before byte {self.at} is not UTF-8")

    def pop(self) -> Any:
        """The value on top of the stack."""
        if not self.stack:
            self.damaged(f"byte {self.at - 1} needs a value that is not there")
        return self.stack.pop()

    def pop_mark(self) -> list[Any]:
        """The values since the last mark."""
        if not self.outer:
            self.damaged(f"byte {self.at - 1} needs a mark that is not there")
        values, self.stack = self.stack, self.outer.pop()
        return values

    def push(self, value: Any) -> None:
        """Puts a new object on the stack."""
        self.count()
        self.stack.append(value)

    def count(self) -> None:
        """Counts an object: an instruction of one byte makes one of two hundred."""
        self.objects += 1
        if self.objects > MAX_OBJECTS:
            raise UnsafeFileError(
                f"{self.where} makes more than {MAX_OBJECTS} objects, more than any checkpoint; "
                "do not use this file"
            )

    def top(self, kind: type) -> Any:
        """The container on top of the stack, which must be of this kind."""
        container = self.pop()
        if type(container) is not kind:
            self.damaged(f"byte {self.at - 1} fills something that is not a {kind.__name__}")
        self.stack.append(container)
        return container

    def key(self, key: Any) -> Any:
        """A key, if it is one that can be hashed at once and without collisions."""
        if type(key) not in (str, int, bool, type(None)):
            self.unsafe(f"uses a {type(key).__name__} as a key")
        if type(key) is int and abs(key) >= MAX_KEY:
            self.unsafe("uses an integer of more than 63 bits as a key")
        return key


def read_plain_pickle(path: str | Path) -> Any:
    """A pickle of dicts, lists, tuples, text, numbers and None, such as nanoGPT's ``meta.pkl``.

    Raises:
        CheckpointError: it is missing, cut short or damaged.
        UnsafeFileError: it holds anything else, whatever that is, or is larger than 16 MiB.
        ResourceError: it cannot be read.
    """
    file = LocalFile(path)
    if file.size > MAX_PLAIN_BYTES:
        raise UnsafeFileError(
            f"{path} has {file.size} bytes, where a vocabulary has at most {MAX_PLAIN_BYTES}; "
            "do not use this file"
        )
    tree = PlainUnpickler(file.bytes(0, file.size), str(path)).load()
    check_tree(tree, str(path))
    return tree
