"""What is saved comes back bit for bit, and whatever happened to it on the disk is noticed."""

import gc
import itertools
import json
import os
import shutil
import statistics
import sys
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.checkpoints import CheckpointFolder, describe, orbax_arrays, state_hash
from jaxformer.checkpoints import folder as folder_module
from jaxformer.errors import CheckpointError
from tests.support.tiny import snapshot

ABOUT = {"config": {"seed": 1}, "vocabulary": "\n ab", "corpus": {"name": "x"}, "val_loss": None}


def make_arrays(seed=0):
    random = np.random.default_rng(seed)

    def group():
        return {
            "blocks.0.attention.q_proj.kernel": random.standard_normal((3, 5)).astype(np.float32),
            "final_norm.scale": random.standard_normal(7).astype(np.float32),
            "head": np.asarray(jnp.asarray(random.standard_normal((2, 11)), jnp.bfloat16)),
            "temperature": np.float32(random.standard_normal()),
            "wide": np.asarray([np.pi, -0.0, 5e-324, np.inf]),
        }

    return {"parameters": group(), "mu": group(), "nu": group(), "step": np.int32(seed)}


def save(folder, step, arrays, about=ABOUT, **more):
    folder.save(step, arrays, about, **more)
    return folder.wait()


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(tmp_path / "checkpoints")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with one checkpoint, only to be copied."""
    folder = CheckpointFolder(tmp_path_factory.mktemp("saved") / "checkpoints")
    save(folder, 7, make_arrays(7))
    return folder.folder


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    return CheckpointFolder(tmp_path / "copy")


@pytest.mark.tier("full")
def test_saves_leave_nothing_in_memory(folder):
    """Without checkpoints/leak.py, TensorStore would keep four strings for each array."""
    layers = {f"layer{i}": np.zeros(2, np.float32) for i in range(200)}
    arrays = {"parameters": layers, "mu": {}, "nu": {}, "step": np.int32(0)}
    blocks = []
    for step in range(12):
        save(folder, step, arrays, keep=2)
        gc.collect()
        blocks.append(sys.getallocatedblocks())
    each = statistics.median(after - before for before, after in itertools.pairwise(blocks[5:]))
    assert each < len(layers)


def test_arrays_come_back_bit_for_bit(folder):
    arrays = make_arrays(3)
    save(folder, 3, arrays)
    restored, _ = folder.restore(3)
    assert set(restored) == {"parameters", "mu", "nu", "step"}
    assert restored["step"] == 3
    for group in ("parameters", "mu", "nu"):
        assert set(restored[group]) == set(arrays[group])
        for name, array in arrays[group].items():
            found = np.asarray(restored[group][name])
            assert found.dtype == array.dtype, name
            assert found.shape == array.shape, name
            assert found.tobytes() == np.asarray(array).tobytes(), name
    assert restored["parameters"]["head"].dtype == jnp.bfloat16
    assert np.shape(restored["parameters"]["temperature"]) == ()


def test_the_manifest_says_what_the_checkpoint_must_be(copy):
    manifest = json.loads((copy.folder / "7" / "MANIFEST.json").read_text())
    assert manifest["step"] == 7
    assert {name: manifest[name] for name in ABOUT} == ABOUT
    assert {"python", "jax", "flax", "optax", "orbax-checkpoint"} <= manifest["versions"].keys()
    arrays = make_arrays(7)
    assert len(manifest["arrays"]) == 16
    head = manifest["arrays"]["parameters/head"]
    assert (head["shape"], head["dtype"]) == ([2, 11], "bfloat16")
    assert manifest["arrays"] == describe(arrays)
    assert manifest["state_sha256"] == state_hash(describe(arrays))
    files = {p.relative_to(copy.folder / "7" / "arrays").as_posix() for p in arrays_files(copy)}
    assert set(manifest["files"]) == files


def arrays_files(folder):
    return [path for path in (folder.folder / "7" / "arrays").rglob("*") if path.is_file()]


def test_the_state_hash_changes_with_every_bit_name_shape_and_dtype():
    arrays = make_arrays()
    seen = {state_hash(describe(arrays))}

    def change(group, name, value):
        changed = {**arrays, group: {**arrays[group], name: value}}
        seen.add(state_hash(describe(changed)))

    kernel = arrays["mu"]["blocks.0.attention.q_proj.kernel"]
    flipped = kernel.copy()
    flipped.view(np.uint32)[2, 4] ^= 1
    change("mu", "blocks.0.attention.q_proj.kernel", flipped)
    change("mu", "blocks.0.attention.q_proj.kernel", kernel.reshape(5, 3))
    change("mu", "blocks.0.attention.q_proj.kernel", kernel.view(np.int32))
    change("mu", "another", kernel)
    change("nu", "blocks.0.attention.q_proj.kernel", kernel)
    seen.add(state_hash(describe({**arrays, "step": np.int32(1)})))
    assert len(seen) == 7


def test_a_flipped_bit_anywhere_in_any_file_is_detected(copy):
    paths = [path for path in (copy.folder / "7").rglob("*") if path.is_file()]
    assert len(paths) >= 6
    copy.restore(7)
    copy.verify(7)
    for path in paths:
        data = path.read_bytes()
        size = len(data)
        for number, position in enumerate({0, 1, size // 3, size // 2, size - 2, size - 1}):
            if not 0 <= position < size:
                continue
            broken = bytearray(data)
            broken[position] ^= 1 << (number + position) % 8
            path.write_bytes(broken)
            with pytest.raises(CheckpointError) as found:
                copy.restore(7)
            with pytest.raises(CheckpointError) as same:
                copy.verify(7)
            assert str(same.value) == str(found.value)
        path.write_bytes(data)
    copy.restore(7)


def test_a_save_makes_no_copy_of_the_state(tmp_path):
    state = np.ones(16 << 20, np.float32)
    tracemalloc.start()
    try:
        orbax_arrays.write(tmp_path / "arrays", {"parameters": {"x": state}, "step": np.array(1)})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < state.nbytes / 2


def test_arrays_lie_on_the_disk_as_they_are(folder):
    ones = np.ones(1 << 20, np.float32)
    save(folder, 7, {"parameters": {"x": ones}, "step": np.int32(7)})
    files = (path for path in folder.folder.rglob("*") if path.is_file())
    assert sum(path.stat().st_size for path in files) > ones.nbytes


def test_no_byte_of_the_manifest_may_change(copy):
    path = copy.folder / "7" / "MANIFEST.json"
    data = path.read_bytes()
    for position in range(0, len(data), 7):
        broken = bytearray(data)
        broken[position] ^= 1 << position % 8
        path.write_bytes(broken)
        with pytest.raises(CheckpointError):
            copy.manifest(7)


@pytest.mark.parametrize("change", ["truncated", "emptied", "missing", "unexpected"])
def test_a_file_cut_short_missing_or_too_many_is_named(copy, change):
    path = max(arrays_files(copy), key=lambda path: path.stat().st_size)
    if change == "missing":
        path.unlink()
    elif change == "unexpected":
        path = path.with_name("stranger")
        path.write_bytes(b"x")
    else:
        path.write_bytes(path.read_bytes()[: -1 if change == "truncated" else 0])
    with pytest.raises(CheckpointError, match="1 files differ from its manifest") as error:
        copy.restore(7)
    assert path.name in str(error.value)
    assert "\n" not in str(error.value)


def test_stray_folders_are_no_checkpoints(copy, tmp_path):
    shutil.copytree(copy.folder / "7", tmp_path / "elsewhere" / "12")
    for name in ("9", "09", "x", "-3", "٣", "1.0", "1e3"):
        (copy.folder / name).mkdir()
    for name in ("007", "+8"):
        shutil.copytree(copy.folder / "7", copy.folder / name)
    (copy.folder / "11").write_text("a file")
    (copy.folder / "12").symlink_to(tmp_path / "elsewhere" / "12")
    (copy.folder / "13").symlink_to(tmp_path / "nowhere")
    assert copy.steps() == [7]
    assert copy.restore_latest(quarantine=True)[1]["step"] == 7
    warnings = copy.tidy()
    assert len(warnings) == 12
    assert all(warning.endswith("ignored") for warning in warnings)
    assert sum("is a link, not a checkpoint" in warning for warning in warnings) == 2
    assert (tmp_path / "elsewhere" / "12" / "MANIFEST.json").exists()


def test_a_step_under_another_number_is_no_checkpoint_of_it(copy):
    (copy.folder / "7").rename(copy.folder / "9")
    with pytest.raises(CheckpointError, match="it is that of step 7"):
        copy.restore(9)


def test_steps_are_in_order_of_number(folder):
    for step in (9, 10, 100, 1):
        save(folder, step, make_arrays(step))
    assert folder.steps() == [1, 9, 10, 100]
    assert folder.restore_latest(quarantine=True)[0]["step"] == 100


def test_the_last_few_and_the_best_are_kept(folder):
    for step, loss in enumerate((3.0, 1.5, 2.0, None, 2.5, 1.75)):
        save(folder, step, make_arrays(step), {**ABOUT, "val_loss": loss})
        folder.prune(2)
    assert folder.best_step() == 1
    assert folder.steps() == [1, 4, 5]


def test_there_is_no_best_where_nothing_was_evaluated(copy):
    assert copy.best_step() is None
    copy.prune(1)
    assert copy.steps() == [7]


def test_a_damaged_manifest_does_not_stop_a_run_that_saves(folder):
    for step in (1, 2):
        save(folder, step, make_arrays(step), {**ABOUT, "val_loss": 1.0})
    (folder.folder / "1" / "MANIFEST.json").write_text("{}")
    assert folder.best_step() == 2
    folder.prune(3)
    assert folder.steps() == [1, 2]


def test_damaged_steps_are_put_aside_and_the_newest_sound_one_used(folder):
    for step in (1, 2, 3):
        save(folder, step, make_arrays(step))
    (folder.folder / "3" / "MANIFEST.json").write_text("")
    (folder.folder / "2" / "arrays" / "_METADATA").unlink()
    assert folder.restore_latest(quarantine=False)[0]["step"] == 1
    assert folder.steps() == [1, 2, 3]
    arrays, manifest, warnings = folder.restore_latest(quarantine=True)
    assert (arrays["step"], manifest["step"]) == (1, 1)
    for step, warning in zip((3, 2), warnings, strict=True):
        assert warning.startswith(str(folder.folder / str(step)))
    assert all("moved to" in warning for warning in warnings)
    assert folder.steps() == [1]
    assert sorted(p.name for p in (folder.folder / "quarantine").iterdir()) == ["2", "3"]
    assert folder.tidy() == []


def test_a_run_may_replace_its_checkpoints_while_one_is_read(folder, monkeypatch):
    save(folder, 1, make_arrays(1))
    read, searched = folder_module.restore_newest, []

    def read_late(path, steps, **settings):
        searched.append(steps)
        if len(searched) == 1:
            save(folder, 2, make_arrays(2))
            shutil.rmtree(path / "1")
        return read(path, steps, **settings)

    monkeypatch.setattr(folder_module, "restore_newest", read_late)
    assert folder.choose()[1]["step"] == 2
    assert searched == [[1], [2]]
    (folder.folder / "2" / "MANIFEST.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not a checkpoint manifest"):
        folder.choose()


def test_with_nothing_sound_left_all_damage_is_told(copy):
    (copy.folder / "7" / "MANIFEST.json").write_text("[]")
    before = snapshot(copy.folder)
    with pytest.raises(CheckpointError, match="not a checkpoint manifest of format 1"):
        copy.restore_latest(quarantine=True)
    assert snapshot(copy.folder) == before, "a search that fails changes nothing"
    shutil.rmtree(copy.folder / "7")
    with pytest.raises(CheckpointError, match="there is no checkpoint in"):
        copy.restore_latest(quarantine=True)


def test_the_same_state_saved_again_changes_the_manifest_alone(copy):
    files = {path: path.stat().st_mtime_ns for path in arrays_files(copy)}
    save(copy, 7, make_arrays(7), {**ABOUT, "val_loss": 1.25})
    assert {path: path.stat().st_mtime_ns for path in arrays_files(copy)} == files
    assert copy.restore(7)[1]["val_loss"] == 1.25


def test_another_state_of_the_same_step_puts_the_old_one_aside(copy):
    save(copy, 7, make_arrays(8))
    assert copy.restore(7)[0]["step"] == 8
    assert (copy.folder / "quarantine" / "7" / "MANIFEST.json").is_file()


def test_a_place_in_quarantine_is_never_taken_twice(folder):
    for seed in (1, 2, 3):
        save(folder, 7, make_arrays(seed))
    save(folder, 6, make_arrays(6))
    (folder.folder / "7" / "MANIFEST.json").write_text("{}")
    _, manifest, (warning,) = folder.restore_latest(quarantine=True)
    assert manifest["step"] == 6
    assert "quarantine/7.3" in warning
    places = sorted((folder.folder / "quarantine").iterdir())
    assert [place.name for place in places] == ["7", "7.2", "7.3"]
    assert all((place / "arrays").is_dir() for place in places)


def test_a_save_cut_short_is_no_checkpoint_and_is_cleared_away(copy):
    (copy.folder / ".8.4242.tmp").mkdir()
    (copy.folder / ".8.4242.tmp" / "half").write_text("x")
    (copy.folder / ".3.removed.tmp").mkdir()
    assert copy.steps() == [7]
    assert copy.others() == []
    assert copy.tidy() == [f"the save to {copy.folder / '.8.4242.tmp'} was cut short: removed"]
    assert [path.name for path in copy.folder.iterdir()] == ["7"]


def test_nothing_depends_on_the_clock(folder, monkeypatch):
    for step, now in ((1, 2e9), (2, 1e9), (3, 0.0)):
        monkeypatch.setattr("time.time", lambda now=now: now)
        save(folder, step, make_arrays(step), keep=2)
        os.utime(folder.folder / str(step), (now, now))
    assert folder.steps() == [2, 3]
    assert folder.restore_latest(quarantine=True)[1]["step"] == 3
