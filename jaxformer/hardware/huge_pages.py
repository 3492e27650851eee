"""Memory in pages of 2 MiB, where Linux gives them to those who ask.

XLA on a CPU takes the memory of a program's temporary arrays anew for every call, and the kernel
maps and clears it page by page: with pages of 4 KiB that is a seventh of a step of ``baby``. The C
library asks for larger ones if the environment says so when a process begins.
"""

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# https://sourceware.org/glibc/manual/latest/html_node/Memory-Allocation-Tunables.html
TUNABLES, TUNABLE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb"


def reexec_with_huge_pages() -> None:
    """Begins this program anew, in the same process, with huge pages asked for.

    It comes first in a program: what was done before is done twice. Nothing happens where it would
    be of no use, where ``GLIBC_TUNABLES`` says already what is wanted, or in a program that comes
    from standard input, which cannot be read twice.
    """
    if not sys.executable or sys.argv[0] in ("", "-"):
        return
    with contextlib.suppress(OSError):
        environment = is_requested(os.environ, KERNEL.read_text())
        if environment is not None:
            command = [sys.executable, *sys.orig_argv[1:]]
            os.execve(sys.executable, command, environment)


def is_requested(environment: Mapping[str, str], kernel: str) -> dict[str, str] | None:
    """The environment that asks for huge pages, or None where nothing needs to change.

    Args:
        environment: that there is.
        kernel: the choices of Linux, the one in effect in brackets: ``always [madvise] never``.
    """
    tunables = environment.get(TUNABLES, "")
    if "[madvise]" not in kernel or TUNABLE in tunables:
        return None
    return {**environment, TUNABLES: ":".join(filter(None, [tunables, f"{TUNABLE}=1"]))}
