"""Python in a process of its own, and how far its memory rose."""

import json
import os
import subprocess
import sys
from pathlib import Path

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
