"""Programs kept between runs: the same bits from a cold and a warm cache, and no harm from any."""

import os
import subprocess
import sys

import jax
import pytest

from jaxformer.hardware import compilation_cache as compilation
from jaxformer.hardware.compilation_cache import use_compilation_cache
from tests.support.tiny import DROPOUT, ROOT, losses, manifest, start, train, train_arguments

# A full disk: whatever is written to the cache stays half written.
FULL_DISK = """
import errno, sys
from jax._src import lru_cache
from jaxformer.cli.main import main
def put(self, key, value):
    (self.path / f"{key}-cache").write_bytes(value[: len(value) // 2])
    raise OSError(errno.ENOSPC, "No space left on device")
lru_cache.LRUCache.put = put
sys.exit(main(sys.argv[1:]))
"""


def run(*arguments):
    process = start(*arguments)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert err == ""


def entries(cache):
    return {path.name: path.stat().st_mtime_ns for path in cache.rglob("*-cache")}


@pytest.mark.optimized
@pytest.mark.tier("full")
def test_a_warm_cache_compiles_nothing_and_changes_no_bit(text, tmp_path, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    cache = tmp_path / "cache" / "jaxformer" / "xla"
    flags = ["--decay-steps", 20, *DROPOUT]
    run(*train_arguments(text, "cold", "--steps", 20, *flags))
    compiled = entries(cache)
    assert len(compiled) > 5
    run(*train_arguments(text, "warm", "--steps", 10, *flags))
    run("train", "--resume", "--out", "warm", "--steps", 20)
    assert entries(cache).items() >= compiled.items(), "an entry was written anew"
    assert {n for n in entries(cache) if n.startswith("jit__fun")} == {
        n for n in compiled if n.startswith("jit__fun")
    }, "training or evaluation was compiled again"

    # Cut entries, and no room for new ones.
    for path in cache.rglob("*-cache"):
        path.write_bytes(path.read_bytes()[:-9])
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, *train_arguments(text, "full", "--steps", 20, *flags)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_DEFAULT_MATMUL_PRECISION": "highest"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    for other in ("warm", "full"):
        assert losses(other) == losses("cold")
        assert losses(other, "val_loss")[20] == losses("cold", "val_loss")[20]
        assert manifest(other, 20)["state_sha256"] == manifest("cold", 20)["state_sha256"]


@pytest.mark.tier("slow")
def test_a_second_comparison_compiles_nothing(text, tmp_path, monkeypatch):
    assert train(text, "run", "--steps", 2) == 0
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    cache = tmp_path / "cache" / "jaxformer" / "xla"
    verify = ["verify", "run", "run", "--mode", "forward"]
    run(*verify, "--no-compilation-cache")
    assert not entries(cache)
    run(*verify)
    compiled = entries(cache)
    assert len(compiled) > 20
    run(*verify)
    assert entries(cache) == compiled


def test_no_cache_keeps_nothing(text, tmp_path):
    try:
        assert train(text, "run", "--steps", 2, "--no-compilation-cache") == 0
        assert not jax.config.jax_enable_compilation_cache
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert not (tmp_path / "cache" / "jaxformer").exists()


@pytest.fixture
def unset():
    """JAX as it is where no folder was given."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_folder_that_was_given_stays(tmp_path):
    given = jax.config.jax_compilation_cache_dir
    assert str(use_compilation_cache()) == given
    assert jax.config.jax_compilation_cache_dir == given
    assert not (tmp_path / "cache" / "jaxformer").exists()


def test_the_folder_belongs_to_the_user_and_to_the_processor(unset, tmp_path, monkeypatch):
    folder = use_compilation_cache()
    assert folder.parent == tmp_path / "cache" / "jaxformer" / "xla"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert jax.config.jax_compilation_cache_dir == str(folder)
    jax.config.update("jax_compilation_cache_dir", None)
    assert use_compilation_cache() == folder
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr("platform.machine", lambda: "another")
    assert use_compilation_cache() != folder


def test_a_folder_that_cannot_be_used_is_left_alone(unset, tmp_path, monkeypatch):
    folder = use_compilation_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    folder.chmod(0o777)
    assert use_compilation_cache() is None, "others could put programs there"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert use_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir is None


def test_the_oldest_programs_go_first(unset, monkeypatch):
    folder = use_compilation_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    for age, name in enumerate(["new", "old", "oldest"]):
        path = folder / f"{name}-cache"
        path.write_bytes(bytes(100))
        os.utime(path, (1e9 - age, 1e9 - age))
    monkeypatch.setattr(compilation, "MOST_BYTES", 250)
    use_compilation_cache()
    assert sorted(path.name for path in folder.iterdir()) == ["new-cache", "old-cache"]
