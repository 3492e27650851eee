"""``train --dashboard``: one screen on a terminal, the usual lines elsewhere."""

import fcntl
import io
import itertools
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import numpy as np
import pytest
from rich.console import Console

from jaxformer.training.logging.dashboard import NO_DOTS, Dashboard, draw_curves
from tests.support.tiny import ROOT, TINY, train

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def dashboard(**settings):
    console = Console(file=io.StringIO(), width=100, height=40, **settings)
    shown = Dashboard(30, 0, console)
    shown.steps_done(10, 4.0, 20_000.0, 12.5, "98 GFLOP/s")
    shown.evaluation(10, 3.5, 0.1)
    shown.sample("To be,\nor not to be")
    shown.steps_done(30, 2.0, 25_000.0, 12.5, "98 GFLOP/s")
    shown.note("done: runs/nano")
    shown.close()
    return ESCAPES.sub("", console.file.getvalue())


def test_a_terminal_shows_curve_speed_memory_and_sample():
    out = dashboard(force_terminal=True)
    last = out[out.rindex("loss, nats per token") :]
    for words in (
        "2.000", "4.000", "25.0k tokens/s", "12.5 ms", "98 GFLOP/s", "GiB", "30/30",
        "3.5000, best 3.5000 after step 10", "or not to be", "●",
    ):  # fmt: skip
        assert words in last
    assert any(ord(c) > NO_DOTS and ord(c) <= NO_DOTS + 255 for c in last)
    assert "done: runs/nano" in out


def test_without_a_terminal_one_line_says_so_and_the_usual_ones_follow():
    lines = dashboard(force_terminal=False).splitlines()
    assert lines[0] == "--dashboard needs a terminal, and this is none: progress is printed instead"
    assert lines[1].startswith("step 10/30 · loss 4.000 · 20.0k tokens/s · 12.5 ms/step")
    assert "validation loss 3.5000" in lines[2]
    assert lines[3:5] == ["  │ To be,", "  │ or not to be"]


def test_a_curve_goes_from_its_first_point_to_its_last():
    steps = np.arange(1, 101)
    losses = [(int(n), float(4 - 3 * n / 100)) for n in steps]
    text = draw_curves(losses, [(50, 2.5)], columns=40, rows=10, ascii_only=True).plain
    *rows, axis = text.splitlines()
    found = [{n - 9 for n, c in enumerate(row) if n > 8 and c != " "} for row in rows]
    assert min(found[0]) == 0
    assert max(found[-1]) == 39
    assert all(min(a) < min(b) for a, b in itertools.pairwise(found))
    assert sum(row.count("o") for row in rows) == 1
    assert rows[0].split()[0] == "3.970"
    assert rows[-1].split()[0] == "1.000"
    assert axis.split() == ["step", "1", "100"]


def test_a_loss_that_is_not_finite_has_no_point():
    text = draw_curves([(1, float("nan")), (2, 3.0)], [(2, float("inf"))], columns=9, rows=3).plain
    assert sum(NO_DOTS < ord(c) <= NO_DOTS + 255 for c in text) == 1


@pytest.mark.tier("full")
def test_a_run_on_a_pseudo_terminal(text):
    """The command as a user starts it; what it draws is read from the other end."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 110, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "jaxformer", "train", "--data", text, "--out", "run", *TINY]
    process = subprocess.Popen(
        [*command, "--steps", "40", "--dashboard"],
        stdin=writer, stdout=writer, stderr=subprocess.PIPE, env=environment,
    )  # fmt: skip
    os.close(writer)
    seen = b""
    while True:
        try:
            part = os.read(reader, 65536)
        except OSError:  # The other end is closed.
            break
        if not part:
            break
        seen += part
    os.close(reader)
    assert process.wait(timeout=60) == 0, process.stderr.read()
    process.stderr.close()
    out = ESCAPES.sub("", seen.decode())
    # It was drawn again and again.
    assert out.count("loss, nats per token") > 3
    last = out[out.rindex("loss, nats per token") :]
    for words in ("tokens/s", "GiB", "the last sample", "best", "40/40"):
        assert words in last
    assert "done: run" in out
    assert "needs a terminal" not in out


@pytest.mark.tier("full")
def test_a_run_without_a_terminal(text, capsys):
    assert train(text, "run", "--steps", 10, "--dashboard") == 0
    out = capsys.readouterr().out
    assert out.count("--dashboard needs a terminal") == 1
    assert "step 10/10 · loss" in out
