"""The memory of this process, and of Python in a process of its own."""

import ctypes
import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import jax

ROOT = Path(__file__).parents[2]
# VmHWM is of this program alone; what getrusage gives begins at the parent's own peak.
METER = """
import json, sys
def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
def reset():
    open("/proc/self/clear_refs", "w").write("5")
    return status("VmHWM")
"""


def run_python(code, *arguments, timeout=300):
    """What a script prints last, as JSON; it finds METER's functions."""
    done = subprocess.run(
        [sys.executable, "-c", METER + code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def resident_memory():
    """The bytes of memory that this process has; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def free_compiled_programs():
    """Drops the programs that JAX keeps in memory, and gives their memory back to the system.

    A program that is asked for again comes from the folder of compiled programs.
    """
    jax.clear_caches()
    gc.collect()
    # glibc keeps what is freed between things that are in use.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
