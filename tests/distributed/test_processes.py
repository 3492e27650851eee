"""Several processes train as one, and what becomes of them when one is lost."""

import contextlib
import hashlib
import shutil
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.support.several import PEER_TIMEOUT, Processes, fresh, lines, run
from tests.support.tiny import DROPOUT, TEXT, losses, same_run, steps

GRADIENT_NORM = "grad_norm"
STEPS = 180
LONG = ["--steps", STEPS, "--eval-interval", 60, "--checkpoint-interval", 60, *DROPOUT]
# Beyond the time after which a process counts as lost: to notice it, and to say so.
GRACE = 15


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    """A run of 180 steps of one process with four devices."""
    folder = tmp_path_factory.mktemp("together")
    (folder / "text.txt").write_text(TEXT)
    arguments = fresh(folder / "text.txt", folder / "run", *LONG)
    outputs = run(1, 4, *arguments)
    assert outputs[0][1] == ""
    return folder


def saved():
    """The steps on the disk; a save may have been cut short."""
    return sorted(int(p.name) for p in Path("run/checkpoints").iterdir() if p.name.isdigit())


def same_everywhere(out, together):
    same_run(out, together / "run", STEPS)
    assert losses(out, GRADIENT_NORM) == losses(together / "run", GRADIENT_NORM)


@pytest.mark.tier("slow")
def test_four_processes_are_bit_exact_with_one(together, empty_folder):
    arguments = fresh(together / "text.txt", "run", *LONG)
    outputs = run(4, 1, *arguments)
    same_everywhere("run", together)
    assert steps("run") == [60, 120, 180]
    out, err = outputs[0]
    assert "4 × cpu in 4 processes" in out
    assert "step 180 · validation loss" in out
    assert err == ""
    for other in (1, 2, 3):
        assert outputs[other] == ("", "")


@pytest.mark.tier("full")
def test_a_run_resumes_after_a_loss_and_a_signal_on_fewer_processes(together, empty_folder):
    """Two processes lose one, resume, are stopped, and end as a single one: bit for bit."""
    arguments = fresh(together / "text.txt", "run", *LONG)
    slow = ["--steps-per-call", 1]
    with Processes(2, 2, *arguments, *slow) as processes:
        processes.wait_for(lambda: Path("run/checkpoints/60").exists())
        processes.running[0].kill()
        begin = time.monotonic()
        out, err = processes.ends(9, but=[0])[1]
        assert time.monotonic() - begin < PEER_TIMEOUT + GRACE
    assert out == ""
    assert len(lines(err)) == 1, err
    line = lines(err)[0]
    assert line.startswith("jaxformer: ")
    assert "process" in line
    assert "died" in line
    assert f"step {saved()[-1]} is the last one saved" in line
    assert "train --resume --out run" in line

    resume = ["train", "--out", "run", "--resume"]
    top = max(losses("run"))
    with Processes(2, 2, *resume, *slow) as processes:
        processes.wait_for(lambda: max(losses("run")) > top)
        processes.running[1].send_signal(signal.SIGTERM)
        outputs = processes.ends(143)
    assert "stopped after step" in outputs[0][1]
    assert "everything is saved" in outputs[0][1]
    assert lines(outputs[0][1])[0].startswith("jaxformer: ")
    assert outputs[1] == ("", "")

    run(1, 4, *resume, "--steps-per-call", 7)
    same_everywhere("run", together)


@pytest.mark.tier("full")
def test_a_process_that_hangs_ends_the_others(together, empty_folder):
    arguments = fresh(together / "text.txt", "run", "--steps", 100_000, *DROPOUT)
    with Processes(2, 1, *arguments, "--steps-per-call", 1) as processes:
        processes.wait_for(lambda: Path("run/checkpoints/20").exists())
        processes.running[1].send_signal(signal.SIGSTOP)
        begin = time.monotonic()
        _, err = processes.ends(9, but=[1])[0]
        assert time.monotonic() - begin < PEER_TIMEOUT + GRACE
    assert len(lines(err)) == 1, err
    line = lines(err)[0]
    assert f"process 1 has not answered for {PEER_TIMEOUT} s" in line
    assert f"step {saved()[-1]} is the last one saved" in line


@pytest.mark.tier("slow")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
@pytest.mark.parametrize("victim", [0, 2])
def test_whoever_is_lost_of_four_ends_the_rest(together, empty_folder, victim, number):
    arguments = fresh(together / "text.txt", "run", "--steps", 100_000, *DROPOUT)
    with Processes(4, 1, *arguments) as processes:
        processes.wait_for(lambda: Path("run/checkpoints/20").exists())
        processes.running[victim].send_signal(number)
        outputs = processes.ends(9, but=[victim])
    for _, err in outputs.values():
        assert len(lines(err)) == 1, err
        assert f"step {saved()[-1]} is the last one saved" in err
    assert run(1, 1, "train", "--out", "run", "--resume", "--steps", saved()[-1] + 1)


