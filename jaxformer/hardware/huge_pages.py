"""Requests memory in pages of 2 MiB, where Linux gives them on request.

On a CPU, XLA allocates a program's temporary arrays again at every call, and the kernel maps and
clears the memory page by page: with pages of 4 KiB that takes a seventh of a step of ``baby``. The
C library requests larger pages if an environment variable is set when a process starts.
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
    """Starts this program again, in the same process, with huge pages requested.

    A program must call it first: what was done before is done twice. It does nothing if it would
    not help, if only help is asked for, if ``GLIBC_TUNABLES`` has a choice already, or if the
    program comes from standard input, which cannot be read twice.
    """
    if not sys.executable or sys.argv[0] in ("", "-") or {"-h", "--help"} & {*sys.argv[1:]}:
        return
    with contextlib.suppress(OSError):
        environment = huge_page_environment(os.environ, KERNEL.read_text())
        if environment is not None:
            command = [sys.executable, *sys.orig_argv[1:]]
            os.execve(sys.executable, command, environment)


def huge_page_environment(environment: Mapping[str, str], kernel: str) -> dict[str, str] | None:
    """Returns an environment that requests huge pages, or None if nothing needs to change.

    Args:
        environment: the present one.
        kernel: Linux's choices, the one in effect in brackets: ``always [madvise] never``.
    """
    tunables = environment.get(TUNABLES, "")
    if "[madvise]" not in kernel or TUNABLE in tunables:
        return None
    return {**environment, TUNABLES: ":".join(filter(None, [tunables, f"{TUNABLE}=1"]))}
