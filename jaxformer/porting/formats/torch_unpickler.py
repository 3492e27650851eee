"""The pickle inside a PyTorch checkpoint, executed with inert stand-ins for PyTorch."""

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
from jaxformer.porting.formats.torch_dtypes import DTYPES, STORAGES
from jaxformer.storage.local_files import safe_repr


@dataclasses.dataclass(frozen=True)
class _Function:
    """Stands for a function or class of PyTorch or Python, which is never called.

    Attributes:
        name: with its module.
        make: makes the value, of the unpickler and the arguments.
        fewest: how many arguments it takes at least.
        most: and at most.
    """

    name: str
    make: Callable[..., Any]
    fewest: int = 1
    most: int = 1

    def __repr__(self) -> str:
        return self.name


@dataclasses.dataclass(frozen=True)
class _StorageType:
    """Stands for a class of storages; without a dtype, for one of bytes."""

    dtype: np.dtype | None


@dataclasses.dataclass(frozen=True)
class _Storage:
    """Stands for a storage: an entry of the archive, and the dtype of its elements."""

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
        """Returns the stand-in for a name that ``torch.save`` writes."""
        if module == "torch" and name in STORAGES:
            return _StorageType(DTYPES[STORAGES[name]])
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return _StorageType(None)
        if module == "torch" and name in DTYPES:
            return _DtypeName(name)
        # Protocol 2 calls the builtins by the name that they had in Python 2.
        known = f"{module}.{name}".replace("__builtin__.", "builtins.")
        return FUNCTIONS[known] if known in FUNCTIONS else super().find(module, name)

    def reduce(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """Returns the value that a known function would make of its arguments."""
        if type(function) is not _Function:
            self.unsafe("calls something that is not a function")
        if not function.fewest <= len(arguments) <= function.most:
            self.unsafe(f"gives {len(arguments)} arguments to {function.name}")
        return function.make(self, *arguments)

    def build(self, target: Any, state: Any) -> None:
        """Drops the attributes of a dict: in a state_dict, the versions of its modules."""
        if type(target) is not dict or type(state) is not dict:
            super().build(target, state)

    def persistent(self, identity: Any) -> _Storage:
        """Returns the storage of that key, if it has as many elements as are claimed."""
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
                f"{self.where}: storage {safe_repr(key)} claims {count} elements of {itemsize} "
                f"bytes and has {entry.size} bytes; do not use this file"
            )
        return _Storage(entry, kind.dtype)

    def checked(self, value: Any, kind: type, made: str, needed: str) -> Any:
        """Returns a function's argument, if it is of the kind that the function needs."""
        if type(value) is not kind:
            self.unsafe(f"makes {made} of something that is not {needed}")
        return value

    def tensor(
        self,
        storage: Any,
        offset: Any,
        shape: Any,
        strides: Any,
        dtype: np.dtype | None,
        marks: Any,
    ) -> StoredTensor:
        """Returns a view of a storage, if it lies within it and claims no more than there is.

        Args:
            storage: a ``_Storage``.
            offset: of the first element, in elements.
            shape: of the view.
            strides: in elements.
            dtype: of the view, if it is known.
            marks: conjugation and negation that PyTorch has put off until the tensor is read.
        """
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
                f"{where} has the offset {safe_repr(offset)} and the strides {safe_repr(strides)}, "
                f"which do not fit its shape {safe_repr(shape)}; do not use this file"
            )
        held, count = storage.entry.size // dtype.itemsize, math.prod(sizes)
        steps = zip(sizes, strides, strict=True)
        span = 1 + sum((size - 1) * step for size, step in steps) if count else 0
        if count > held or offset + span > held:
            raise UnsafeFileError(
                f"{where} claims {count} elements, the last at {offset + span}, where the storage "
                f"holds {held}; do not use this file"
            )
        read = _StridedReader(
            self.archive, storage.entry, where, sizes, dtype, strides, offset, span
        )
        same = (str(self.archive.path), storage.entry.name, offset, sizes, strides, dtype.name)
        return StoredTensor(sizes, dtype, read, same)


@dataclasses.dataclass(frozen=True)
class _StridedReader:
    """Reads one tensor out of a storage; ``strides``, ``offset`` and ``span`` count elements."""

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


def _device(machine: TorchUnpickler, kind: Any, index: Any = None) -> str:
    if type(kind) is not str or type(index) not in (int, type(None)):
        machine.unsafe("makes a device of something that is not its name")
    return kind if index is None else f"{kind}:{index}"


def _encode(machine: TorchUnpickler, text: Any, encoding: Any) -> bytes:
    if type(text) is not str or encoding != "latin1" or (text and max(text) > "\xff"):
        machine.unsafe("makes bytes of something that is not Latin-1 text")
    return text.encode("latin1")


def _parameter(machine: TorchUnpickler, data: Any, *_: Any) -> Any:
    return machine.checked(data, StoredTensor, "a parameter", "a tensor")


# The arguments of a tensor: its storage, offset, shape and strides, whether it needs a gradient,
# its hooks, its dtype (version 3 only), and marks.
FUNCTIONS = {
    function.name: function
    for function in (
        _Function(
            "torch._utils._rebuild_tensor_v2",
            lambda m, storage, offset, shape, strides, _grad, _hooks, marks=None: m.tensor(
                storage, offset, shape, strides, getattr(storage, "dtype", None), marks
            ),
            *(6, 7),
        ),
        _Function(
            "torch._utils._rebuild_tensor_v3",
            lambda m, storage, offset, shape, strides, _grad, _hooks, dtype, marks=None: m.tensor(
                storage,
                offset,
                shape,
                strides,
                DTYPES[dtype] if type(dtype) is _DtypeName else None,
                marks,
            ),
            *(7, 8),
        ),
        _Function("torch._utils._rebuild_parameter", _parameter, 3, 3),
        _Function("torch._utils._rebuild_parameter_with_state", _parameter, 4, 4),
        _Function("torch.Size", lambda m, sizes: m.checked(sizes, tuple, "a size", "a tuple")),
        _Function("torch.device", _device, 1, 2),
        _Function("collections.OrderedDict", lambda m: {}, 0, 0),
        _Function(
            "collections.Counter",
            lambda m, counts: m.checked(counts, dict, "a Counter", "a dict"),
        ),
        _Function(
            "builtins.set",
            lambda m, values: {m.key(v) for v in m.checked(values, list, "a set", "a list")},
        ),
        _Function("builtins.bytes", lambda m: b"", 0, 0),
        _Function("_codecs.encode", _encode, 2, 2),
    )
}
