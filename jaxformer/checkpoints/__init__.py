"""Checkpoints of training runs on disk: arrays by Orbax, and a manifest that describes them.

``checkpoints/<step>/arrays`` is an Orbax folder with the groups ``parameters``, ``mu`` and ``nu``
(each by parameter path) and ``step``. ``checkpoints/<step>/MANIFEST.json`` holds the settings, the
vocabulary, the corpus's hash, versions, the SHA-256 of every file, and shape, dtype and SHA-256 of
every array, whole, however it is sharded. A step is written under a temporary name and renamed once
all of it is on the disk, so a folder whose name is a number is complete; it counts only if its
manifest agrees with itself, with every file and with every array.

- ``folder``: the entry point: save, restore, verify, quarantine, prune.
- ``saving``, ``restoring``: one save beside the training; reading and comparing a step.
- ``orbax_arrays``: arrays to and from Orbax's format.  ``manifest``: reads, writes, checks it.
- ``casts``: changes of dtype, with their rounding errors.
"""

from jaxformer.checkpoints.casts import Cast, round_to, rounding_error
from jaxformer.checkpoints.folder import CheckpointFolder
from jaxformer.checkpoints.manifest import (
    DTYPES,
    FORMAT,
    GROUPS,
    MANIFEST,
    Arrays,
    Manifest,
    describe,
    describe_array,
    flatten,
    serialize_manifest,
    state_hash,
    unflatten,
)

__all__ = [
    "DTYPES",
    "FORMAT",
    "GROUPS",
    "MANIFEST",
    "Arrays",
    "Cast",
    "CheckpointFolder",
    "Manifest",
    "describe",
    "describe_array",
    "flatten",
    "round_to",
    "rounding_error",
    "serialize_manifest",
    "state_hash",
    "unflatten",
]
