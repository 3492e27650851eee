"""Products of a run on a CPU by the library that torch computes its own products with, Intel's MKL.

On Intel's processors XLA's products reach less of the processor's speed than torch's, and narrow
ones least. ``hardware.torch_library`` makes torch's known to XLA, as a custom call, where torch is
installed; ``training.products`` measures which is faster. torch itself is not imported.
"""

import contextvars
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.execution.scopes import set_within
from jaxformer.execution.sharding import current_layout

# The custom calls for A B, A Bᵀ and Aᵀ B.
TARGETS = ("jaxformer_product", "jaxformer_product_bt", "jaxformer_product_at")
# Products of fewer rows read each number of a matrix for little, and XLA's are as fast.
FEWEST_ROWS = 32

_wanted: contextvars.ContextVar[bool] = contextvars.ContextVar("torch_products", default=False)


def torch_products(wanted: bool = True) -> AbstractContextManager[None]:
    """Makes models be traced with torch's products, which must be known to XLA by then.

    They are for programs on CPUs, differentiated backward alone, as a training step is. A function
    that ``jax.jit`` has compiled keeps the products that it was traced with.
    """
    return set_within(_wanted, wanted)


def is_wanted(x_RI: Float[Array, "R I"], kernel_IO: Float[Array, "I O"]) -> bool:
    """Returns whether ``product`` is to compute x W.

    XLA cannot cut a custom call into parts for the devices of a mesh.
    """
    return (
        _wanted.get()
        and len(x_RI) >= FEWEST_ROWS
        and x_RI.dtype == kernel_IO.dtype == jnp.float32
        and current_layout() is None
    )


@jax.custom_vjp
def product(x_RI: Float[Array, "R I"], kernel_IO: Float[Array, "I O"]) -> Float[Array, "R O"]:
    """Returns x W of float32 matrices, with a gradient of the same kind of products."""
    return _call(TARGETS[0], x_RI, kernel_IO, (len(x_RI), kernel_IO.shape[1]))


def _forward(
    x_RI: Float[Array, "R I"], kernel_IO: Float[Array, "I O"]
) -> tuple[Float[Array, "R O"], tuple[Array, Array]]:
    return product(x_RI, kernel_IO), (x_RI, kernel_IO)


def _backward(kept: tuple[Array, Array], dy_RO: Float[Array, "R O"]) -> tuple[Array, Array]:
    (x_RI, kernel_IO), (_, by_transposed, transposed_by) = kept, TARGETS
    dx_RI = _call(by_transposed, dy_RO, kernel_IO, x_RI.shape)
    return dx_RI, _call(transposed_by, x_RI, dy_RO, kernel_IO.shape)


product.defvjp(_forward, _backward)


def _call(target: str, a: Array, b: Array, shape: tuple[int, ...]) -> Array:
    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    computed: Array = jax.ffi.ffi_call(target, result, vmap_method="sequential")(a, b)
    return computed
