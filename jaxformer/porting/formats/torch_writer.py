"""PyTorch checkpoints, written without PyTorch, one tensor at a time."""

import math
import pickle
import struct
import zipfile
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from jaxformer.porting.formats import tensors as t
from jaxformer.porting.formats.plain_pickle import MAX_KEY
from jaxformer.porting.formats.tensors import StoredTensor, Written
from jaxformer.porting.formats.torch_archive import MAX_PICKLE_BYTES
from jaxformer.porting.formats.torch_dtypes import DTYPES, STORAGES
from jaxformer.porting.formats.torch_files import read_torch_file
from jaxformer.porting.formats.trees import MAX_DEPTH, below, walk
from jaxformer.storage.durable_files import atomic_write, read_back_error

ROOT = "archive/"
# As torch does, so that the tensors of a mapped file are aligned for any instruction.
ALIGNMENT = 64
# Local and central header with names, padding and the 64-bit fields.
ENTRY_BYTES = 400
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
STORAGE_NAMES = {name: storage for storage, name in STORAGES.items()}


def write_torch_file(
    path: str | Path,
    tree: Any,
    progress: Callable[[int], None] = lambda count: None,
) -> Written:
    """Writes a file that ``torch.load(path, weights_only=True)`` opens, mapped or not.

    Tensors with the same storage share one in the file. The file is read back and compared before
    it appears under its name, and the same tree gives the same bytes.

    Args:
        path: the file; an existing one is replaced at the end.
        tree: dicts, lists and tuples of arrays, StoredTensor, text, numbers and None, with text
            and integers as keys.
        progress: called after each storage with its size in bytes.

    Returns:
        What was read back; the place of a tensor is such as ``model/lm_head.weight``.

    Raises:
        ValueError: the tree holds something else, is nested too deeply, or ties tensors that
            differ in shape or dtype.
        ResourceError: the disk is full or may not be written; nothing is left behind.
    """
    pickler = _Pickler()
    pickler.add(tree, "", 0)
    data = b"\x80\x02" + b"".join(pickler.parts) + pickle.STOP
    if len(data) > MAX_PICKLE_BYTES:
        raise ValueError(
            f"the tree without its arrays takes {len(data)} bytes: at most {MAX_PICKLE_BYTES} are "
            "read again; put long lists of numbers into arrays"
        )
    digests: list[str] = []

    def write(file: BinaryIO) -> None:
        # Neither writing nor hashing needs Python: they share the array and run side by side.
        with (
            zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive,
            ThreadPoolExecutor(1) as pool,
        ):
            _add(archive, "data.pkl", data)
            _add(archive, "byteorder", b"little")
            for number, (tensor, place) in enumerate(pickler.storages):
                array = t.read_checked(tensor, place)
                digest = pool.submit(t.digest, array)
                _add(archive, f"data/{number}", t.as_bytes(array))
                digests.append(digest.result())
                progress(array.nbytes)
                del array  # before the next is read
            _add(archive, "version", b"3\n")

    def expected() -> list[tuple[str, str]]:
        return [(place, digests[number]) for place, number in pickler.places]

    def check(temporary: Path) -> None:
        known: dict[Hashable, str] = {}
        found = []
        for place, tensor in walk(read_torch_file(temporary), ""):
            if tensor.storage not in known:
                known[tensor.storage] = t.digest(tensor.read())
            found.append((place, known[tensor.storage]))
        if found != expected():
            raise read_back_error(path)

    size = sum(tensor.nbytes + ENTRY_BYTES for tensor, _ in pickler.storages)
    sha256 = atomic_write(path, len(data) + size, write, check)
    return Written(dict(expected()), sha256)


