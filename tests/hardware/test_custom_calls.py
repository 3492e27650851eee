"""Custom calls in C: built once, without a warning, and clear where they cannot be."""

import shutil
import subprocess

import pytest

from jaxformer.hardware import custom_calls, row_products
from jaxformer.hardware.custom_calls import FAST_OPTIONS, UnavailableError

NAME = "few_row_products"
COMPILER = next(filter(shutil.which, custom_calls.COMPILERS), None)
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
    first = custom_calls._build(NAME, FAST_OPTIONS[0])
    made = first.stat()
    assert custom_calls._build(NAME, FAST_OPTIONS[0]) == first
    assert first.stat() == made
    assert [path.name for path in empty_cache.iterdir()] == [first.name]
    monkeypatch.setattr(custom_calls, "processor_kind", lambda: "another")
    assert custom_calls._build(NAME, FAST_OPTIONS[0]) != first
    assert len(list(empty_cache.iterdir())) == 2


def test_why_nothing_can_be_built_is_said(empty_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UnavailableError, match=r"^there is no C compiler$"):
        custom_calls.load(NAME, FAST_OPTIONS)
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(UnavailableError, match=r"cannot build the custom calls: no such flag$"):
        custom_calls.load(NAME, FAST_OPTIONS)
    assert list(empty_cache.iterdir()) == []
    compiler.write_text('#!/bin/sh\nfor last; do true; done\necho damaged > "$last"\n')
    with pytest.raises(UnavailableError, match=r"^what was built cannot be loaded: "):
        custom_calls.load(NAME, FAST_OPTIONS)
    empty_cache.chmod(0o777)
    with pytest.raises(UnavailableError, match=r"^others can write to "):
        custom_calls.load(NAME, FAST_OPTIONS)


@needs_calls
def test_what_is_built_needs_no_compiler(empty_cache, tmp_path, monkeypatch):
    custom_calls.check(NAME, FAST_OPTIONS)
    assert not empty_cache.exists(), "nothing is built to find out"
    custom_calls.load(NAME, FAST_OPTIONS)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    custom_calls.check(NAME, FAST_OPTIONS)
    with pytest.raises(UnavailableError, match=r"^there is no C compiler$"):
        custom_calls.check(NAME, [["-O0"]])


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
    for source in sorted(custom_calls.FOLDER.glob("*.c"))
    for options in ([], ["-mno-avx512f"], ["-DSGEMM"])
    if "-DSGEMM" not in options or "SGEMM" in source.read_text()
]


@pytest.mark.parametrize("compiler", list(filter(shutil.which, ["gcc", "clang"])))
@pytest.mark.parametrize(("source", "options"), SOURCES)
def test_a_compiler_has_nothing_to_warn_of(source, options, compiler, tmp_path):
    include = [
        "-I", custom_calls.jax.ffi.include_dir(), "-I", str(custom_calls.FOLDER)
    ]  # fmt: skip
    known = FAST_OPTIONS[0] if compiler == "gcc" else FAST_OPTIONS[1]
    words = [*custom_calls.OPTIONS, *known, *options, "-Wall", "-Wextra", "-Werror"]
    words += include
    done = subprocess.run(
        [compiler, *words, str(source), "-o", str(tmp_path / "built.so")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
