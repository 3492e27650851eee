"""Lets MKL, which computes torch's products, use all of a processor that Intel did not make.

MKL asks one of its own functions who made the processor, and computes without AVX-512 where it was
not Intel. With ``--all-of-mkl`` a library that is loaded before it answers in its place. So torch
is beside jaxformer what it would be on a processor of Intel's with the same speed.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

FLAG = "--all-of-mkl"
SOURCE = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"
# Names the library, in all processes of a benchmark.
VARIABLE = "LD_PRELOAD"
LIBRARY = "all_of_mkl.so"


def is_used() -> bool:
    """Returns whether this process has all of MKL."""
    return Path(os.environ.get(VARIABLE, "")).name == LIBRARY


def reexec_if_asked() -> None:
    """Starts this program again with the library, where the command line asks for it.

    Raises:
        SystemExit: there is no C compiler, or it fails.
    """
    if FLAG not in sys.argv or is_used():
        return
    library = Path(tempfile.mkdtemp()) / LIBRARY
    words = ["cc", "-x", "c", "-shared", "-fPIC", "-", "-o", str(library)]
    try:
        subprocess.run(words, input=SOURCE, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"{FLAG} needs a C compiler: {error}")
    environment = {**os.environ, VARIABLE: str(library)}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