@pytest.mark.tier("slow")
@pytest.mark.parametrize(
    "flags", [[], ["--fsdp", 4], ["--fsdp", 2]], ids=["data", "fsdp4", "fsdp2"]
)
def test_a_mesh_with_a_coordinator_is_bit_exact(together, empty_folder, flags):
    shared = ["--strategy", "mesh", *flags, "--steps", 30, *DROPOUT]
    for count, devices in ((1, 4), (2, 2), (4, 1)):
        arguments = fresh(together / "text.txt", f"run{count}", *shared)
        run(count, devices, *arguments, coordinator=True)
    for count in (2, 4):
        same_run(f"run{count}", "run1")
        assert losses(f"run{count}", GRADIENT_NORM) == losses("run1", GRADIENT_NORM)


def test_an_error_is_reported_once_and_ends_all(together, empty_folder):
    shutil.copytree(together / "run", "run")
    outputs = run(2, 1, *fresh(together / "text.txt", "run"), codes=(2,))
    assert lines(outputs[0][1]) == [
        "jaxformer: run already holds a run: continue it with --resume, or give another --out"
    ]
    assert outputs[1] == ("", "")
    same_everywhere("run", together)


@pytest.mark.tier("full")
def test_other_texts_under_the_same_name_are_refused_with_both_hashes(empty_folder):
    folders = [empty_folder / "one", empty_folder / "two"]
    for folder, text in zip(folders, (TEXT, TEXT.replace("cat", "tac")), strict=True):
        folder.mkdir()
        (folder / "text.txt").write_text(text)
    arguments = fresh("text.txt", empty_folder / "run", "--steps", 3)
    outputs = run(2, 1, *arguments, codes=(3,), folders=folders)
    hashes = [hashlib.sha256((f / "text.txt").read_bytes()).hexdigest()[:16] for f in folders]
    words = (
        f"text.txt here is not that of process 0: SHA-256 {hashes[1]}…, not {hashes[0]}…: give all "
        "processes the same text"
    )
    assert lines(outputs[1][1]) == [f"jaxformer: {words}"]
    assert lines(outputs[0][1]) == [f"jaxformer: process 1: {words}"]
    assert not (empty_folder / "run").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--coordinator 127.0.0.1:1", "--num-processes and --process-id are missing"),
        ("--num-processes 2 --process-id 0", "--coordinator is missing"),
        ("--coordinator here --num-processes 2 --process-id 0", "must be HOST:PORT: got here"),
        ("--coordinator :1 --num-processes 2 --process-id 0", "must be HOST:PORT: got :1"),
        ("--coordinator a:99999 --num-processes 2 --process-id 0", "must be HOST:PORT"),
        ("--coordinator a:1 --num-processes 2 --process-id 2", "must be in [0, 2)"),
        ("--coordinator a:1 --num-processes 0 --process-id 0", "must be in [0, 0)"),
        ("--num-processes 0", "--num-processes must be positive: got 0"),
        ("--max-restarts -1", "--max-restarts must be in [0, 1000000]: got -1"),
        ("--distributed --max-restarts 1", "--max-restarts is for the processes of one machine"),
        ("--distributed --process-id 1", "leave out one or the others"),
        ("--distributed --peer-timeout 0", "--peer-timeout must be in [1, 86400] s: got 0"),
    ],
)
def test_flags_that_do_not_fit_are_refused(refuse, text, flags, words):
    refuse(["train", "--data", text, "--out", "run", *flags.split()], 2, words)


def test_a_coordinator_that_does_not_answer_is_refused(refuse, text):
    flags = "--coordinator 127.0.0.1:9 --num-processes 2 --process-id 1 --connect-timeout 1"
    words = "no coordinator answers at 127.0.0.1:9 after 1 s", "--connect-timeout"
    refuse(["train", "--data", text, "--out", "run", *flags.split()], 9, *words)


@pytest.mark.tier("full")
def test_processes_that_do_not_come_are_reported(text, empty_folder):
    with Processes(2, 1, *fresh(text, "run"), connect=2) as processes:
        processes.running[1].kill()
        _, err = processes.ends(9, but=[1])[0]
    assert "not all processes came within 2 s" in err
    assert not (empty_folder / "run").exists()


@pytest.mark.tier("full")
def test_an_interrupt_ends_a_process_that_waits_for_others(text, empty_folder):
    with Processes(2, 1, *fresh(text, "run")) as processes:
        processes.running[1].kill()
        first = processes.running[0]
        host, port = first.args[first.args.index("--coordinator") + 1].split(":")
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
                break
            time.sleep(0.05)
        time.sleep(1)
        first.send_signal(signal.SIGINT)
        _, err = processes.ends(130, but=[1], seconds=20)[0]
    assert lines(err) == ["jaxformer: stopped before the run began: its folder is as it was"]
    assert not (empty_folder / "run").exists()
