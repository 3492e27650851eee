"""The record of a port, with which it can be checked: every file and array, with its hash.

The keys are a file format that users have: "ours" is the array of jaxformer, and "to_ours" says how
it was made of the source's arrays.
"""

import importlib.metadata
import math
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxformer.porting.mapping.plans import Plan
from jaxformer.porting.mapping.rules import Link
from jaxformer.storage.durable_files import sha256_of_file

PACKAGES = ("jaxformer", "jax", "flax", "numpy", "ml_dtypes", "orbax-checkpoint", "tokenizers")
FORMAT = 1


def make_certificate(
    *,
    command: str,
    source: Mapping[str, Any],
    target: Mapping[str, Any],
    imported: Plan,
    exported: Plan,
    digests: Mapping[str, str],
    rounding: Mapping[str, float],
) -> dict[str, Any]:
    """Returns the record of a port, as JSON values.

    Args:
        command: the whole command.
        source: path, format and files of the source.
        target: path, format and files of what was written.
        imported: the plan from the source's names to the model.
        exported: the plan from the model to the names that were written.
        digests: the SHA-256 of every array that was written.
        rounding: the largest rounding error of every array that was cast, by its path in the model.
    """
    before = {name: link for link in imported.links for name in link.target}
    after = {name: link for link in exported.links for name in link.source}
    return {
        "format": FORMAT,
        "command": command,
        "source": {**source, **_describe_origin(imported), "ignored": list(imported.dropped)},
        "target": {**target, **_describe_origin(exported)},
        "parameters": sum(math.prod(s) for link in imported.links for s in link.target_shapes),
        "largest_rounding_error": max(rounding.values(), default=0.0),
        "tensors": [
            {
                "name": name,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype.name,
                "sha256": digests[name],
                **_history(
                    after.get(name) or after.get(_carrier(exported, name)), before, rounding
                ),
            }
            for name, tensor in exported.tensors.items()
            if name in digests
        ],
        "versions": _versions(),
    }


def file_record(path: Path, root: Path, sha256: str | None = None) -> dict[str, Any]:
    """Returns a file's size in bytes, its SHA-256, and its path: within ``root`` if it is there.

    Args:
        path: of the file.
        root: the folder that the path is relative to.
        sha256: of the file, if it has just been read; default None, which reads it.
    """
    is_inside = path.is_relative_to(root)
    return {
        "path": (path.relative_to(root) if is_inside else path).as_posix(),
        "bytes": path.stat().st_size,
        "sha256": sha256 or sha256_of_file(path, follow_links=True),
    }


def _describe_origin(plan: Plan) -> dict[str, str]:
    return {"dialect": plan.origin.dialect.name, "class": plan.origin.kind}


def _history(
    out: Link | None, before: Mapping[str, Link], rounding: Mapping[str, float]
) -> dict[str, Any]:
    """Returns which arrays of the model, and of the source, a written array comes from.

    A buffer comes from none.
    """
    if out is None:
        return {"ours": [], "source": []}
    # Several arrays of the model may come from one of the source.
    into = list({before[name].target: before[name] for name in out.target}.values())
    errors = [rounding[name] for name in out.target if name in rounding]
    return {
        "ours": [
            {"name": name, "shape": list(shape)}
            for name, shape in zip(out.target, out.target_shapes, strict=True)
        ],
        "source": [
            {"name": name, "shape": list(shape)}
            for link in into
            for name, shape in zip(link.source, link.source_shapes, strict=True)
        ],
        "to_ours": list(dict.fromkeys(link.describe() for link in into)),
        "to_target": out.describe(),
        **({"largest_rounding_error": max(errors)} if errors else {}),
    }


def _carrier(plan: Plan, name: str) -> str:
    """Returns the name under which a tied array is in the plan's links."""
    return plan.module_mapping.aliases.get(name, name)


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions
