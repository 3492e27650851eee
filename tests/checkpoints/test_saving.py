"""A save runs beside the training, and ends on the disk or in one line that says why not."""

import contextlib
import errno
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.checkpoints import CheckpointFolder, describe, orbax_arrays
from jaxformer.errors import ResourceError
from jaxformer.storage import durable_files as files
from jaxformer.training.logging.metrics import MetricsFile
from tests.checkpoints.test_checkpoints import ABOUT, make_arrays, save
from tests.support.tiny import resume, snapshot, steps, train

full = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def folder(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    save(folder, 7, make_arrays(7))
    return folder


@pytest.fixture
def held(monkeypatch):
    """Writing waits until the event is set."""
    go_on = threading.Event()
    write = orbax_arrays.write

    def held_write(*arguments):
        assert go_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(orbax_arrays, "write", held_write)
    yield go_on
    go_on.set()


SAVE_UNDER_A_LIMIT = """
import resource, sys
# Python renames bytecode into place without a look at how much of it was written.
sys.dont_write_bytecode = True
import numpy as np
from jaxformer.checkpoints import CheckpointFolder
from jaxformer.errors import ResourceError
random = np.random.default_rng(0)
group = {f"array.{n}": random.random(9_000) for n in range(30)}
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
folder = CheckpointFolder(sys.argv[1])
try:
    folder.save(1, {"parameters": group, "step": np.int32(1)}, {"config": {}, "val_loss": None})
    folder.wait()
except ResourceError as error:
    print(error)
"""


def test_a_save_of_many_arrays_that_fails_says_so_once(tmp_path):
    command = [sys.executable, "-c", SAVE_UNDER_A_LIMIT, tmp_path / "checkpoints"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"could not save .*1: File too large: raise the limit .*\n", ended.stdout)
    assert ended.stderr == ""


def test_training_goes_on_while_a_save_is_written(folder, held):
    folder.save(8, make_arrays(8), ABOUT, keep=1)
    assert folder.steps() == [7], "nothing is removed, and nothing counts, before it is written"
    held.set()
    assert folder.wait()["step"] == 8
    assert folder.steps() == [8]
    assert folder.wait() is None
    assert folder.restore(8)[0]["step"] == 8


def test_what_is_saved_is_the_state_at_the_call(folder, held):
    """The arrays are donated to the next step, which writes over them."""
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    state = {
        "parameters": {"w": jnp.arange(100_000, dtype=jnp.float32)},
        "mu": {"w": jnp.ones((300, 70))},
        "nu": {"w": jnp.zeros(5, jnp.bfloat16)},
        "step": jnp.int32(8),
    }
    before = describe(jax.tree.map(np.array, state))
    folder.save(8, state, ABOUT)
    for _ in range(3):
        state = step(state)
    jax.block_until_ready(state)
    held.set()
    assert folder.wait()["arrays"] == before
    assert describe(folder.restore(8)[0]) == before


def test_one_save_at_a_time(folder, held):
    folder.save(8, make_arrays(8), ABOUT)
    second = threading.Thread(target=lambda: folder.save(9, make_arrays(9), ABOUT))
    second.start()
    second.join(0.2)
    assert second.is_alive()
    held.set()
    second.join(60)
    assert folder.wait()["step"] == 9
    assert folder.steps() == [7, 8, 9]


@pytest.mark.parametrize("surfaces", ["wait", "save"])
def test_an_error_beside_the_training_is_reported(folder, monkeypatch, surfaces):
    def fail(*_):
        raise full

    monkeypatch.setattr(files, "atomic_write_text", fail)
    folder.save(8, make_arrays(8), ABOUT)
    with pytest.raises(ResourceError) as error:
        folder.wait() if surfaces == "wait" else save(folder, 9, make_arrays(9))
    words = r"8: No space left on device \(it needs .* free there\): free some; step 7 is the last"
    assert re.search(words, str(error.value))
    assert [path.name for path in folder.folder.iterdir()] == ["7"]
    folder.restore(7)
    monkeypatch.undo()
    save(folder, 9, make_arrays(9))
    assert folder.steps() == [7, 9]


def test_need_and_free_space_are_reported_before_anything_is_written(folder, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 2_500_000}))
    before = snapshot(folder.folder)
    large = {"parameters": {"w": np.ones(1_000_000, np.float32)}, "step": np.int32(8)}
    with pytest.raises(ResourceError, match=r"needs 3\.9 MiB, and 2\.4 MiB are free") as error:
        folder.save(8, large, ABOUT)
    assert "step 7 is the last one saved" in str(error.value)
    assert snapshot(folder.folder) == before


