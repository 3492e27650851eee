"""Writes and reads arrays in a folder of Orbax's format."""

import collections
import contextlib
import copy
import functools
import logging
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.checkpoints.manifest import (
    DTYPES,
    Arrays,
    array_bytes,
    describe_named,
    flatten,
    unflatten,
)
from jaxformer.distributed.control_plane import SECONDS, ControlPlane, brief_reason
from jaxformer.errors import CheckpointError, JaxformerError, ResourceError, mismatches

# Bytes read at a time: enough to keep the disk busy, little beside a model of many gigabytes.
BATCH = 256 << 20
# How many specifications are kept: one save has the same few for all its arrays.
SPECS_KEPT = 8


def is_distributed(array: Any) -> bool:
    """Returns whether parts of an array lie in other processes alone."""
    return not getattr(array, "is_fully_addressable", True)


def on_host(arrays: Arrays) -> Arrays:
    """Returns numpy arrays that no later training step writes to.

    On a CPU they share memory with the JAX arrays: while such a view exists and the array is
    donated to a step, JAX copies it first.
    """
    import jax

    for leaf in jax.tree.leaves(arrays):
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
    return jax.tree.map(np.asarray, arrays)


def write(folder: Path, arrays: Arrays) -> None:
    """Writes numpy arrays from this process alone.

    Args:
        folder: is made.
        arrays: must stay as they are meanwhile.

    Raises:
        ResourceError: they cannot be written.
    """
    import jax
    import orbax.checkpoint as ocp

    # Copies are for a save beside which arrays change, and take as much memory as the whole state.
    # Without a handler of JAX's arrays, of which there are none here, Orbax warns.
    types = ocp.type_handlers
    registry = types.create_type_handler_registry(
        (np.ndarray, types.NumpyHandler(deepcopy_host_arrays=False)),
        (jax.Array, types.ArrayHandler()),
    )
    with contextlib.closing(_checkpointer(None, type_handler_registry=registry)) as checkpointer:
        _guard_writing(lambda: checkpointer.save(folder.absolute(), _save_arguments(arrays)))


def begin_write(folder: Path, arrays: Arrays, control_plane: ControlPlane) -> Callable[[], None]:
    """Begins to write arrays whose parts lie in several processes, all of which call this.

    Returns:
        A function that waits until all of them are written. The arrays may change meanwhile.

    Raises:
        ResourceError: they cannot be written.
    """
    checkpointer = _checkpointer(control_plane)
    _guard_writing(lambda: checkpointer.save(folder.absolute(), _save_arguments(arrays)))

    def finish() -> None:
        with contextlib.closing(checkpointer):
            _guard_writing(checkpointer.wait_until_finished)

    return finish


