"""Makes matrix products known to XLA, as custom calls: jaxformer's own, or torch's.

Both are built from one source (``matrix_products.c``). jaxformer's own are in C too; torch's are
calls of the library that torch brings along (``torch_library``).
"""

import functools
from typing import Literal, get_args

import jax

from jaxformer.hardware import custom_call_builds, custom_calls, torch_library
from jaxformer.hardware.custom_call_builds import UnavailableError, fast_options

# Whose products custom calls are.
Library = Literal["jaxformer", "torch"]
LIBRARIES: tuple[Library, ...] = get_args(Library)
# Custom calls for A B, A Bᵀ and Aᵀ B of matrices.
PRODUCT, BY_TRANSPOSED, TRANSPOSED_BY = _MATRIX_FORMS = "product", "product_bt", "product_at"
# A B with GELU of it, alone and with its slope; and A Bᵀ times such slopes.
GELU, GELU_AND_SLOPE, GELU_BACK = _GELU_FORMS = (
    "product_gelu", "product_gelu_and_slope", "product_bt_gelu_back",
)  # fmt: skip
# Of each head: queries by keys, weights by values, and transposed weights by what queries have.
SCORES, WEIGHTED, WEIGHTED_BACK = _HEAD_FORMS = "scores", "weighted", "weighted_back"
# Of rows in groups: with the group's matrix, with it transposed, and the matrices of groups.
GROUPED, GROUPED_BY_TRANSPOSED, GROUPED_MATRICES = _GROUP_FORMS = (
    "grouped", "grouped_bt", "grouped_matrices",
)  # fmt: skip
_FORMS = _MATRIX_FORMS + _GELU_FORMS + _HEAD_FORMS + _GROUP_FORMS
NAME = "matrix_products"
# How the source is built, from what is best to what every compiler takes.
_OPTIONS = {"jaxformer": fast_options(NAME), "torch": (("-O2", "-DSGEMM"),)}


def named_library(name: str) -> Library | None:
    """Returns the library of this name, None where it is none, such as ``xla``."""
    return next((library for library in LIBRARIES if library == name), None)


def target(library: Library, form: str) -> str:
    """Returns the name that XLA knows a custom call by."""
    return f"{library}_{form}"


# Products with weight matrices.
MATRIX_TARGETS = frozenset(target(lib, form) for lib in LIBRARIES for form in _MATRIX_FORMS)


def check_products(library: Library) -> None:
    """Checks in no time what ``register_products`` needs: it loads nothing, and builds nothing.

    Raises:
        UnavailableError: there is no C compiler or no torch, or jaxformer's custom calls are turned
            off.
    """
    if library == "torch":
        torch_library.torch_version()
    elif custom_call_builds.are_off():
        raise UnavailableError(f"{custom_call_builds.SWITCH} is {custom_call_builds.OFF}")
    custom_call_builds.check(NAME, _OPTIONS[library])


@functools.cache
def register_products(library: Library) -> None:
    """Makes the custom calls of a library known to XLA, once in a process.

    Raises:
        UnavailableError: see ``check_products``; the compiler fails, or torch has no such products.
    """
    check_products(library)
    built = custom_calls.load(NAME, _OPTIONS[library])
    built.jaxformer_set_devices(jax.local_device_count("cpu"))
    if library == "torch":
        built.jaxformer_set_sgemm(*torch_library.load_functions())
    functions = {target(library, form): f"jaxformer_{form}" for form in _FORMS}
    custom_calls.register(built, functions)


def are_registered(library: Library) -> bool:
    """Returns whether the custom calls of a library can be used, and makes them known to XLA."""
    try:
        register_products(library)
    except UnavailableError:
        return False
    return True
