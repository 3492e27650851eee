"""The pickle inside a PyTorch checkpoint, carried out with inert stand-ins for PyTorch."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxformer.errors import CheckpointError, ResourceError, UnsafeFileError
from jaxformer.porting.formats import tensors as t
from jaxformer.porting.formats.plain_pickle import PlainUnpickler
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.formats.torch_archive import Entry, TorchArchive
from jaxformer.storage.local_files import safe_repr

# torch's names of the dtypes that numpy and ml_dtypes have too, and of their typed storages.
DTYPES: dict[str, np.dtype] = {
    **{
        name: np.dtype(name)
        for name in (
            *("float64", "float32", "float16", "complex128", "complex64", "bool"),
            *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
        )
    },
    "bfloat16": t.BFLOAT16,
    "float8_e4m3fn": t.FLOAT8_E4M3FN,
    "float8_e4m3fnuz": t.FLOAT8_E4M3FNUZ,
    "float8_e5m2": t.FLOAT8_E5M2,
    "float8_e5m2fnuz": t.FLOAT8_E5M2FNUZ,
    "float8_e8m0fnu": t.FLOAT8_E8M0FNU,
}
STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}


@dataclasses.dataclass(frozen=True)
class _Function:
    """Stands for a function or class of PyTorch or Python; it calls nothing of theirs."""

    name: str
    make: Callable[..., Any]

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class _StorageType:
    """Stands for a class of storages; without a dtype, for one of bytes."""

    dtype: np.dtype | None


@dataclasses.dataclass(frozen=True)
class _Storage:
    """Stands for a storage: an entry of the archive, and how many elements it has."""

    entry: Entry
    dtype: np.dtype | None

    def __repr__(self) -> str:
        return f"the bare storage {self.entry.name}"


class _DtypeName(str):
    """A torch dtype, by its name."""

    __slots__ = ()


class TorchUnpickler(PlainUnpickler):
    """Reads the pickle of a checkpoint with stand-ins for what ``torch.save`` writes."""

    def __init__(self, archive: TorchArchive):
        super().__init__(archive.pickle(), str(archive.path))
        self.archive = archive

    def find(self, module: str, name: str) -> Any:
        """The stand-in for a name that ``torch.save`` writes."""
        if module == "torch" and name in STORAGES:
            return _StorageType(DTYPES[STORAGES[name]])
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return _StorageType(None)
        if module == "torch" and name in DTYPES:
            return _DtypeName(name)
        # Protocol 2 calls the builtins by the name that they had in Python 2.
        known = f"{module}.{name}".replace("__builtin__.", "builtins.")
        if known in FUNCTIONS:
            return _Function(known, FUNCTIONS[known])
        return super().find(module, name)

    def reduce(self, function: Any, arguments: Any) -> Any:
        """The stand-in or value that a known function makes of its arguments."""
        if type(function) is not _Function:
            self.unsafe("calls something that is not a function")
        return function.make(self, *self.fitting(function, arguments))

    def fitting(self, function: _Function, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, if the function takes that many."""
        fewest, most = COUNTS.get(function.name, (1, 1))
        if not fewest <= len(arguments) <= most:
            self.unsafe(f"gives {len(arguments)} arguments to {function.name}")
        return arguments

    def build(self, target: Any, state: Any) -> None:
        """Drops what a dict carries beside its items."""
        # A module's state_dict carries the versions of its modules this way. Nothing needs them.
        if type(target) is not dict or type(state) is not dict:
            super().build(target, state)

    def persistent(self, identity: Any) -> _Storage:
        """The storage of that key, if it has as many elements as is claimed."""
        kinds = (str, _StorageType, str, str, int)
        if type(identity) is not tuple or tuple(map(type, identity)) != kinds:
            self.unsafe("refers to something that is not a storage")
        word, kind, key, _, count = identity
        if word != "storage":
            self.unsafe(f"refers to a {safe_repr(word)} outside itself")
        entry = self.archive.storage(key)
        itemsize = kind.dtype.itemsize if kind.dtype else 1
        if count * itemsize != entry.size:
            raise UnsafeFileError(
                f"{self.where}: storage {safe_repr(key)} claims {count} elements "
                f"of {itemsize} bytes "
                f"and has {entry.size} bytes; do not use this file"
            )
        return _Storage(entry, kind.dtype)

    def tensor(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        dtype: np.dtype | None,
        marks: Any,
    ) -> StoredTensor:
        """A view of a storage, if it lies within it and claims no more than there is."""
        if type(storage) is not _Storage or type(shape) is not tuple or type(strides) is not tuple:
            self.unsafe("makes a tensor of something that is not a storage")
        if dtype is None or (storage.dtype is not None and storage.dtype != dtype):
            self.unsafe("makes a tensor of a storage of another dtype")
        if marks:
            raise CheckpointError(
                f"{self.where} holds a tensor that is conjugated or negated only when read; "
                "call resolve_conj() and resolve_neg() on it and save it again"
            )
        where = f"{self.where}: a tensor in storage {safe_repr(storage.entry.name)}"
        sizes = t.check_shape(shape, dtype, where)
        numbers = (offset, *strides)
        if len(strides) != len(sizes) or not all(type(n) is int and n >= 0 for n in numbers):
            raise UnsafeFileError(
                f"{where} has the offset {safe_repr(offset)} and the strides "
                f"{safe_repr(strides)}, which "
                f"do not fit its shape {safe_repr(shape)}; do not use this file"
            )
        held, count = storage.entry.size // dtype.itemsize, math.prod(sizes)
        steps = zip(sizes, strides, strict=True)
        span = 1 + sum((size - 1) * step for size, step in steps) if count else 0
        if count > held or offset + span > held:
            raise UnsafeFileError(
                f"{where} claims {count} elements, the last at {offset + span}, where the storage "
                f"holds {held}; do not use this file"
            )
        read = _Reader(self.archive, storage.entry, where, sizes, dtype, strides, offset, span)
        same = (str(self.archive.path), storage.entry.name, offset, sizes, strides, dtype.name)
        return StoredTensor(sizes, dtype, read, same)


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads one tensor out of a storage."""

    archive: TorchArchive
    entry: Entry
    where: str
    shape: tuple[int, ...]
    dtype: np.dtype
    strides: tuple[int, ...]
    offset: int
    span: int

    def __call__(self) -> np.ndarray:
        size = self.dtype.itemsize
        data = self.archive.read(self.entry, self.offset * size, self.span * size)
        flat = t.from_bytes(data, self.dtype, self.where)
        if not self.span:
            return flat.reshape(self.shape)
        # The stride of an axis of one element is never used, and may be any number.
        steps = zip(self.shape, self.strides, strict=True)
        strides = [stride * size if length > 1 else 0 for length, stride in steps]
        # Through bytes, as numpy lends no buffer of the dtypes of ml_dtypes.
        data = flat.view(np.uint8)
        view: np.ndarray = np.ndarray(self.shape, self.dtype, data.data, strides=strides)
        if view.flags.c_contiguous:
            return flat.reshape(self.shape)
        try:
            return np.array(view, order="C")
        except MemoryError as error:
            raise ResourceError(
                f"{self.where}: not enough memory for an array of {view.nbytes / 2**20:.1f} MiB"
            ) from error


def _tensor_v2(
    machine: TorchUnpickler,
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    _grad: Any,
    _hooks: Any,
    marks: Any = None,
) -> StoredTensor:
    return machine.tensor(storage, offset, shape, strides, getattr(storage, "dtype", None), marks)


def _tensor_v3(
    machine: TorchUnpickler,
    storage: Any,
    offset: Any,
    shape: Any,
    strides: Any,
    _grad: Any,
    _hooks: Any,
    dtype: Any,
    marks: Any = None,
) -> StoredTensor:
    known = DTYPES[dtype] if type(dtype) is _DtypeName else None
    return machine.tensor(storage, offset, shape, strides, known, marks)


def _parameter(machine: TorchUnpickler, data: Any, *_: Any) -> StoredTensor:
    if type(data) is not StoredTensor:
        machine.unsafe("makes a parameter of something that is not a tensor")
    return data


def _size(machine: TorchUnpickler, sizes: Any) -> tuple[Any, ...]:
    if type(sizes) is not tuple:
        machine.unsafe("makes a size of something that is not a tuple")
    return sizes


def _device(machine: TorchUnpickler, kind: Any, index: Any = None) -> str:
    if type(kind) is not str or type(index) not in (int, type(None)):
        machine.unsafe("makes a device of something that is not its name")
    return kind if index is None else f"{kind}:{index}"


def _set(machine: TorchUnpickler, values: Any) -> set[Any]:
    if type(values) is not list:
        machine.unsafe("makes a set of something that is not a list")
    return {machine.key(value) for value in values}


def _counter(machine: TorchUnpickler, counts: Any) -> dict[Any, Any]:
    if type(counts) is not dict:
        machine.unsafe("makes a Counter of something that is not a dict")
    return counts


def _encode(machine: TorchUnpickler, text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding != "latin1" or (text and max(text) > "\xff"):
        machine.unsafe("makes bytes of something that is not Latin-1 text")
    return text.encode("latin1")


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.Size": _size,
    "torch.device": _device,
    "collections.OrderedDict": lambda machine: {},
    "collections.Counter": _counter,
    "builtins.set": _set,
    "builtins.bytes": lambda machine: b"",
    "_codecs.encode": _encode,
}
# The fewest and the most arguments of those that do not take exactly one.
COUNTS = {
    "torch._utils._rebuild_tensor_v2": (6, 7),
    "torch._utils._rebuild_tensor_v3": (7, 8),
    "torch._utils._rebuild_parameter": (3, 3),
    "torch._utils._rebuild_parameter_with_state": (4, 4),
    "torch.device": (1, 2),
    "collections.OrderedDict": (0, 0),
    "builtins.bytes": (0, 0),
    "_codecs.encode": (2, 2),
}
