"""Settings of the whole test run: made before JAX is imported."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)

import jax
import pytest
import torch

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# Their subject is what the optimised program computes, needs or costs.
OPTIMIZED = {
    "test_cases", "test_train_step", "test_training_parity", "test_random_bits", "test_versions",
    "test_benchmarks", "test_compilation_cache", "test_memory", "test_parity_memory",
}  # fmt: skip


def compile_quickly(quickly: bool) -> None:
    """Elsewhere the arrays are tiny, and compiling takes longer than running.

    What XLA fuses and where it keeps its arrays stays as it is; only LLVM optimises nothing.
    """
    jax.config.update("jax_disable_most_optimizations", quickly)
    # That of the processes that tests start.
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(quickly))


compile_quickly(True)


@pytest.fixture(autouse=True, scope="module")
def optimized_where_it_matters(request):
    """Sets it by module."""
    compile_quickly(request.module.__name__.rpartition(".")[2] not in OPTIMIZED)
    yield
    compile_quickly(True)


@pytest.fixture(scope="module")
def float64():
    """JAX computes in float64 where it is asked to, and torch in one thread.

    The arrays are tiny: a second thread would only wait.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with jax.enable_x64(True):
        yield
    torch.set_num_threads(threads)
