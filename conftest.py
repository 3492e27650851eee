"""Settings of the whole test run, made before JAX is imported, and the choice of a tier."""

import atexit
import gc
import os
import sys
import tempfile
from collections.abc import Iterator
from types import SimpleNamespace

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Where an accelerator is asked for, the workers share its memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# A program in one part compiles in two thirds of the time: parts are for cores with nothing to do.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8 --xla_cpu_parallel_codegen_split_count=1"
)

# The arrays are tiny, and there is a worker for each core: a second thread would only wait.
os.environ["OMP_NUM_THREADS"] = "1"

# Messages show commands as the user has started them: the same under uv and without it.
os.environ.pop("UV_RUN_RECURSION_DEPTH", None)

# The workers and the processes that tests start share compiled programs, which spares a third of
# the time. The first process to come here makes their folder, and removes it when it ends.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    PROGRAMS = tempfile.TemporaryDirectory(prefix="jaxformer-programs-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = PROGRAMS.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# An entry that another process is writing is compiled again; the remark is no output of a command.
os.environ["PYTHONWARNINGS"] = "ignore:Error reading persistent compilation cache entry"

# They share bytecode too, in a folder of the run where the environment wants none beside the
# sources: each process would compile JAX, torch and transformers, for many seconds.
if sys.dont_write_bytecode:
    BYTECODE = tempfile.TemporaryDirectory(prefix="jaxformer-bytecode-")
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = BYTECODE.name
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False

import jax
import pytest

from tests.support.memory import free_compiled_programs, resident_memory
from tests.support.quick_compiling import compile_quickly
from tests.support.tiers import TIERS, tier_of

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")
# Many tests are about errors, and leaving JAX's own frames out of each takes longer than the rest.
jax.config.update("jax_traceback_filtering", "off")

# What a worker may grow to. Compiled programs are dropped when they have grown to PROGRAMS_MEMORY.
WORKER_MEMORY = 4 * 2**30
PROGRAMS_MEMORY = 3 * 2**29


# The memory that this worker had when its tests began, or when it last dropped its programs.
kept = SimpleNamespace(memory=0)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option that chooses a tier."""
    parser.addoption(
        "--tier",
        choices=TIERS,
        default=TIERS[0],
        help="run the tests of this tier alone (default: %(default)s); "
        "a test that is named as path::test runs whatever its tier",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the tests of the chosen tier and those that the command line names."""
    tier = config.getoption("tier")
    named = tuple(arg.partition("::")[2] for arg in config.args if "::" in arg)

    def is_chosen(item: pytest.Item) -> bool:
        return tier == tier_of(item.iter_markers()) or item.nodeid.partition("::")[2].startswith(
            named
        )

    config.hook.pytest_deselected(items=[item for item in items if not is_chosen(item)])
    items[:] = [item for item in items if is_chosen(item)]


def pytest_collection_finish() -> None:
    """Lets the garbage collector pass over what was imported, which stays, and come less often.

    With JAX, torch and transformers each of its walks through everything takes half a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)
    kept.memory = resident_memory()


def pytest_unconfigure() -> None:
    """Gives the garbage collector back what it has passed over, so that the process ends tidily.

    Not before pytest's own last walks, five of them, through all that the tests have left.
    """
    gc.freeze()
    atexit.register(gc.unfreeze)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Returns a worker for each core that this process may use, fewer where memory is short."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(cores, memory // WORKER_MEMORY))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Frees memory before the next test where the worker has come to hold much."""
    if resident_memory() > kept.memory + PROGRAMS_MEMORY:
        free_compiled_programs()
        kept.memory = resident_memory()


compile_quickly(True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Compiles for tests that are marked ``optimized`` as users do, and for all others quickly."""
    compile_quickly(item.get_closest_marker("optimized") is None)


@pytest.fixture(scope="module")
def float64() -> Iterator[None]:
    """Lets JAX compute in float64 where it is asked to."""
    with jax.enable_x64(True):
        yield
