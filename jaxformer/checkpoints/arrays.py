"""Arrays in and out of a folder that Orbax writes."""

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.checkpoints import tensorstore_leak as leak
from jaxformer.checkpoints.manifest import DTYPES, Arrays, flat, nested, size_of
from jaxformer.distributed.control_plane import SECONDS, ControlPlane, one_line
from jaxformer.errors import CheckpointError, JaxformerError, ResourceError, mismatches

# What is read at a time: enough to keep the disk busy, little beside any model that needs care.
BATCH = 256 << 20


def is_shared(array: Any) -> bool:
    """Whether parts of an array lie with other processes alone."""
    return not getattr(array, "is_fully_addressable", True)


def on_host(arrays: Arrays) -> Arrays:
    """The arrays as numpy's, with no memory that a later step writes to.

    On a CPU that is the array's own memory: as long as somebody sees it, donating the array to a
    step makes JAX copy it first.
    """
    import jax

    for leaf in jax.tree.leaves(arrays):
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
    return jax.tree.map(np.asarray, arrays)


def write(folder: Path, arrays: Arrays) -> None:
    """Writes numpy arrays from this process alone.

    Raises:
        ResourceError: it could not.
    """
    with contextlib.closing(_checkpointer(None)) as checkpointer:
        _guard_writing(lambda: checkpointer.save(folder.absolute(), _save_arguments(arrays)))


def begin_writing(folder: Path, arrays: Arrays, control_plane: ControlPlane) -> Callable[[], None]:
    """Begins to write arrays whose parts lie with several processes, all of which call this.

    Returns:
        What waits until all of them are written. The arrays themselves are not needed any more.

    Raises:
        ResourceError: it could not.
    """
    checkpointer = _checkpointer(control_plane)
    _guard_writing(lambda: checkpointer.save(folder.absolute(), _save_arguments(arrays)))

    def finish() -> None:
        with contextlib.closing(checkpointer):
            _guard_writing(checkpointer.wait_until_finished)

    return finish


def read(folder: Path, described: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Some of the arrays, whole, as numpy's.

    Raises:
        CheckpointError: they cannot be read.
    """
    import orbax.checkpoint as ocp

    arguments = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in described}
    return flat_of(_restore(folder, described, arguments), described)


def read_placed(folder: Path, described: Mapping[str, Any], shardings: Arrays) -> Arrays:
    """All arrays, of which this process reads what its devices hold.

    Raises:
        CheckpointError: they cannot be read.
    """
    import orbax.checkpoint as ocp

    placed = flat(shardings)
    arguments = {
        name: ocp.ArrayRestoreArgs(
            sharding=placed[name], global_shape=tuple(what["shape"]), strict=True
        )
        for name, what in described.items()
    }
    return _restore(folder, described, arguments)


def batches(described: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Parts of a description, each of few bytes or of one array."""
    part: dict[str, Any] = {}
    total = 0
    for name, what in described.items():
        if part and total + size_of(what) > BATCH:
            yield part
            part, total = {}, 0
        part[name] = what
        total += size_of(what)
    if part:
        yield part


def stored_shapes(folder: Path) -> dict[str, Any]:
    """Shape and dtype of every array in the folder, before anything is read.

    Raises:
        CheckpointError: that cannot be read, or a piece of an array is larger than the array.
    """
    try:
        with contextlib.closing(_handler(None)) as handler:
            tree = handler.metadata(_path(folder)).tree
        found = flat_of(tree, None)
        described = {
            name: {"shape": list(what.shape), "dtype": np.dtype(what.dtype).name}
            for name, what in found.items()
        }
        pieces = {
            name: list(what.storage.chunk_shape)
            for name, what in found.items()
            if what.storage is not None and what.storage.chunk_shape is not None
        }
    except Exception as error:
        raise _unreadable(folder, error) from error
    for name, piece in pieces.items():
        whole = [max(1, size) for size in described[name]["shape"]]
        if len(piece) != len(whole) or any(map(operator.gt, piece, whole)):
            raise CheckpointError(f"{folder} has {name} {whole} in pieces of {piece}")
    return described


def check_stored(folder: Path, described: Mapping[str, Any]) -> None:
    """Compares shapes and dtypes with those that the folder has, before anything is read.

    Raises:
        CheckpointError: they differ; all of them are named.
    """
    problems = mismatches(
        {name: f"{what['dtype']} {what['shape']}" for name, what in described.items()},
        {name: f"{what['dtype']} {what['shape']}" for name, what in stored_shapes(folder).items()},
        "is",
    )
    if problems:
        raise CheckpointError(
            f"{folder} does not hold what its manifest says: {', '.join(problems)}"
        )


def flat_of(tree: Any, names: Mapping[str, Any] | None) -> dict[str, Any]:
    """A tree of groups by ``group/path``, in the order of ``names`` if given."""
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
        item=nested(target), restore_args=nested(arguments), partial_restore=True
    )
    try:
        with contextlib.closing(_handler(None)) as handler:
            return handler.restore(_path(folder), args=restore)
    except Exception as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: Path, error: Exception) -> CheckpointError:
    return CheckpointError(f"{folder} cannot be read: {one_line(error)}")


def _guard_writing(work: Callable[[], None]) -> None:
    """Turns whatever ends the writing into one line: TensorStore has no kinds of errors."""
    try:
        work()
    except JaxformerError:
        raise
    except Exception as error:
        raise ResourceError(one_line(error)) from error


def _path(folder: Path) -> Any:
    from etils import epath  # type: ignore[import-untyped]

    return epath.Path(folder.absolute())


def _save_arguments(arrays: Arrays) -> Any:
    import orbax.checkpoint as ocp

    return ocp.args.PyTreeSave(arrays)


def _handler(control_plane: ControlPlane | None) -> Any:
    import orbax.checkpoint as ocp

    leak.patch_tensorstore_leak()
    return ocp.PyTreeCheckpointHandler(multiprocessing_options=_processes(control_plane))


def _checkpointer(control_plane: ControlPlane | None) -> Any:
    """Of this process alone, or of all that share the exchange."""
    import orbax.checkpoint as ocp

    if control_plane is None:
        return ocp.Checkpointer(_handler(None), multiprocessing_options=_processes(None))
    options = ocp.AsyncOptions(
        timeout_secs=SECONDS,
        barrier_sync_fn=lambda key, timeout_ms: control_plane.barrier(),
        create_directories_asynchronously=False,
    )
    return ocp.AsyncCheckpointer(
        _handler(control_plane),
        async_options=options,
        multiprocessing_options=_processes(control_plane),
    )


def _processes(control_plane: ControlPlane | None) -> Any:
    import jax
    import orbax.checkpoint as ocp

    if control_plane is not None:
        return ocp.options.MultiprocessingOptions(primary_host=0)
    alone = jax.process_index()
    return ocp.options.MultiprocessingOptions(primary_host=alone, active_processes={alone})
