"""The manifest of a checkpoint: what its files and arrays must be, and its own SHA-256."""

import hashlib
import importlib.metadata
import json
import math
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxformer.errors import CheckpointError, mismatches
from jaxformer.storage.durable_files import on_all_cores

FORMAT = 1
# Of parameters: themselves, what the optimizers of ``config_optimizers`` keep of them, and their
# moving average.
GROUPS = ("parameters", "mu", "nu", "trace", "v_row", "v_col", "v", "ema")
MANIFEST = "MANIFEST.json"
# Enough for three hundred thousand arrays.
MAX_BYTES = 64 << 20
# The limit of numpy.
MAX_DIMENSIONS = 64
DTYPES = {
    dtype.name: dtype
    for dtype in map(
        np.dtype,
        (
            np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32,
            np.uint64, np.float16, np.float32, np.float64, ml_dtypes.bfloat16,
            ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
        ),
    )
}  # fmt: skip

Arrays = dict[str, Any]
Manifest = dict[str, Any]


def flatten(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays of a state by ``group/path``, in the order of a manifest."""
    found = {
        f"{group}/{name}": value
        for group in GROUPS
        for name, value in sorted(arrays.get(group, {}).items())
    }
    return found | {"step": arrays["step"]}


def unflatten(named: Mapping[str, Any]) -> Arrays:
    """Returns the arrays of a state by group and path: the inverse of ``flatten``."""
    arrays: Arrays = {}
    for full_name, value in named.items():
        group, _, name = full_name.partition("/")
        if name:
            arrays.setdefault(group, {})[name] = value
        else:
            arrays[group] = value
    return arrays


def describe(arrays: Arrays) -> dict[str, dict[str, Any]]:
    """Returns shape, dtype and SHA-256 of every array, by ``group/path``."""
    return describe_named(flatten(arrays))


def describe_named(named: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the same of arrays that have these names."""
    return on_all_cores(lambda name: describe_array(named[name]), named)


def describe_array(array: Any) -> dict[str, Any]:
    """Returns shape, dtype and SHA-256 of one array, in C order, however it is sharded."""
    array = np.asarray(array)
    digest = hashlib.sha256(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return {"shape": list(array.shape), "dtype": array.dtype.name, "sha256": digest.hexdigest()}


def array_bytes(what: Mapping[str, Any]) -> int:
    """Returns the bytes of an array that a manifest describes."""
    return math.prod(what["shape"]) * DTYPES[what["dtype"]].itemsize


def state_hash(digests: Mapping[str, Any]) -> str:
    """Returns one SHA-256 over the description of all arrays."""
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def serialize_manifest(manifest: Mapping[str, Any]) -> str:
    """Returns the text of a manifest, with the SHA-256 of all its other entries."""
    content = {name: value for name, value in manifest.items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    return json.dumps({**content, "sha256": digest}, indent=1)


def read_manifest(path: Path, step: int) -> Manifest:
    """Reads the manifest of a step.

    Raises:
        CheckpointError: it is missing or damaged, has a format that this version does not know, or
            an entry of the wrong type.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path} is larger than any manifest")
        data = path.read_bytes()
        manifest = json.loads(data)
        known = isinstance(manifest, dict) and _is(manifest.get("format"), FORMAT)
        # A key that occurs twice or another way of writing JSON is damage too.
        intact = known and data == serialize_manifest(manifest).encode()
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not known:
        raise CheckpointError(f"{path} is not a checkpoint manifest of format {FORMAT}")
    if not intact:
        raise CheckpointError(f"{path} is damaged: it is not as it was written")
    problem = _find_problem(manifest, step)
    if problem:
        raise CheckpointError(f"{path} is no manifest of this step: {problem}")
    return manifest


def check_same(what: str, folder: Path, manifest: Manifest, found: Mapping[str, Any]) -> None:
    """Compares the hashes of files or arrays with those in the manifest.

    Raises:
        CheckpointError: something is missing, unexpected or changed; all of it is named.
    """
    problems = mismatches(manifest[what], found, "")
    if problems:
        raise CheckpointError(
            f"{folder} is damaged: {len(problems)} {what} differ from its manifest "
            f"({', '.join(problems)})"
        )


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that write a checkpoint."""
    packages = ("jaxformer", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _is(value: Any, expected: int) -> bool:
    """Returns whether a value is this integer; True and 1.0 are not 1 here."""
    return type(value) is int and value == expected


def _find_problem(manifest: Manifest, step: int) -> str:
    """Returns what is wrong with an entry, or an empty string."""
    missing = [name for name in REQUIRED if name not in manifest]
    if missing:
        return f"it lacks {', '.join(missing)}"
    for name, (fits, what) in KINDS.items():
        if name in manifest and not fits(manifest[name]):
            return f"{name} is not {what}"
    if manifest["step"] != step:
        return f"it is that of step {manifest['step']}"
    for name, entry in manifest["arrays"].items():
        if not _describes(entry):
            return f"arrays has no shape, dtype and SHA-256 for {name[:200]}"
    if "step" not in manifest["arrays"]:
        return "arrays lacks step"
    if manifest["state_sha256"] != state_hash(manifest["arrays"]):
        return "state_sha256 is not that of its arrays"
    return ""


def _describes(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {"shape", "dtype", "sha256"}
        and isinstance(entry["shape"], list)
        and len(entry["shape"]) <= MAX_DIMENSIONS
        and all(type(n) is int and 0 <= n < 2**63 for n in entry["shape"])
        and isinstance(entry["dtype"], str)
        and entry["dtype"] in DTYPES
        and _is_digest(entry["sha256"])
    )


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and type(value) is not bool and math.isfinite(value)


def _is_corpus(value: Any) -> bool:
    return value is None or (
        isinstance(value, dict) and all(isinstance(entry, str) for entry in value.values())
    )


def _or_none(kind: type) -> Callable[[Any], bool]:
    return lambda value: value is None or isinstance(value, kind)


def _all_digests(values: Any) -> bool:
    entries: Iterable[Any] = values.values() if isinstance(values, dict) else [None]
    return all(map(_is_digest, entries))


REQUIRED = ("step", "state_sha256", "versions", "arrays", "files")
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "step": (lambda value: type(value) is int, "a whole number"),
    "state_sha256": (_is_digest, "a SHA-256"),
    "config": (lambda value: isinstance(value, dict), "a table of settings"),
    "vocabulary": (_or_none(str), "text"),
    "corpus": (_is_corpus, "a name and a SHA-256"),
    "val_loss": (lambda value: value is None or _is_number(value), "a number"),
    "init_from": (_or_none(str), "text"),
    "versions": (lambda value: isinstance(value, dict), "a table of versions"),
    "arrays": (lambda value: isinstance(value, dict), "a table of arrays"),
    "files": (_all_digests, "a table of SHA-256"),
}