def read(folder: Path, described: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Reads some of the arrays, whole, as numpy arrays.

    Raises:
        CheckpointError: they cannot be read.
    """
    import orbax.checkpoint as ocp

    arguments = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in described}
    return flatten_groups(_restore(folder, described, arguments), described)


def read_and_hash(
    folder: Path,
    described: Mapping[str, Any],
    keep: Callable[[str, np.ndarray], None] = lambda name, array: None,
) -> dict[str, Any]:
    """Reads some of the arrays, whole, a part of few bytes at a time.

    Args:
        folder: where they are.
        described: shape and dtype of each, by its name.
        keep: is given each name and array.

    Returns:
        What the arrays are, as ``describe`` has it.

    Raises:
        CheckpointError: they cannot be read.
    """
    found: dict[str, Any] = {}
    for part in split_by_size(described):
        arrays = read(folder, part)
        found |= describe_named(arrays)
        for name, array in arrays.items():
            keep(name, array)
    return found


def read_sharded(folder: Path, described: Mapping[str, Any], shardings: Arrays) -> Arrays:
    """Reads all arrays; this process reads the parts that its devices hold.

    Raises:
        CheckpointError: they cannot be read.
    """
    import orbax.checkpoint as ocp

    placed = flatten(shardings)
    arguments = {
        name: ocp.ArrayRestoreArgs(
            sharding=placed[name], global_shape=tuple(what["shape"]), strict=True
        )
        for name, what in described.items()
    }
    return _restore(folder, described, arguments)


def split_by_size(described: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields parts of a description of arrays, each of few bytes or of a single array."""
    part: dict[str, Any] = {}
    total = 0
    for name, what in described.items():
        if part and total + array_bytes(what) > BATCH:
            yield part
            part, total = {}, 0
        part[name] = what
        total += array_bytes(what)
    if part:
        yield part


def read_shapes(folder: Path) -> dict[str, Any]:
    """Returns shape and dtype of every array in the folder; no array is read.

    Raises:
        CheckpointError: they cannot be read, or a chunk is larger than its array.
    """
    try:
        with contextlib.closing(_handler(None)) as handler:
            tree = handler.metadata(_path(folder)).tree
        found = flatten_groups(tree, None)
        described = {
            name: {"shape": list(what.shape), "dtype": np.dtype(what.dtype).name}
            for name, what in found.items()
        }
        chunks = {
            name: list(what.storage.chunk_shape)
            for name, what in found.items()
            if what.storage is not None and what.storage.chunk_shape is not None
        }
    except Exception as error:
        raise _unreadable(folder, error) from error
    for name, chunk in chunks.items():
        whole = [max(1, size) for size in described[name]["shape"]]
        if len(chunk) != len(whole) or any(map(operator.gt, chunk, whole)):
            raise CheckpointError(f"{folder} has {name} {whole} in pieces of {chunk}")
    return described


def check_shapes(folder: Path, described: Mapping[str, Any]) -> None:
    """Compares shapes and dtypes with those in the folder; no array is read.

    Raises:
        CheckpointError: they differ; all of them are named.
    """
    problems = mismatches(
        {name: f"{what['dtype']} {what['shape']}" for name, what in described.items()},
        {name: f"{what['dtype']} {what['shape']}" for name, what in read_shapes(folder).items()},
        "is",
    )
    if problems:
        raise CheckpointError(
            f"{folder} does not hold what its manifest says: {', '.join(problems)}"
        )


def flatten_groups(tree: Any, names: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a tree of groups by ``group/path``, in the order of ``names`` if given."""
    found: dict[str, Any] = {}
    for group, members in tree.items():
        if isinstance(members, Mapping):
            found |= {f"{group}/{name}": value for name, value in members.items()}
        else:
            found[group] = members
    return found if names is None else {name: found[name] for name in names}


def _restore(folder: Path, described: Mapping[str, Any], arguments: dict[str, Any]) -> Any:
    import jax
    import orbax.checkpoint as ocp

    target = {
        name: jax.ShapeDtypeStruct(tuple(what["shape"]), DTYPES[what["dtype"]])
        for name, what in described.items()
    }
    restore = ocp.args.PyTreeRestore(
        item=unflatten(target), restore_args=unflatten(arguments), partial_restore=True
    )
    try:
        with contextlib.closing(_handler(None)) as handler:
            return handler.restore(_path(folder), args=restore)
    except Exception as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{folder} cannot be read: {brief_reason(error)}")


def _guard_writing(work: Callable[[], None]) -> None:
    """Turns any error into ``ResourceError``: TensorStore raises one class for all its errors."""
    try:
        work()
    except JaxformerError:
        raise
    except Exception as error:
        raise ResourceError(brief_reason(error)) from error


def _path(folder: Path) -> Any:
    from etils import epath  # type: ignore[import-untyped]

    return epath.Path(folder.absolute())


def _save_arguments(arrays: Arrays) -> Any:
    import orbax.checkpoint as ocp

    return ocp.args.PyTreeSave(arrays)


def _handler(control_plane: ControlPlane | None, **options: Any) -> Any:
    import orbax.checkpoint as ocp

    _patch_tensorstore_leak()
    _say_errors_once()
    return ocp.PyTreeCheckpointHandler(
        # Of float32 it saves a twelfth of the disk, for three times the processor's work.
        use_compression=False,
        multiprocessing_options=_process_options(control_plane),
        **options,
    )


def _checkpointer(control_plane: ControlPlane | None, **options: Any) -> Any:
    """Returns a checkpointer of this process alone, or of all that share the control plane."""
    import orbax.checkpoint as ocp

    if control_plane is None:
        handler = _handler(None, **options)
        return ocp.Checkpointer(handler, multiprocessing_options=_process_options(None))
    options = ocp.AsyncOptions(
        timeout_secs=SECONDS,
        barrier_sync_fn=lambda key, timeout_ms: control_plane.barrier(),
        create_directories_asynchronously=False,
    )
    return ocp.AsyncCheckpointer(
        _handler(control_plane),
        async_options=options,
        multiprocessing_options=_process_options(control_plane),
    )


def _process_options(control_plane: ControlPlane | None) -> Any:
    import jax
    import orbax.checkpoint as ocp

    if control_plane is not None:
        return ocp.options.MultiprocessingOptions(primary_host=0)
    own = jax.process_index()
    return ocp.options.MultiprocessingOptions(primary_host=own, active_processes={own})


@functools.cache
def _say_errors_once() -> None:
    """Keeps from the screen what else is said of a save that fails, once in this process.

    Orbax logs each error that it raises, with the stack. The first error ends the event loop of
    the save: asyncio logs the errors of the other arrays, for which nothing waits any more, and
    TensorStore, which tells that loop of each array that is written, prints that it is closed.
    """
    logging.getLogger("absl").addFilter(lambda record: "_SignalingThread" not in record.msg)
    logging.getLogger("asyncio").addFilter(lambda record: not _is_late_error(record))
    show = sys.unraisablehook

    def show_unless_late(found: Any) -> None:
        if found.exc_type is not RuntimeError or str(found.exc_value) != "Event loop is closed":
            show(found)

    sys.unraisablehook = show_unless_late


def _is_late_error(record: logging.LogRecord) -> bool:
    """Returns whether asyncio logs an error of TensorStore for which nothing waits any more.

    Such an error names the database of arrays (OCDBT) in which it arose.
    """
    message = record.getMessage()
    return "exception was never retrieved" in message and "ocdbt" in message.lower()


@functools.cache
def _patch_tensorstore_leak() -> None:
    """Works around a memory leak in TensorStore, once in this process.

    ``KvStore.Spec.to_json`` never frees the strings that it returns: 350 bytes a call, in all
    versions from 0.1.60 to 0.1.86. Orbax calls it for each array of each save with the same
    specification, so its results are kept and copied.
    """
    import tensorstore

    make = tensorstore.KvStore.Spec.to_json
    known: collections.deque[tuple[Any, Any]] = collections.deque(maxlen=SPECS_KEPT)

    def to_json(self: Any, *args: Any, **options: Any) -> Any:
        if args or options:
            return make(self, *args, **options)
        for spec, made in list(known):
            if spec == self:
                return copy.deepcopy(made)
        made = make(self)
        known.append((self, made))
        return copy.deepcopy(made)

    tensorstore.KvStore.Spec.to_json = to_json  # type: ignore[method-assign]
