"""Whatever was done to a checkpoint, by chance or on purpose: one line, exit code 4."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxformer.checkpoints import CheckpointFolder, serialize_manifest, state_hash
from jaxformer.cli.main import main
from jaxformer.errors import CheckpointError
from tests.checkpoints.test_checkpoints import make_arrays, save
from tests.support.tiny import resume, steps

KERNEL = "parameters/blocks.0.attention.q_proj.kernel"


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
def test_every_flipped_bit_of_hundreds_is_detected(copy):
    paths = [path for path in (copy.folder / "7").rglob("*") if path.is_file()]
    flips = 0
    for path in paths:
        whole = path.read_bytes()
        stride = max(1, len(whole) // 60)
        for position in range(0, len(whole), stride):
            data = bytearray(whole)
            data[position] ^= 1 << (flips % 8)
            path.write_bytes(data)
            with pytest.raises(CheckpointError):
                copy.restore(7)
            flips += 1
        path.write_bytes(whole)
    copy.restore(7)
    assert flips > 400


@pytest.mark.tier("full")
def test_every_truncation_and_every_missing_file_is_detected(copy):
    for path in [path for path in (copy.folder / "7").rglob("*") if path.is_file()]:
        whole = path.read_bytes()
        for length in {0, 1, len(whole) // 2, len(whole) - 1} - {len(whole)}:
            path.write_bytes(whole[:length])
            with pytest.raises(CheckpointError) as error:
                copy.restore(7)
            assert "\n" not in str(error.value)
        path.unlink()
        with pytest.raises(CheckpointError):
            copy.restore(7)
        path.write_bytes(whole)
    copy.restore(7)


def test_what_is_too_many_is_detected_wherever_it_lies(copy):
    step = copy.folder / "7"
    names = ("stranger", "arrays/d/stranger", "arrays/.stranger.tmp", ".7.stranger.tmp")
    for place in (step / name for name in names):
        place.write_text("x")
        with pytest.raises(CheckpointError, match=r"unexpected .*stranger"):
            copy.restore(7)
        place.unlink()
        place.symlink_to("/dev/zero")
        with pytest.raises(CheckpointError, match=r"unexpected .*stranger"):
            copy.restore(7)
        place.unlink()
    copy.restore(7)


def test_a_link_in_place_of_a_file_is_no_file(copy, tmp_path):
    path = copy.folder / "7" / "arrays" / "_METADATA"
    shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="changed _METADATA"):
        copy.restore(7)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="changed _METADATA"):
        copy.restore(7)


def rewrite(folder, change, step=7):
    """A manifest that agrees with itself, and says something else."""
    path = folder / str(step) / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    changed = change(manifest)
    manifest = manifest if changed is None else changed
    if isinstance(manifest, dict) and isinstance(manifest.get("arrays"), dict):
        manifest["state_sha256"] = state_hash(manifest["arrays"])
    path.write_text(
        serialize_manifest(manifest) if isinstance(manifest, dict) else json.dumps(manifest)
    )


def setting(*names):
    """Sets what stands at ``names[:-1]`` to the last of them."""
    *path, name, value = names

    def change(manifest):
        place = manifest
        for key in path:
            place = place[key]
        place[name] = value

    return change


WRONG = [None, True, -1, 1.5, "text", [], [[]], {}, {"a": {}}]
HOSTILE = {
    **{
        f"{name}={value!r}": setting(name, value)
        for name in ("step", "versions", "arrays", "files", "val_loss", "vocabulary", "config")
        for value in WRONG
        if not (name == "versions" and isinstance(value, dict))
        and not (name == "files" and value == {})
        and not (name == "vocabulary" and isinstance(value, str | None))
        and not (name == "val_loss" and (value is None or value in (-1, 1.5)) and value is not True)
        and not (name == "config" and isinstance(value, dict))
    },
    **{f"array={value!r}": setting("arrays", KERNEL, value) for value in WRONG},
    **{
        f"{name}={value!r}": setting("arrays", KERNEL, name, value)
        for name in ("shape", "dtype", "sha256")
        for value in WRONG
        if not (name == "shape" and value == [])
    },
    "negative": setting("arrays", KERNEL, "shape", [-3, -5]),
    "a_bool": setting("arrays", KERNEL, "shape", [True, 15]),
    "huge": setting("arrays", KERNEL, "shape", [2**40, 2**22]),
    "huger": setting("arrays", KERNEL, "shape", [10**400]),
    "many": setting("arrays", KERNEL, "shape", [2**62] * 1000),
    "scalar": setting("arrays", KERNEL, "shape", []),
    "other": setting("arrays", KERNEL, "shape", [5, 3]),
    "objects": setting("arrays", KERNEL, "dtype", "object"),
    "wider": setting("arrays", KERNEL, "dtype", "float64"),
    "another_name": lambda m: m["arrays"].update({"parameters/new": m["arrays"][KERNEL]}),
    "another_group": lambda m: m["arrays"].update({"secret/new": m["arrays"][KERNEL]}),
    "no_step": lambda m: m["arrays"].pop("step") and None,
    "one_less": lambda m: m["arrays"].pop(KERNEL) and None,
    "no_files": setting("files", {}),
    "outside": setting("files", "../../../../etc/passwd", "0" * 64),
    "not_finite": setting("val_loss", float("nan")),
    "format": setting("format", 2),
    "format_1.0": setting("format", 1.0),
    "a_list": lambda m: [m],
    "a_number": lambda m: 7,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_manifest_that_says_what_cannot_be_is_refused(copy, name):
    rewrite(copy.folder, HOSTILE[name])
    with pytest.raises(CheckpointError) as error:
        copy.restore(7)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 2000
    assert copy.best_step() in (None, 7)
    with pytest.raises(CheckpointError):
        copy.restore_latest(quarantine=True)


@pytest.mark.parametrize(
    "text",
    ["", "{", "nul", "[" * 100_000, '{"a":' * 100_000, '{"format": 1' + "0" * 5000 + "}", "\udcff"],
    ids=["empty", "open", "word", "deep_list", "deep_table", "long_number", "no_text"],
)
def test_a_manifest_that_is_no_json_is_refused(copy, text):
    path = copy.folder / "7" / "MANIFEST.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError) as error:
        copy.restore(7)
    assert "\n" not in str(error.value)


def test_what_is_named_twice_is_refused(copy):
    path = copy.folder / "7" / "MANIFEST.json"
    text = path.read_text()
    path.write_text(text.replace('"step": 7,', '"step": 7,\n "step": 7,', 1))
    with pytest.raises(CheckpointError, match="not as it was written"):
        copy.restore(7)


def test_a_manifest_as_large_as_a_disk_is_not_read(copy):
    with (copy.folder / "7" / "MANIFEST.json").open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match="larger than any manifest"):
        copy.restore(7)


def test_arrays_larger_than_the_memory_are_not_allocated(copy):
    """The folder, its files and its manifest agree: no number of it need be stored."""
    arrays = {"parameters": {"w": np.zeros((4, 4), np.float32)}, "step": np.int32(8)}
    save(copy, 8, arrays)
    rewrite(copy.folder, setting("arrays", "parameters/w", "shape", [2**24, 2**24]), 8)
    with pytest.raises(CheckpointError, match="does not hold what its manifest says"):
        copy.restore(8)


@pytest.fixture
def run(whole):
    shutil.copytree(whole, "run")
    return Path("run")


def test_by_number_damage_is_refused_with_code_4(run, refuse):
    rewrite(run / "checkpoints", setting("arrays", "step", "shape", "x"), 30)
    refuse(["sample", "run", "--step", 30], 4, "30/MANIFEST.json", "no shape, dtype and SHA-256")
    (run / "checkpoints" / "20" / "arrays" / "_METADATA").write_text("{}")
    refuse(["sample", "run", "--step", 20], 4, "20 is damaged", "changed _METADATA")
    refuse(["sample", "run", "--step", 25], 4, "has no step 25", "10, 20, 30")


HOSTILE_SETTINGS = {
    "none": setting("config", {}),
    "a_word": setting("config", "model", "large"),
    "absurd": setting("config", "model", "d_model", 10**30),
    "unknown": setting("config", "colour", "red"),
    "a_list": setting("config", "seed", [1]),
    "no_corpus": setting("corpus", {}),
    "no_vocabulary": setting("vocabulary", ""),
}


@pytest.mark.parametrize("name", HOSTILE_SETTINGS)
def test_settings_that_are_none_are_refused_in_one_line(run, capsys, name):
    for step in (10, 20, 30):
        rewrite(run / "checkpoints", HOSTILE_SETTINGS[name], step)
    assert main(["train", "--resume", "--out", "run", "--steps", "31"]) in (2, 4)
    err = capsys.readouterr().err
    assert err.count("\n") == 1, err
    assert "bug" not in err
    assert steps("run") == [10, 20, 30], "what does not fit is not damaged"


def test_with_resume_hostile_steps_are_put_aside_and_told(run, capsys):
    rewrite(run / "checkpoints", setting("files", {}), 30)
    rewrite(run / "checkpoints", setting("arrays", "step", "dtype", "object"), 20)
    assert resume("run", "--steps", 11) == 0
    out = capsys.readouterr().out
    assert "resuming from step 10" in out
    for step in (20, 30):
        assert f"checkpoints/quarantine/{step}" in out
    assert sorted(p.name for p in (run / "checkpoints" / "quarantine").iterdir()) == ["20", "30"]


def test_nothing_that_is_named_like_a_step_is_followed(run, refuse):
    elsewhere = Path("elsewhere")
    shutil.move(run / "checkpoints" / "30", elsewhere)
    (run / "checkpoints" / "30").symlink_to(elsewhere.absolute())
    refuse(["sample", "run", "--step", 30], 4, "has no step 30")
