"""Pickles of plain data, read by a machine that can build nothing else.

A pickle is a program. ``pickle.Unpickler`` runs all of it: even with ``find_class`` overridden, an
instruction of five bytes makes it allocate 32 GiB (a memo index), and sixty nested pairs used as a
key keep it hashing for centuries. So the instructions are executed here: those that make numbers,
text and containers. Every length is checked against what the file has left, and every key must be
text or a small integer. What else a file needs (PyTorch's tensors), a subclass adds as inert
stand-ins: no name found in a file is ever imported, looked up or called.
"""

import pickle
import pickletools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from jaxformer.errors import CheckpointError, UnsafeFileError
from jaxformer.porting.formats.trees import check_tree
from jaxformer.storage.local_files import LocalFile, safe_repr

# A vocabulary of 50,000 tokens takes about one MiB.
MAX_PLAIN_BYTES = 16 << 20
# About twenty objects go into one tensor: room for a hundred thousand tensors.
MAX_OBJECTS = 2_000_000
# Python hashes integers modulo 2^61 - 1: of larger ones any number can be made to collide.
MAX_KEY = 2**63
INSTRUCTIONS = {opcode.code: opcode.name for opcode in pickletools.opcodes}
BUILDS_OBJECTS = {
    *("EXT1", "EXT2", "EXT4", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "PERSID"),
    *("BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER", "FROZENSET"),
}
SAVE_AGAIN = (
    "open it where it was made, if you trust it, and save only its state_dict and plain values"
)


