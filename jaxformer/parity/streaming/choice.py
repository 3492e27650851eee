"""Whether two checkpoints are compared as whole models or block by block, and why."""

import dataclasses
import math
from pathlib import Path
from typing import Literal

from jaxformer.errors import Setting, UsageError
from jaxformer.hardware.memory import free_memory
from jaxformer.parity.sources.checkpoints import Source

Wanted = Literal["auto", "always", "never"]
# Of whole models in memory: both sides and the gradients in float64, and the checkpoint's own dtype
# twice. GPT-2 small has been measured with 31, activations included.
BYTES_OF_PARAMETER = 40


@dataclasses.dataclass(frozen=True)
class Streaming:
    """How a comparison block by block is wanted.

    Attributes:
        wanted: whether it is made; "auto" where whole models would take too much memory.
        folder: what a run that was killed resumes from; default one of the user's.
    """

    wanted: Wanted = "auto"
    folder: Path | None = None


def choose(wanted: Wanted, mode: str, source: Source) -> tuple[bool, str]:
    """Returns whether the comparison is made block by block, and why, in a line.

    Raises:
        UsageError: it is wanted, and the mode needs whole models.
    """
    count = sum(math.prod(tensor.shape) for tensor in source.plan.tensors.values())
    need, free = count * BYTES_OF_PARAMETER / 2**30, free_memory() / 2**30
    known = f"{count:,} parameters need about {need:.1f} GiB at once, and {free:.1f} GiB are free"
    if mode not in ("forward", "grad"):
        if wanted == "always":
            raise UsageError(
                Setting("stream"), " always is for ", Setting("mode"), " forward or grad"
            )
        return False, f"whole models: mode {mode} needs them"
    if wanted != "auto":
        how = "block by block" if wanted == "always" else "whole models"
        return wanted == "always", f"{how}, as was asked for: {known}"
    if need > free:
        return True, f"block by block: {known}"
    return False, f"whole models: {known}"
