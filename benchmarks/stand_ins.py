"""Makes this processor compute as another kind does, for machines that are not at hand.

``--all-of-mkl``: as a processor of Intel's. MKL, which computes torch's products, asks one of its
own functions who made the processor, and computes without AVX-512 where it was not Intel. A library
that is loaded before it answers in its place.

``--only-avx2``: as a processor that has AVX2 and no AVX-512. XLA, torch and the C compiler are
limited to it, and keep what they build apart from what is built for all of this one. XLA's matrix
products use AVX-512 all the same: they are not measured, and jaxformer's own are taken.

Both are read from the environment by other libraries, so the program begins anew.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ALL_OF_MKL, ONLY_AVX2 = "--all-of-mkl", "--only-avx2"
SOURCE = "int mkl_serv_intel_cpu_true(void) { return 1; }\n"
LIBRARY = "all_of_mkl.so"
# A C compiler that builds for AVX2 where it is asked to build for this processor.
COMPILER = """#!/bin/sh
for word do
  shift
  if [ "$word" = -march=native ]; then word=-march=x86-64-v3; fi
  set -- "$@" "$word"
done
exec {compiler} "$@"
"""
# torch's own kernels ask for it; ``limit_torch_compile`` limits those of torch.compile.
TORCH, AVX2 = "ATEN_CPU_CAPABILITY", "avx2"
# What the libraries ask for that compute torch's products. On a processor of Intel's MKL would use
# AVX-512 all the same.
LIBRARIES = {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags, which this module has read by then."""
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        ALL_OF_MKL, action="store_true", help="let torch use all of a processor of AMD's"
    )
    chosen.add_argument(
        ONLY_AVX2, action="store_true", help="let all sides use AVX2 and no AVX-512"
    )


def uses_all_of_mkl() -> bool:
    """Returns whether this process has all of MKL."""
    return Path(os.environ.get("LD_PRELOAD", "")).name == LIBRARY


def uses_only_avx2() -> bool:
    """Returns whether this process uses AVX2 and no AVX-512."""
    return os.environ.get(TORCH) == AVX2


def reexec_if_asked() -> None:
    """Starts this program again as another processor's, where the command line asks for it.

    Raises:
        SystemExit: there is no C compiler, or it fails.
    """
    if ALL_OF_MKL in sys.argv and not uses_all_of_mkl():
        _reexec(LD_PRELOAD=_build_answer())
    if ONLY_AVX2 in sys.argv and not uses_only_avx2():
        folder = Path(tempfile.mkdtemp())
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX2".strip()
        compiler = str(_write_compiler(folder / "cc"))
        cache = str(folder / "cache")
        _reexec(
            **{TORCH: AVX2, "XLA_FLAGS": flags, "CC": compiler, "XDG_CACHE_HOME": cache},
            TORCHINDUCTOR_CACHE_DIR=str(folder / "torch"),
            **LIBRARIES,
        )


def limit_torch_compile() -> None:
    """Makes ``torch.compile`` build for AVX2 where no more is to be used."""
    if uses_only_avx2():
        import torch._inductor.config

        torch._inductor.config.cpp.simdlen = 256


def _reexec(**variables: str) -> None:
    environment = {**os.environ, **variables}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _build_answer() -> str:
    library = Path(tempfile.mkdtemp()) / LIBRARY
    words = ["cc", "-x", "c", "-shared", "-fPIC", "-", "-o", str(library)]
    try:
        subprocess.run(words, input=SOURCE, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"{ALL_OF_MKL} needs a C compiler: {error}")
    return str(library)


def _write_compiler(path: Path) -> Path:
    found = shutil.which(os.environ.get("CC", "cc"))
    if found is None:
        sys.exit(f"{ONLY_AVX2} needs a C compiler")
    path.write_text(COMPILER.format(compiler=found))
    path.chmod(0o700)
    return path
