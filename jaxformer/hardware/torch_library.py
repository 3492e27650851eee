"""Makes the matrix products of torch's library known to XLA, without importing torch.

torch for Linux on x86 carries Intel's MKL inside ``libtorch_cpu.so``. Custom calls of XLA
(``torch_products.c``) call it.
"""

import ctypes
import functools
import importlib.util
from importlib import metadata
from pathlib import Path

import jax

from jaxformer.hardware import custom_calls
from jaxformer.hardware.custom_calls import UnavailableError

# Custom calls for A B, A Bᵀ and Aᵀ B of matrices.
PRODUCT, BY_TRANSPOSED, TRANSPOSED_BY = MATRIX_TARGETS = (
    "jaxformer_product", "jaxformer_product_bt", "jaxformer_product_at",
)  # fmt: skip
# Of each head: queries by keys, weights by values, and transposed weights by what queries have.
SCORES, WEIGHTED, WEIGHTED_BACK = _HEAD_TARGETS = (
    "jaxformer_scores", "jaxformer_weighted", "jaxformer_weighted_back",
)  # fmt: skip
# Of rows in groups: with the group's matrix, with it transposed, and the matrices of groups.
GROUPED, GROUPED_BY_TRANSPOSED, GROUPED_MATRICES = _GROUP_TARGETS = (
    "jaxformer_grouped", "jaxformer_grouped_bt", "jaxformer_grouped_matrices",
)  # fmt: skip
# The source of the custom calls, and how it is built.
NAME, OPTIONS = "torch_products", ("-O2",)
TARGETS = MATRIX_TARGETS + _HEAD_TARGETS + _GROUP_TARGETS


def torch_version() -> str:
    """Returns the version of torch that is installed.

    Raises:
        UnavailableError: there is none.
    """
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise UnavailableError("torch is not installed") from None


def check_products() -> None:
    """Checks that nothing is missing that ``register_products`` needs, and waits for no compiler.

    Raises:
        UnavailableError: torch, its products or a C compiler are missing.
    """
    custom_calls.check(NAME, OPTIONS)
    _load_functions()


@functools.cache
def register_products() -> None:
    """Makes the custom calls of ``TARGETS`` known to XLA, once in a process.

    Raises:
        UnavailableError: torch, its products or a C compiler are missing.
    """
    product, threads = _load_functions()
    library = custom_calls.load(NAME, OPTIONS)
    library.jaxformer_set_up(product, threads, jax.local_device_count("cpu"))
    custom_calls.register(library, TARGETS)


@functools.cache
def _load_functions() -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    torch = _load_torch()
    return _function(torch, "sgemm_"), _function(torch, "MKL_Set_Num_Threads_Local")


def _load_torch() -> ctypes.CDLL:
    spec = importlib.util.find_spec("torch")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        path = Path(folder, "lib", "libtorch_cpu.so")
        if path.is_file():
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                raise UnavailableError(f"torch's library cannot be loaded: {error}") from error
    version = torch_version()
    raise UnavailableError(f"torch {version} has no libtorch_cpu.so")


def _function(library: ctypes.CDLL, name: str) -> ctypes.c_void_p:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p)
    except AttributeError:
        raise UnavailableError(f"torch {torch_version()} was built without Intel's MKL") from None
