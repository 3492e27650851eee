"""Compiles quickly: most tests use tiny arrays, and compiling takes longer than running."""

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any

import jax
from jax._src import compiler
from jax._src.interpreters import mlir

# XLA's older code for fused operations takes two thirds of the time to compile; JAX 0.11 and later
# do not have it, and end a process that asks for it.
FUSIONS = ("xla_cpu_use_fusion_emitters",) if jax.__version_info__ < (0, 11) else ()
OLDER_FUSIONS = "".join(f" --{name}=false" for name in FUSIONS)
# A program in one part compiles in two thirds of the time: parts are for cores with nothing to do.
IN_ONE_PART = "--xla_cpu_parallel_codegen_split_count=1"
XLA_FLAGS = os.environ.get("XLA_FLAGS", "")
# How many programs are written in one context of MLIR. A new one for each is a third of the time of
# a small operation; it keeps the types and places of all its programs.
PROGRAMS_OF_A_CONTEXT = 500

_get_compile_options = compiler.get_compile_options
_make_ir_context = mlir.make_ir_context


@functools.wraps(_get_compile_options)
def _with_fusions(*args: Any, **options: Any) -> Any:
    """JAX has no setting for the options of all programs: they are added where it makes them."""
    quickly = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    more = dict.fromkeys(FUSIONS, not quickly)
    more |= options.pop("env_options_overrides", None) or {}
    return _get_compile_options(*args, **options, env_options_overrides=more)


@functools.wraps(_make_ir_context)
def _shared_ir_context() -> Any:
    """Returns a context that several programs share."""
    return _ir_context(next(_programs) // PROGRAMS_OF_A_CONTEXT)


_programs = itertools.count()
_ir_context = functools.lru_cache(maxsize=1)(lambda _: _make_ir_context())


def compile_quickly(quickly: bool) -> None:
    """Turns LLVM's optimisations off, or on again, here and in processes that tests start.

    Where XLA keeps its arrays stays as it is. For an accelerator all programs are compiled as users
    compile them: it is asked for to see what those compute.
    """
    quickly = quickly and os.environ.get("JAX_PLATFORMS") == "cpu"
    compiler.get_compile_options = _with_fusions
    mlir.make_ir_context = _shared_ir_context
    jax.config.update("jax_disable_most_optimizations", quickly)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(quickly))
    os.environ["XLA_FLAGS"] = XLA_FLAGS + OLDER_FUSIONS * quickly


@contextlib.contextmanager
def compiling_quickly() -> Iterator[None]:
    """Turns LLVM's optimisations off within the block, whatever they were before."""
    before = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    compile_quickly(True)
    try:
        yield
    finally:
        compile_quickly(before)


def flags_for_devices(count: int) -> str:
    """Returns XLA's flags of a process with so many devices that compiles as this one does."""
    quickly = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    devices = f"--xla_force_host_platform_device_count={count}"
    return f"{devices} {IN_ONE_PART}{OLDER_FUSIONS * quickly}"
