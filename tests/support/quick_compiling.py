"""Compiles quickly: most tests use tiny arrays, and compiling takes longer than running."""

import functools
import os
from typing import Any

import jax
from jax._src import compiler

# XLA's older code for fused operations takes two thirds of the time to compile; JAX 0.11 and later
# do not have it, and end a process that asks for it.
FUSIONS = ("xla_cpu_use_fusion_emitters",) if jax.__version_info__ < (0, 11) else ()
OLDER_FUSIONS = "".join(f" --{name}=false" for name in FUSIONS)
XLA_FLAGS = os.environ.get("XLA_FLAGS", "")

_get_compile_options = compiler.get_compile_options


@functools.wraps(_get_compile_options)
def _with_fusions(*args: Any, **options: Any) -> Any:
    """JAX has no setting for the options of all programs: they are added where it makes them."""
    quickly = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    more = dict.fromkeys(FUSIONS, not quickly)
    more |= options.pop("env_options_overrides", None) or {}
    return _get_compile_options(*args, **options, env_options_overrides=more)


def compile_quickly(quickly: bool) -> None:
    """Turns LLVM's optimisations off, or on again, here and in processes that tests start.

    Where XLA keeps its arrays stays as it is.
    """
    compiler.get_compile_options = _with_fusions
    jax.config.update("jax_disable_most_optimizations", quickly)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(quickly))
    os.environ["XLA_FLAGS"] = XLA_FLAGS + OLDER_FUSIONS * quickly
