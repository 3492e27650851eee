"""``train --num-processes N --max-restarts M``: the processes of one machine, started again."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxformer.cli.arguments import without
from jaxformer.distributed import launcher
from tests.support.several import lines
from tests.support.tiers import FULL, SLOW
from tests.support.tiny import losses, start, train_arguments

KILLED = "import os; os.kill(os.getpid(), 9)"
DONE = ""


def python(code):
    return [sys.executable, "-S", "-c", code]


def run(code, *later, count=1, restarts=2):
    """The exit code, what was reported, and how often the run was resumed."""
    reported, commands = [], [None if code is None else python(code) for code in later]
    result = launcher.run_processes(
        python(code),
        count,
        restarts=restarts,
        resume=lambda: commands.pop(0),
        report=reported.append,
    )
    return result, reported, len(later) - len(commands)


def test_a_killed_process_is_started_again():
    first, second = "process 0 was ended by signal 9 (Killed); all are started again", "restart 1"
    result, reported, resumed = run(KILLED, DONE)
    assert (result, resumed) == (0, 1)
    assert reported == [f"{first}, {second} of 2"]


def test_restarts_come_to_an_end():
    result, reported, resumed = run(KILLED, KILLED, KILLED)
    assert (result, resumed) == (137, 2)
    assert reported[-1].endswith("no restart is left")
    assert run(KILLED, None)[1][0].endswith("nothing is saved from which to go on")


@pytest.mark.parametrize("code", [2, 9])
def test_an_error_is_no_loss(code):
    assert run(f"raise SystemExit({code})") == (code, [], 0)


def test_a_process_that_hangs_is_ended_once_the_others_miss_it(monkeypatch):
    monkeypatch.setattr(launcher, "GRACE", 0.1)
    hangs = "import sys, time\nif sys.argv[-1] == '1': time.sleep(60)\nsys.exit(9)"
    result, reported, resumed = run(hangs, DONE, count=2)
    assert (result, resumed) == (0, 1)
    assert reported[0].startswith("a process does not answer; all are started again")


def test_a_signal_is_passed_on_and_ends_the_run():
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert run("import time; time.sleep(60)", count=2) == (143, [], 0)


IGNORES = """
import os, signal, sys, time
if sys.argv[-1] != "0":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    open("ready", "w").close()
time.sleep(60)
"""


def signal_when_ready(*numbers):
    """Sends this process signals, one after the other, once one of those it started ignores them.

    The handlers of the test's own process are those of the launcher by then.
    """

    def send():
        while not Path("ready").exists():
            time.sleep(0.02)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    threading.Thread(target=send).start()


def test_a_process_that_does_not_end_after_a_signal_is_killed_once_another_has(monkeypatch):
    monkeypatch.setattr(launcher, "GRACE", 0.1)
    signal_when_ready(signal.SIGTERM)
    assert run(IGNORES, count=2) == (143, [], 0)


def test_a_second_signal_kills_at_once():
    signal_when_ready(signal.SIGINT, signal.SIGINT)
    begin = time.monotonic()
    assert run(IGNORES, count=1) == (130, [], 0)
    assert time.monotonic() - begin < launcher.GRACE


def test_flags_are_left_out_with_their_values():
    given = ["--steps", "3", "--ignore", "a", "b", "--init-from=x", "--resume", "--dtype", "c"]
    assert without(given, "--ignore", "--init-from", "--resume") == ["--steps", "3", "--dtype", "c"]


def children(process):
    """The processes that a process has started, in order."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(word) for word in path.read_text().split()]


@pytest.mark.parametrize("victim", [pytest.param(0, marks=SLOW), pytest.param(1, marks=FULL)])
def test_a_killed_process_costs_only_the_steps_since_the_last_save(text, victim):
    arguments = train_arguments(text, "run", "--steps", 400, "--steps-per-call", 1)
    here = ["--num-processes", 2, "--max-restarts", 2, "--peer-timeout", 12]
    more = ["--checkpoint-interval", 100, "--eval-interval", 400, "--sample-tokens", 0]
    process = start(*arguments, *more, *here)
    try:
        saved = Path("run/checkpoints/100/MANIFEST.json")
        end = time.monotonic() + 240
        while not saved.exists() and time.monotonic() < end:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        os.kill(children(process)[victim], signal.SIGKILL)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 0, err
    (line,) = [line for line in lines(err) if "started again, restart" in line]
    assert line.endswith("all are started again, restart 1 of 2")
    assert f"process {victim} was ended by signal 9" in line
    assert list(losses("run")) == list(range(1, 401))
    assert "done: run" in out


@pytest.mark.tier("full")
def test_without_a_save_of_what_it_starts_from_nothing_is_started_again(text, whole):
    """It would otherwise resume from random weights."""
    Path("run").mkdir()
    from jaxformer.cli import train as command
    from jaxformer.distributed.settings import ProcessSettings

    found = []

    def look(*_, resume, **__):
        (Path("run") / "config.json").touch()
        found.append(resume())
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "run_processes", look)
        arguments = ["--out", "run", "--init-from", str(whole), "--max-restarts", "1"]
        command._start_processes(arguments, ProcessSettings(max_restarts=1))
        command._start_processes(["--out", "run", "--config", "x"], ProcessSettings())
    assert found[0] is None
    assert found[1][-3:] == ["--out", "run", "--resume"]
