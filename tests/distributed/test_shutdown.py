"""How a process ends that JAX's runtime aborts."""

import subprocess
import sys

import pytest

PROGRAM = """
import os
from jaxformer.distributed import shutdown
shutdown.explain_aborts(lambda: "process 0 has died")
{more}
os.abort()
"""


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        ("", 9, "jaxformer: process 0 has died\n"),
        # It has said why it leaves, and the others knew it before it had ended.
        ("shutdown.end_aborts_with(3)", 3, ""),
    ],
)
def test_an_abort_has_a_line_unless_the_process_is_leaving(more, code, words):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(more=more)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (code, words)