@pytest.fixture
def small_disk(tmp_path):
    """A disk of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_fills_in_the_middle(small_disk, monkeypatch):
    folder = CheckpointFolder(small_disk / "checkpoints")
    save(folder, 7, make_arrays(7))
    before = snapshot(small_disk)
    random = np.random.default_rng(0).standard_normal(400_000).astype(np.float32)
    large = {"parameters": {"w": random}, "step": np.int32(8)}
    with pytest.raises(ResourceError, match=r"needs 1\.6 MiB, and \d\.\d MiB are free"):
        folder.save(8, large, ABOUT)
    monkeypatch.setattr(files, "check_space", lambda *_: None)
    with pytest.raises(ResourceError, match=r"No space left on device \(.*\): free some; step 7"):
        save(folder, 8, large)
    assert {path: facts[1] for path, facts in snapshot(small_disk).items()} == {
        path: facts[1] for path, facts in before.items()
    }
    folder.restore(7)


@pytest.mark.tier("full")
def test_a_run_whose_disk_is_full_ends_and_resumes_later(small_disk, text, capsys, monkeypatch):
    run = small_disk / "run"
    assert train(text, run, "--steps", 10) == 0
    filler = small_disk / "filler"
    free = shutil.disk_usage(small_disk).free
    filler.write_bytes(bytes(free - 60_000))
    monkeypatch.setattr(files, "check_space", lambda *_: None)
    # pytest would format what Orbax's threads log or leave unraised, with a traceback each. While
    # one does, Python 3.11 cannot parse code in another thread, as the command line does:
    # "SystemError: AST constructor recursion depth mismatch".
    for name in ("absl", "asyncio"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    monkeypatch.setattr(sys, "unraisablehook", lambda *_: None)
    capsys.readouterr()
    assert resume(run, "--steps", 30, "--decay-steps", 10) == 7
    err = capsys.readouterr().err
    # Whichever of the two comes first: the save runs beside the training.
    assert "could not save" in err or "metrics.jsonl: No space left" in err
    assert "step 10 is the last one saved" in err
    assert err.count("\n") == 1
    assert steps(run) == [10]
    filler.unlink()
    assert resume(run, "--steps", 30, "--decay-steps", 10) == 0
    assert steps(run) == [10, 20, 30]


def test_metrics_that_cannot_be_written_wait_for_the_save_under_way(
    held, text, capsys, monkeypatch
):
    write = MetricsFile.write

    def fail(file, record):
        if record["step"] > 10:
            threading.Timer(0.2, held.set).start()
            raise ResourceError("could not write metrics.jsonl: Input/output error")
        write(file, record)

    monkeypatch.setattr(MetricsFile, "write", fail)
    assert train(text, "run", "--steps", 20) == 7
    assert "Input/output error; step 10 is the last one saved" in capsys.readouterr().err
    assert steps("run") == [10]


def test_a_failed_save_leaves_nothing_though_it_is_still_written(folder, monkeypatch):
    """TensorStore's threads go on for a moment, and make folders anew."""
    writing = threading.Event()

    def write(arrays_folder, arrays):
        def go_on():
            for number in range(60):
                with contextlib.suppress(OSError):
                    arrays_folder.mkdir(parents=True, exist_ok=True)
                    (arrays_folder / str(number)).touch()
                writing.set()
                time.sleep(0.005)

        threads.append(threading.Thread(target=go_on))
        threads[-1].start()
        writing.wait()
        raise full

    threads: list[threading.Thread] = []
    monkeypatch.setattr(orbax_arrays, "write", write)
    with pytest.raises(ResourceError, match="could not save"):
        save(folder, 8, make_arrays(8))
    threads[-1].join()
    assert [path.name for path in folder.folder.iterdir()] == ["7"]


def test_a_folder_that_may_not_be_written(folder):
    os.chmod(folder.folder, 0o555)
    try:
        if os.access(folder.folder, os.W_OK):
            pytest.skip("root may write everywhere")
        with pytest.raises(ResourceError, match="Permission denied: make it writable; step 7"):
            save(folder, 8, make_arrays(8))
    finally:
        os.chmod(folder.folder, 0o755)


def test_a_denied_permission_is_reported(folder, monkeypatch):
    def denied(*_):
        raise PermissionError(errno.EACCES, "Permission denied", "arrays")

    monkeypatch.setattr(orbax_arrays, "write", denied)
    with pytest.raises(ResourceError, match="Permission denied: make it writable; step 7"):
        save(folder, 8, make_arrays(8))
    assert [path.name for path in folder.folder.iterdir()] == ["7"]


def test_a_folder_that_vanishes(folder, held):
    folder.save(8, make_arrays(8), ABOUT)
    shutil.rmtree(folder.folder)
    held.set()
    folder.wait()
    save(folder, 9, make_arrays(9))
    assert sorted(path.name for path in folder.folder.iterdir()) == ["8", "9"]
    folder.restore(8)
    shutil.rmtree(folder.folder)
    assert folder.steps() == []


def test_the_last_step_is_on_the_disk_before_done_is_said(text, held, capsys, monkeypatch):
    timer = threading.Timer(1, held.set)
    timer.start()
    seen = []
    finish = "jaxformer.training.logging.run_log.plot_losses"
    monkeypatch.setattr(finish, lambda *_: seen.append(steps("run")) or True)
    assert train(text, "run", "--steps", 5) == 0
    assert seen == [[5]]
    timer.join()


def test_a_manifest_that_could_not_be_read_is_never_a_step(folder):
    with pytest.raises(
        ResourceError, match=r"could not save .*8: .*val_loss is not a number; step 7"
    ):
        save(folder, 8, make_arrays(8), {**ABOUT, "val_loss": "low"})
    assert [path.name for path in folder.folder.iterdir()] == ["7"]


def test_a_file_that_cannot_be_read_back_ends_the_save(folder, monkeypatch):
    def unreadable(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(files, "sha256_of_file", unreadable)
    with pytest.raises(ResourceError, match=r"could not save .*8: Input/output error; step 7"):
        save(folder, 8, make_arrays(8))
    assert [path.name for path in folder.folder.iterdir()] == ["7"]
