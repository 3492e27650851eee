"""Other dtypes than those that training keeps: refused with a list, or changed on purpose."""

import re
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxformer.checkpoints import CheckpointFolder
from jaxformer.cli.main import main
from tests.support.tiers import full_after
from tests.support.tiny import resume, snapshot, steps, train_arguments

TABLE, NORM = "token_embedding.embedding", "blocks.0.attention_norm.scale"


@pytest.fixture
def rewrite(whole):
    """Makes ``run``, whose only step holds other arrays."""

    def make(change):
        shutil.copytree(whole, "run")
        folder = CheckpointFolder(Path("run/checkpoints"))
        arrays, manifest = folder.restore(30)
        shutil.rmtree(folder.folder)
        for group in ("parameters", "mu", "nu"):
            arrays[group] = change(group, arrays[group])
        about = {n: manifest[n] for n in ("config", "vocabulary", "corpus", "val_loss")}
        folder.save(30, arrays, about)
        folder.wait()
        return arrays

    return make


def all_to(dtype, *groups):
    return lambda group, named: {
        name: array.astype(dtype) if group in groups else array for name, array in named.items()
    }


@pytest.mark.tier("full")
def test_all_that_has_another_dtype_is_listed(rewrite, capsys):
    arrays = rewrite(all_to(ml_dtypes.bfloat16, "mu", "nu"))
    before = snapshot("run/checkpoints")
    assert resume("run", "--steps", 31) == 4
    err = capsys.readouterr().err
    for group in ("mu", "nu"):
        for name, array in arrays[group].items():
            assert f"{group}/{name} is bfloat16 {array.shape}, not float32 {array.shape}" in err
    assert "parameters/" not in err
    assert err.endswith("; --cast changes dtypes on purpose\n")
    assert snapshot("run/checkpoints") == before


@pytest.mark.parametrize("dtype", full_after(1, [ml_dtypes.bfloat16, np.float64]))
def test_they_are_cast_on_purpose_and_the_rounding_is_told(rewrite, capsys, dtype):
    noise = np.float64(1 / 3) if dtype == np.float64 else np.float64(0)
    arrays = rewrite(
        lambda _, named: {name: (array + noise).astype(dtype) for name, array in named.items()}
    )
    assert resume("run", "--steps", 31, "--cast") == 0
    out = capsys.readouterr().out
    message = re.search(
        r"cast (\d+) arrays from (\w+) to float32: largest rounding error (\S+)", out
    )
    count = sum(len(arrays[group]) for group in ("parameters", "mu", "nu"))
    assert message.group(1, 2) == (str(count), np.dtype(dtype).name)
    exact = [a.astype(np.float64) for g in ("parameters", "mu", "nu") for a in arrays[g].values()]
    error = max(float(np.abs(a - a.astype(np.float32)).max()) for a in exact)
    assert message.group(3) == f"{error:.3g}"
    assert (error > 0) == (dtype == np.float64)
    assert steps("run") == [30, 31]


@pytest.mark.parametrize("flags", [(), ("--cast",)])
def test_whole_numbers_are_never_taken_for_floats(rewrite, capsys, flags):
    rewrite(lambda _, named: {**named, TABLE: named[TABLE].astype(np.int32)})
    assert resume("run", "--steps", 31, *flags) == 4
    err = capsys.readouterr().err
    assert err.count(" is int32 ") == 3
    assert "--cast" not in err


def test_shapes_names_and_dtypes_are_told_together(rewrite, capsys):
    def change(_, named):
        named = {**named, "new": np.ones(3, np.float16), TABLE: named[TABLE].T}
        del named["final_norm.scale"]
        return {**named, NORM: named[NORM].astype(np.float16)}

    rewrite(change)
    assert resume("run", "--steps", 31, "--cast") == 4
    err = capsys.readouterr().err
    for group in ("parameters", "mu", "nu"):
        assert f"missing {group}/final_norm.scale" in err
        assert f"unexpected {group}/new" in err
        assert re.search(rf"{group}/{TABLE} is float32 \(16, \d+\), not float32 \(\d+, 16\)", err)
        assert f"{group}/{NORM}" not in err
    assert resume("run", "--steps", 31) == 4
    assert f"nu/{NORM} is float16 (16,), not float32 (16,)" in capsys.readouterr().err


def test_a_number_that_float32_cannot_hold_is_refused(rewrite, capsys):
    rewrite(lambda _, named: {**named, TABLE: np.full(named[TABLE].shape, 1e300)})
    assert resume("run", "--steps", 31, "--cast") == 4
    assert f"parameters/{TABLE} holds 1e+300, more than float32 can hold" in capsys.readouterr().err
    assert steps("run") == [30], "it is not damaged"


@pytest.mark.tier("full")
def test_a_run_that_starts_from_another_dtype(rewrite, whole_text, capsys):
    rewrite(all_to(np.float64, "parameters"))
    start = ["--steps", 31, "--init-from", "run", "--eval-interval", 100]
    assert main(train_arguments(whole_text, "new", *start)) == 4
    err = capsys.readouterr().err
    assert f"parameters/{TABLE} is float64" in err
    assert "--cast" in err
    assert not Path("new").exists()
    assert main(train_arguments(whole_text, "new", *start, "--cast")) == 0
    assert "from float64 to float32: largest rounding error 0" in capsys.readouterr().out


@pytest.mark.tier("full")
def test_a_run_that_starts_from_a_narrower_dtype_needs_no_cast(rewrite, whole_text, capsys):
    rewrite(all_to(ml_dtypes.bfloat16, "parameters"))
    start = ["--steps", 31, "--init-from", "run", "--eval-interval", 100]
    assert main(train_arguments(whole_text, "new", *start)) == 0
    assert "whose bfloat16 is kept as float32, exactly" in capsys.readouterr().out
