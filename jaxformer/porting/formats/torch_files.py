"""PyTorch checkpoints, read without PyTorch.

There are three reasons not to use ``torch.load``. No code of the file ever runs: its pickle is
executed by a machine that knows only inert stand-ins. Sizes are known before memory is allocated,
where ``torch.load`` allocates what the file claims. And a checkpoint can be ported on a machine
without PyTorch. Tensors are read by position, one at a time, when they are needed.
"""

import pickletools
import re
from pathlib import Path
from typing import Any

from jaxformer.errors import CheckpointError, UnsafeFileError
from jaxformer.porting.formats.plain_pickle import SAVE_AGAIN
from jaxformer.porting.formats.torch_archive import TorchArchive
from jaxformer.porting.formats.torch_unpickler import TorchUnpickler
from jaxformer.porting.formats.trees import check_tree
from jaxformer.storage.local_files import LocalFile

# Tied weights repeat a tensor once or twice, shared layers some dozen times.
MAX_REPEATS = 64
# The magic number of torch.save before 1.6, as its pickle begins.
LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


def read_torch_file(path: str | Path) -> Any:
    """Returns the dicts, lists, tuples and values that ``torch.save`` wrote, no tensor read yet.

    Tensors and parameters become StoredTensor, OrderedDict and Counter dict, ``torch.Size`` tuple,
    ``torch.device`` and ``torch.dtype`` text ("cuda:0", "float32").

    Raises:
        CheckpointError: it is missing, cut short or damaged, or holds what numpy cannot.
        UnsafeFileError: it holds anything but tensors and plain values, claims more than it has,
            or has a form in which that cannot be known: before PyTorch 1.6, TorchScript.
        ResourceError: it cannot be read.
    """
    file = LocalFile(path)
    head = file.bytes(0, min(file.size, 512))
    if not head.startswith(b"PK\x03\x04"):
        raise _not_an_archive(file, head)
    archive = TorchArchive(file)
    tree = TorchUnpickler(archive).load()
    claimed = check_tree(tree, str(path))
    if claimed > MAX_REPEATS * file.size:
        raise UnsafeFileError(
            f"{path} has {file.size} bytes and its tensors claim {claimed}; do not use this file"
        )
    return tree


def _not_an_archive(file: LocalFile, head: bytes) -> CheckpointError | UnsafeFileError:
    if is_legacy(head):
        return UnsafeFileError(
            f"{file.path} was saved by PyTorch before 1.6, in a form that can run code; load it "
            "where it was made, if you trust it, and save it again there with a newer PyTorch"
        )
    if looks_like_pickle(file):
        return UnsafeFileError(
            f"{file.path} is a bare pickle, not a PyTorch checkpoint, and is not opened; "
            f"{SAVE_AGAIN}"
        )
    if file.size < 4 or not head.strip(b"\0"):
        return CheckpointError(
            f"{file.path} is not a complete PyTorch file: it is empty; fetch it again"
        )
    return CheckpointError(
        f"{file.path} is not a PyTorch checkpoint; name a file made by torch.save"
    )


def is_legacy(head: bytes) -> bool:
    """Whether a file with these first bytes was saved by PyTorch before 1.6."""
    return head.startswith(LEGACY) or head[257:262] == b"ustar"


def looks_like_pickle(file: LocalFile) -> bool:
    """Whether a file is a pickle, by its first instructions."""
    head = file.bytes(0, min(file.size, 4096))
    if head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return True
    # Protocols 0 and 1 have no header. They are recognised by the names that make them dangerous.
    try:
        for opcode, argument, _ in pickletools.genops(head):
            if opcode.name in ("GLOBAL", "INST"):
                return re.fullmatch(r"[\w.]+ [\w.]+", str(argument)) is not None
    except ValueError:
        pass
    return False
