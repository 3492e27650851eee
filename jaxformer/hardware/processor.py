"""What kind of processor this is: for what is kept of one machine and does not fit another."""

import hashlib
import platform
from pathlib import Path


def processor_kind() -> str:
    """Returns a name for this kind of processor.

    XLA loads machine code that was compiled for another CPU with only a warning, and machines of
    several kinds may share a home folder.
    """
    about = [platform.machine(), platform.processor()]
    kinds = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    about += [line for line in _about_first_core() if line.startswith(kinds)]
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:12]


def is_intel() -> bool:
    """Returns whether Intel made the processor, as far as Linux says."""
    return any(line.endswith("GenuineIntel") for line in _about_first_core())


def _about_first_core() -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return lines[: lines.index("")] if "" in lines else lines