def read_plain_pickle(path: str | Path) -> Any:
    """Reads a pickle of dicts, lists, tuples, text, numbers and None: nanoGPT's ``meta.pkl``.

    Raises:
        CheckpointError: it is missing, cut short or damaged.
        UnsafeFileError: it holds anything else, or is larger than 16 MiB.
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
        """Returns the value that the pickle describes."""
        while True:
            code = self.take(1)
            if code == pickle.STOP:
                break
            if code not in OPERATIONS:
                self.reject_instruction(code)
            OPERATIONS[code](self)
        if self.at != len(self.data) or len(self.stack) != 1 or self.outer:
            self.damaged("it does not end where its value does")
        return self.stack[0]

    # What a subclass may allow.

    def find(self, module: str, name: str) -> Any:
        """Returns the stand-in for a name; plain data has none."""
        raise UnsafeFileError(
            f"{self.where} holds {safe_repr(f'{module}.{name}')}, and only plain values and "
            f"tensors are read; {SAVE_AGAIN}"
        )

    def reduce(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Returns the value that a stand-in makes of its arguments."""
        self.unsafe("calls something that is not a function")

    def build(self, target: Any, state: Any) -> None:
        """Gives an object the state that the pickle has for it."""
        self.unsafe("sets the state of an object")

    def persistent(self, identity: Any) -> Any:
        """Returns an object that lies outside the pickle."""
        self.unsafe("refers to something outside itself")

    # Errors.

    def damaged(self, why: str) -> NoReturn:
        """Rejects a pickle that no program can have written like this."""
        raise CheckpointError(f"{self.where} is not a complete pickle: {why}; fetch the file again")

    def unsafe(self, what: str) -> NoReturn:
        """Rejects a pickle that does more than describe plain data."""
        raise UnsafeFileError(f"{self.where} {what}, as plain data never does; {SAVE_AGAIN}")

    def reject_instruction(self, code: bytes) -> NoReturn:
        """Rejects an instruction that is not in ``OPERATIONS``."""
        name = INSTRUCTIONS.get(code.decode("latin-1"))
        if name is None:
            self.damaged(f"byte {self.at - 1} is no instruction")
        if name in BUILDS_OBJECTS:
            self.unsafe(f"uses the instruction {name}")
        raise UnsafeFileError(
            f"{self.where} uses the pickle instruction {name}, which is not supported; "
            "save it again with pickle protocol 2 or later"
        )

    # Reading the pickle's bytes.

    def take(self, count: int) -> bytes:
        """Returns the next ``count`` bytes."""
        if count > len(self.data) - self.at:
            self.damaged(f"it ends at byte {len(self.data)}, in the middle")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, layout: str) -> Any:
        """Returns the next number, of a ``struct`` layout."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def sized(self, layout: str) -> bytes:
        """Returns the next bytes, whose count comes before them."""
        return self.take(self.number(layout))

    def line(self) -> str:
        """Returns the text up to the end of the line."""
        end = self.data.find(b"\n", self.at)
        if end < 0:
            self.damaged("a name has no end")
        return self.text(self.take(end + 1 - self.at)[:-1])

    def text(self, data: bytes) -> str:
        """Decodes UTF-8."""
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            self.damaged(f"the text before byte {self.at} is not UTF-8")

    # The stack.

    def push(self, value: Any) -> None:
        """Puts a new object on the stack."""
        self.count_object()
        self.stack.append(value)

    def pop(self) -> Any:
        """Takes the value on top of the stack."""
        if not self.stack:
            self.damaged(f"byte {self.at - 1} needs a value that is not there")
        return self.stack.pop()

    def pop_values(self, count: int) -> list[Any]:
        """Takes so many values, in the order in which they were pushed."""
        return [self.pop() for _ in range(count)][::-1]

    def mark(self) -> None:
        """Marks the place from which ``pop_mark`` takes values."""
        self.count_object()
        self.outer.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        """Takes the values since the last mark."""
        if not self.outer:
            self.damaged(f"byte {self.at - 1} needs a mark that is not there")
        values, self.stack = self.stack, self.outer.pop()
        return values

    def count_object(self) -> None:
        """Counts an object: an instruction of one byte makes one of two hundred."""
        self.objects += 1
        if self.objects > MAX_OBJECTS:
            raise UnsafeFileError(
                f"{self.where} makes more than {MAX_OBJECTS} objects, more than any checkpoint; "
                "do not use this file"
            )

    def memoize(self, place: int) -> None:
        """Remembers the value on top of the stack."""
        self.count_object()
        value = self.pop()
        self.stack.append(value)
        self.memo[place] = value

    def recall(self, place: int) -> None:
        """Puts a remembered value on the stack again."""
        if place not in self.memo:
            self.damaged(f"it refers to value {place}, which is not there")
        self.stack.append(self.memo[place])

    # Containers and objects.

    def container(self, kind: type) -> Any:
        """Returns the container on top of the stack, which must be of this kind, and stays."""
        container = self.pop()
        if type(container) is not kind:
            self.damaged(f"byte {self.at - 1} fills something that is not a {kind.__name__}")
        self.stack.append(container)
        return container

    def key(self, key: Any) -> Any:
        """Returns a key, if it is one that can be hashed at once and without collisions."""
        if type(key) not in (str, int, bool, type(None)):
            self.unsafe(f"uses a {type(key).__name__} as a key")
        if type(key) is int and abs(key) >= MAX_KEY:
            self.unsafe("uses an integer of more than 63 bits as a key")
        return key

    def extend_list(self, values: list[Any]) -> None:
        """Appends to the list on top of the stack."""
        self.container(list).extend(values)

    def update_set(self, values: list[Any]) -> None:
        """Adds to the set on top of the stack."""
        self.container(set).update(self.key(value) for value in values)

    def update_dict(self, pairs: list[Any]) -> None:
        """Sets items of the dict on top of the stack: a key, its value, the next key."""
        target = self.container(dict)
        if len(pairs) % 2:
            self.damaged("a key has no value")
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            target[self.key(key)] = value

    def find_on_stack(self) -> Any:
        """Returns the stand-in for a name that is on the stack."""
        module, name = self.pop_values(2)
        if type(name) is not str or type(module) is not str:
            self.unsafe("names something by other than text")
        return self.find(module, name)

    def call(self) -> Any:
        """Returns what a stand-in makes of the arguments on top of the stack."""
        function, arguments = self.pop_values(2)
        if type(arguments) is not tuple:
            self.damaged("it calls something without arguments")
        return self.reduce(function, arguments)

    def set_state(self) -> None:
        """Gives the object below the top of the stack the state on top of it."""
        target, state = self.pop_values(2)
        self.build(target, state)
        self.stack.append(target)


OPERATIONS: dict[bytes, Callable[[PlainUnpickler], Any]] = {
    pickle.PROTO: lambda m: m.take(1),
    pickle.FRAME: lambda m: m.take(8),
    pickle.MARK: lambda m: m.mark(),
    pickle.NONE: lambda m: m.stack.append(None),
    pickle.NEWTRUE: lambda m: m.stack.append(True),
    pickle.NEWFALSE: lambda m: m.stack.append(False),
    pickle.BININT: lambda m: m.stack.append(m.number("<i")),
    pickle.BININT1: lambda m: m.stack.append(m.number("<B")),
    pickle.BININT2: lambda m: m.stack.append(m.number("<H")),
    pickle.BINFLOAT: lambda m: m.stack.append(m.number(">d")),
    pickle.LONG1: lambda m: m.push(int.from_bytes(m.sized("<B"), "little", signed=True)),
    pickle.SHORT_BINUNICODE: lambda m: m.push(m.text(m.sized("<B"))),
    pickle.BINUNICODE: lambda m: m.push(m.text(m.sized("<I"))),
    pickle.BINUNICODE8: lambda m: m.push(m.text(m.sized("<Q"))),
    pickle.SHORT_BINBYTES: lambda m: m.push(m.sized("<B")),
    pickle.BINBYTES: lambda m: m.push(m.sized("<I")),
    pickle.BINBYTES8: lambda m: m.push(m.sized("<Q")),
    pickle.EMPTY_TUPLE: lambda m: m.push(()),
    pickle.TUPLE1: lambda m: m.push(tuple(m.pop_values(1))),
    pickle.TUPLE2: lambda m: m.push(tuple(m.pop_values(2))),
    pickle.TUPLE3: lambda m: m.push(tuple(m.pop_values(3))),
    pickle.TUPLE: lambda m: m.push(tuple(m.pop_mark())),
    pickle.EMPTY_LIST: lambda m: m.push([]),
    pickle.APPEND: lambda m: m.extend_list(m.pop_values(1)),
    pickle.APPENDS: lambda m: m.extend_list(m.pop_mark()),
    pickle.EMPTY_DICT: lambda m: m.push({}),
    pickle.SETITEM: lambda m: m.update_dict(m.pop_values(2)),
    pickle.SETITEMS: lambda m: m.update_dict(m.pop_mark()),
    pickle.EMPTY_SET: lambda m: m.push(set()),
    pickle.ADDITEMS: lambda m: m.update_set(m.pop_mark()),
    pickle.BINPUT: lambda m: m.memoize(m.number("<B")),
    pickle.LONG_BINPUT: lambda m: m.memoize(m.number("<I")),
    pickle.MEMOIZE: lambda m: m.memoize(len(m.memo)),
    pickle.BINGET: lambda m: m.recall(m.number("<B")),
    pickle.LONG_BINGET: lambda m: m.recall(m.number("<I")),
    pickle.GLOBAL: lambda m: m.push(m.find(m.line(), m.line())),
    pickle.STACK_GLOBAL: lambda m: m.push(m.find_on_stack()),
    pickle.REDUCE: lambda m: m.push(m.call()),
    pickle.BUILD: lambda m: m.set_state(),
    pickle.BINPERSID: lambda m: m.push(m.persistent(m.pop())),
}