class _Pickler:
    """Builds the pickle of a checkpoint, and the list of storages that it refers to.

    Attributes:
        parts: the pickle so far, without header and end.
        storages: the tensor that each storage holds, and the place where it was met first.
        places: of every tensor its place in the tree and the number of its storage.
        numbers: the number of each storage that several tensors may share.
    """

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.storages: list[tuple[StoredTensor, str]] = []
        self.places: list[tuple[str, int]] = []
        self.numbers: dict[Hashable, int] = {}

    def add(self, value: Any, place: str, depth: int) -> None:
        """Adds a value of the tree, with all that is below it."""
        if depth > MAX_DEPTH:
            raise ValueError(f"{place[:80]} is nested more than {MAX_DEPTH} deep")
        if isinstance(value, dict):
            self.put(pickle.EMPTY_DICT, pickle.MARK)
            for key, item in value.items():
                if type(key) is not str and not (type(key) is int and abs(key) < MAX_KEY):
                    raise ValueError(
                        f"{place or 'the top'} has the key {key!r}: only text and integers of "
                        "63 bits can be keys"
                    )
                self.scalar(key, place)
                self.add(item, below(place, key), depth + 1)
            self.put(pickle.SETITEMS)
        elif type(value) in (list, tuple):
            self.put(*([pickle.EMPTY_LIST] if type(value) is list else []), pickle.MARK)
            for index, item in enumerate(value):
                self.add(item, below(place, index), depth + 1)
            self.put(pickle.APPENDS if type(value) is list else pickle.TUPLE)
        elif isinstance(value, StoredTensor):
            self.tensor(value, place)
        elif isinstance(value, np.ndarray):
            self.tensor(StoredTensor.of(value), place)
        else:
            self.scalar(value, place)

    def put(self, *parts: bytes) -> None:
        self.parts += parts

    def scalar(self, value: Any, place: str) -> None:
        if value is None:
            self.put(pickle.NONE)
        elif type(value) is bool:
            self.put(pickle.NEWTRUE if value else pickle.NEWFALSE)
        elif type(value) is int and value.bit_length() < 8 * 255:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self.put(pickle.LONG1, struct.pack("<B", len(data)), data)
        elif type(value) is float:
            self.put(pickle.BINFLOAT, struct.pack(">d", value))
        elif type(value) is str:
            # Half a surrogate pair is a UnicodeEncodeError, a ValueError too.
            data = value.encode("utf-8")
            self.put(pickle.BINUNICODE, struct.pack("<I", len(data)), data)
        else:
            raise ValueError(
                f"{place or 'the top'} is a {type(value).__name__}: only arrays, dicts, lists, "
                "tuples, text, plain numbers and None can be written"
            )

    def name(self, module: str, name: str) -> None:
        self.put(pickle.GLOBAL, f"{module}\n{name}\n".encode())

    def numbers_tuple(self, values: tuple[int, ...], place: str) -> None:
        self.put(pickle.MARK)
        for value in values:
            self.scalar(value, place)
        self.put(pickle.TUPLE)

    def tensor(self, tensor: StoredTensor, place: str) -> None:
        dtype = DTYPE_NAMES.get(tensor.dtype)
        if dtype is None:
            raise ValueError(f"{place} has dtype {tensor.dtype}, which PyTorch does not have")
        typed = STORAGE_NAMES.get(dtype)
        number = self.number(tensor, place)
        self.places.append((place, number))
        self.name("torch._utils", "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3")
        self.put(pickle.MARK)
        self.put(pickle.MARK)
        self.scalar("storage", place)
        if typed:
            self.name("torch", typed)
        else:
            self.name("torch.storage", "UntypedStorage")
        self.scalar(str(number), place)
        self.scalar("cpu", place)
        self.scalar(math.prod(tensor.shape) if typed else tensor.nbytes, place)
        self.put(pickle.TUPLE, pickle.BINPERSID)
        self.scalar(0, place)
        self.numbers_tuple(tensor.shape, place)
        shape = tensor.shape
        # As torch counts them: the product of the sizes to the right, each at least 1.
        strides = tuple(math.prod(max(s, 1) for s in shape[i + 1 :]) for i in range(len(shape)))
        self.numbers_tuple(strides, place)
        self.put(pickle.NEWFALSE)
        self.name("collections", "OrderedDict")
        self.put(pickle.EMPTY_TUPLE, pickle.REDUCE)
        if not typed:
            self.name("torch", dtype)
        self.put(pickle.TUPLE, pickle.REDUCE)

    def number(self, tensor: StoredTensor, place: str) -> int:
        """Returns the number of a tensor's storage, a new one if no other tensor shares it."""
        number = len(self.storages)
        if tensor.storage is not None:
            number = self.numbers.setdefault(tensor.storage, number)
        if number == len(self.storages):
            self.storages.append((tensor, place))
        first, its_place = self.storages[number]
        if (first.shape, first.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"{its_place} and {place} have the same storage, but {first.dtype} of shape "
                f"{first.shape} and {tensor.dtype} of shape {tensor.shape}"
            )
        return number


def _add(archive: zipfile.ZipFile, name: str, data: bytes | memoryview) -> None:
    """Writes an entry whose data begins at a multiple of 64."""
    info = zipfile.ZipInfo(ROOT + name)
    size = info.file_size = len(data)
    wide = size > 2**31 - 1
    assert archive.fp is not None
    start = archive.fp.tell() + 30 + len(info.filename) + (20 if wide else 0) + 4
    padding = -start % ALIGNMENT
    info.extra = struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    with archive.open(info, "w", force_zip64=wide) as entry:
        entry.write(data)
