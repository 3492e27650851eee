"""Layers made ready for calls with few rows on a CPU, as a step of generation makes them.

What is made ready lies beside the parameters: kernels that are transposed or joined, and kernels of
experts one by one. See ``execution.few_rows`` and ``execution.separate_experts``.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxformer.execution import few_rows
from jaxformer.execution.separate_experts import separate
from jaxformer.experts import ExpertWeights
from jaxformer.layers import Embedding, Linear
from jaxformer.parameters import join_path

# By the path of a layer: its kernel transposed, joined with those of others; or the kernels of
# experts, one by one.
FewRowKernels = Mapping[str, Array | tuple[Array, ...]]


def few_row_kernels(module: nnx.Module, rows: int, tokens: int) -> FewRowKernels:
    """Returns what ``prepare_few_rows`` takes, by the paths of layers, where it is worth it.

    Args:
        module: any.
        rows: of each call that is to come.
        tokens: how many the text may get.
    """
    nodes = {join_path(path): node for path, node in nnx.iter_modules(module)}
    return _kernels_of_linear(nodes, rows, tokens) | _kernels_of_experts(nodes, rows, tokens)


def _kernels_of_experts(
    nodes: Mapping[str, nnx.Module], rows: int, tokens: int
) -> dict[str, tuple[Array, ...]]:
    """Returns the kernels of experts one by one, which takes no memory."""
    if tokens < few_rows.FEWEST_TOKENS_TO_COPY:
        return {}
    stacks = {path: node.kernel[...] for path, node in nodes.items() if type(node) is ExpertWeights}
    found = {path: separate(stack, rows) for path, stack in stacks.items()}
    return {path: kernels for path, kernels in found.items() if kernels is not None}


def _kernels_of_linear(nodes: Mapping[str, nnx.Module], rows: int, tokens: int) -> dict[str, Array]:
    """Returns the kernels of linear layers, transposed.

    Those that a module names in ``PROJECTED_TOGETHER`` are one array, under the path of the first.
    """
    kernels = {path: [node.kernel[...]] for path, node in nodes.items() if isinstance(node, Linear)}
    copied_bytes = sum(kernel.nbytes for (kernel,) in kernels.values())
    if not few_rows.is_worth_copies(rows, tokens, copied_bytes):
        return {}
    for path, node in nodes.items():
        names = [f"{path}.{name}".lstrip(".") for name in getattr(node, "PROJECTED_TOGETHER", ())]
        # Layers with something of their own are called one by one.
        is_plain = names and all(type(nodes.get(name)) is Linear for name in names)
        if is_plain and len({kernels[name][0].dtype for name in names}) == 1:
            kernels[names[0]] = [kernel for name in names for kernel in kernels.pop(name)]
    return _transposed(kernels)


_transposed = jax.jit(
    lambda kernels: {
        path: jnp.concatenate([kernel.T for kernel in several]) for path, several in kernels.items()
    }
)


def prepare_few_rows(module: nnx.Module, kernels: FewRowKernels) -> None:
    """Makes calls of ``module`` with few rows fast on a CPU.

    Args:
        module: made inside of a program, and not used outside.
        kernels: those of ``few_row_kernels``.
    """
    for path, node in nnx.iter_modules(module):
        own = kernels.get(join_path(path))
        if isinstance(node, Embedding):
            node.for_few_rows = True
        elif isinstance(node, ExpertWeights) and isinstance(own, tuple):
            node.separate = nnx.data(own)
        elif isinstance(node, Linear) and own is not None:
            is_joined = len(own) > node.kernel.shape[1]
            setattr(node, "joined_OI" if is_joined else "kernel_OI", nnx.data(own))
