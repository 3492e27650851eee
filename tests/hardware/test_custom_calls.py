"""Custom calls in C: built once, without a warning, and clear where they cannot be."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest

from jaxformer.hardware import custom_call_builds, custom_calls, row_products
from jaxformer.hardware.custom_call_builds import (
    OF_A_STEP,
    UnavailableError,
    build,
    build_ahead,
    check,
    fast_options,
)

NAME = "few_row_products"
BETTER, LAST = OPTIONS = fast_options(NAME)
COMPILER = next(filter(shutil.which, custom_call_builds.COMPILERS), None)
# In all tests that call them directly.
ARE_KNOWN = row_products.are_known()
needs_calls = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "jaxformer" / "custom_calls"


@needs_calls
def test_where_there_is_a_compiler_there_are_calls():
    assert ARE_KNOWN


@needs_calls
def test_it_is_built_once_for_each_kind_of_processor(empty_cache, monkeypatch):
    first = build(NAME, BETTER)
    made = first.stat()
    assert build(NAME, BETTER) == first
    assert first.stat() == made
    assert [path.name for path in empty_cache.iterdir()] == [first.name]
    monkeypatch.setattr(custom_call_builds, "processor_kind", lambda: "another")
    assert build(NAME, BETTER) != first
    assert len(list(empty_cache.iterdir())) == 2


def test_why_nothing_can_be_built_is_said(empty_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UnavailableError, match=r"^there is no C compiler$"):
        custom_calls.load(NAME, OPTIONS)
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(UnavailableError, match=r"cannot build the custom calls: no such flag$"):
        custom_calls.load(NAME, OPTIONS)
    assert list(empty_cache.iterdir()) == []
    compiler.write_text('#!/bin/sh\nfor last; do true; done\necho damaged > "$last"\n')
    with pytest.raises(UnavailableError, match=r"^what was built cannot be loaded: "):
        custom_calls.load(NAME, OPTIONS)
    empty_cache.chmod(0o777)
    with pytest.raises(UnavailableError, match=r"^others can write to "):
        custom_calls.load(NAME, OPTIONS)


@needs_calls
def test_what_is_built_needs_no_compiler(empty_cache, tmp_path, monkeypatch):
    check(NAME, OPTIONS)
    assert not empty_cache.exists(), "nothing is built to find out"
    custom_calls.load(NAME, OPTIONS)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    check(NAME, OPTIONS)
    with pytest.raises(UnavailableError, match=r"^there is no C compiler$"):
        check(NAME, [["-O0"]])


@needs_calls
def test_a_compiler_that_does_not_know_gccs_option_builds_without_it(
    empty_cache, tmp_path, monkeypatch
):
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *--param*) exit 1;; esac\nexec {COMPILER} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    registered = []
    monkeypatch.setattr(custom_calls, "register", lambda library, targets: registered.append(1))
    assert row_products.are_known.__wrapped__()
    assert registered == [1]
    assert len(list(empty_cache.iterdir())) == 1


def test_without_a_compiler_products_are_those_of_xla(empty_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert not row_products.are_known.__wrapped__()


@needs_calls
def test_they_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("JAXFORMER_CUSTOM_CALLS", "off")
    assert not row_products.are_known.__wrapped__()


# ``SGEMM`` changes one source alone.
SOURCES = [
    pytest.param(source, options, id=f"{source.stem}{''.join(options)}")
    for source in sorted(custom_call_builds.FOLDER.glob("*.c"))
    for options in ([], ["-mno-avx512f"], ["-DSGEMM"])
    if "-DSGEMM" not in options or "SGEMM" in source.read_text()
]


@pytest.mark.parametrize("compiler", list(filter(shutil.which, ["gcc", "clang"])))
@pytest.mark.parametrize(("source", "options"), SOURCES)
def test_a_compiler_has_nothing_to_warn_of(source, options, compiler, tmp_path):
    include = [
        "-I", custom_call_builds.include_folder(), "-I", str(custom_call_builds.FOLDER)
    ]  # fmt: skip
    known = BETTER if compiler == "gcc" else LAST
    words = [*custom_call_builds.OPTIONS, *known, *options, "-Wall", "-Wextra", "-Werror"]
    words += include
    done = subprocess.run(
        [compiler, *words, str(source), "-o", str(tmp_path / "built.so")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def slow_compiler(empty_cache, tmp_path, monkeypatch):
    """A compiler that takes a moment, and writes a line for each library that it is asked for."""
    made = tmp_path / "made"
    compiler = tmp_path / "compiler"
    compiler.write_text(
        f'#!/bin/sh\nfor last; do true; done\necho "$last" >> {made}\nsleep 0.3\necho > "$last"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    return made


def test_what_is_built_ahead_is_waited_for_and_built_once(slow_compiler, empty_cache):
    build_ahead(OF_A_STEP)
    assert not empty_cache.exists() or len(list(empty_cache.iterdir())) < len(OF_A_STEP)
    built = [build(name, fast_options(name)[0]) for name in OF_A_STEP]
    assert all(path.exists() for path in built)
    names = [Path(line).stem.rpartition("-")[0] for line in slow_compiler.read_text().split()]
    assert sorted(names) == sorted(OF_A_STEP)


def test_nothing_is_built_ahead_where_calls_are_off(slow_compiler, monkeypatch):
    monkeypatch.setenv("JAXFORMER_CUSTOM_CALLS", "off")
    before = threading.active_count()
    build_ahead(OF_A_STEP)
    assert threading.active_count() == before
    assert not slow_compiler.exists()


def test_a_process_that_ends_begins_no_other(slow_compiler, empty_cache):
    code = f"""
from {build_ahead.__module__} import *
build_ahead(OF_A_STEP)
while not os.path.exists({str(slow_compiler)!r}):
    time.sleep(0.01)
print(1 / 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert len(slow_compiler.read_text().split()) == 1
    assert [path.suffix for path in empty_cache.iterdir()] == [".so"], "nothing is left half made"


def test_building_needs_no_jax():
    code = f"import sys, {build_ahead.__module__}; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_headers_are_those_that_jax_names():
    assert custom_call_builds.include_folder() == jax.ffi.include_dir()


@needs_calls
def test_what_killed_processes_left_is_removed(empty_cache):
    empty_cache.mkdir(parents=True, mode=0o700)
    old, new, other = (empty_cache / name for name in ("a.12", "b.13", "c.so"))
    for path in (old, new, other):
        path.write_text("")
    long_ago = time.time() - 2 * custom_call_builds.LONGEST_BUILD
    for path in (old, other):
        os.utime(path, (long_ago, long_ago))
    built = build("loss_calls", ["-O0"])
    assert {*empty_cache.iterdir()} == {new, other, built}


def test_the_sources_of_a_step_are_there():
    assert {f"{name}.c" for name in OF_A_STEP} <= {
        p.name for p in custom_call_builds.FOLDER.iterdir()
    }
