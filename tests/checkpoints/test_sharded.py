"""States in parts: one manifest however they are cut, and restored to any cut by any processes."""

import os
import shutil
import socket
import subprocess
import sys

import pytest

from jaxformer.checkpoints import CheckpointFolder, describe
from jaxformer.errors import CheckpointError
from tests.support.sharded_state import ABOUT, place, same, shardings, values
from tests.support.tiny import ROOT

LAYOUTS = [(8, 1), (4, 2), (2, 4), (1, 1)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The same state as numpy arrays and in several layouts, a folder each."""
    folders = {}
    for layout in [None, *LAYOUTS]:
        folders[layout] = CheckpointFolder(tmp_path_factory.mktemp("saved") / "checkpoints")
        arrays = values(3) if layout is None else place(values(3), layout)
        folders[layout].save(3, arrays, ABOUT)
        folders[layout].wait()
    return folders


def test_the_manifest_does_not_know_how_the_state_was_cut(saved):
    found = [folder.manifest(3) for folder in saved.values()]
    assert all(manifest["arrays"] == describe(values(3)) for manifest in found)
    assert len({manifest["state_sha256"] for manifest in found}) == 1


@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (2, 2), (1, 4), (8, 1), (4, 2)])
def test_it_is_restored_to_other_cuts_bit_for_bit(saved, layout):
    for folder in saved.values():
        arrays, _ = folder.restore(3, shardings(*layout))
        assert same(arrays, 3, layout)
        assert describe(folder.restore(3)[0]) == describe(values(3))


def test_damage_is_found_on_the_way_to_devices_too(saved, tmp_path):
    shutil.copytree(saved[(4, 2)].folder, tmp_path / "copy")
    folder = CheckpointFolder(tmp_path / "copy")
    for path in (p for p in (folder.folder / "3").rglob("*") if p.is_file()):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        whole = path.read_bytes()
        path.write_bytes(data)
        with pytest.raises(CheckpointError):
            folder.restore(3, shardings(8, 1))
        path.write_bytes(whole)
    assert same(folder.restore(3, shardings(8, 1))[0], 3, (8, 1))


def together(count, folder, *actions):
    """Returns what each of several processes prints of each action, all doing the same."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    arguments = [sys.executable, "-m", "tests.support.sharded_state", str(port)]
    started = [
        subprocess.Popen(
            [*arguments, str(index), str(count), str(folder), *actions],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for index in range(count)
    ]
    ended = [(process.communicate(timeout=300), process.returncode) for process in started]
    assert [code for _, code in ended] == [0] * count, ended
    return [
        [line.removeprefix("result ") for line in out.splitlines() if line.startswith("result ")]
        for (out, _), _ in ended
    ]


@pytest.mark.tier("full")
def test_two_processes_save_and_restore_together(saved, tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    shutil.copytree(saved[None].folder / "3", folder.folder / "9")
    actions = "save:3:8x1 restore:3:4x2 save:3:2x4 restore-numpy:3:1x1 save:5:4x2 save-numpy:6:1x1"
    outputs = together(2, folder.folder, *actions.split(), "restore:6:8x1")
    for lines in outputs:
        assert "9/MANIFEST.json is no manifest of this step: it is that of step 3" in lines[1]
        assert lines[0:1] + lines[2:] == ["fine"] * 6
    assert folder.steps() == [3, 5, 6]
    assert folder.manifest(3)["state_sha256"] == saved[None].manifest(3)["state_sha256"]
    assert os.listdir(folder.folder / "quarantine") == ["9"], "the same state was saved once"
    for layout in ((1, 1), (2, 1), (4, 1), (4, 2)):
        assert same(folder.restore(5, shardings(*layout))[0], 5, layout)


@pytest.mark.tier("slow")
def test_four_processes_save_and_two_restore(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    assert together(4, folder.folder, "save:5:2x4", "save:6:8x1") == [["fine"] * 2] * 4
    assert folder.manifest(5)["arrays"] == describe(values(5))
    assert same(folder.restore(5, shardings(1, 1))[0], 5, (1, 1))
    path = max((folder.folder / "6").rglob("d/*"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    outputs = together(2, folder.folder, "restore:5:8x1", "restore-numpy:5:1x1")
    for first, second in outputs:
        assert "6 is damaged: 1 files differ from its manifest" in first
        assert first.endswith("fine")
        assert second == "fine"
    assert folder.steps() == [5]


@pytest.mark.tier("full")
def test_a_disk_that_is_full_for_one_process_is_full_for_all(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints")
    folder.save(3, values(3), ABOUT)
    folder.wait()
    for (line,) in together(2, folder.folder, "fail:4:8x1"):
        assert line.startswith("ResourceError: could not save")
        assert "No space left on device" in line
        assert "step 3 is the last one saved" in line
    assert [path.name for path in folder.folder.iterdir()] == ["3"]
