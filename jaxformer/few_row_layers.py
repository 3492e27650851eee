"""Layers made ready for calls with few rows on a CPU, as a step of generation makes them.

Where it can be, products are custom calls, which take the parameters as they are. Else what is made
ready lies beside the parameters: kernels that are transposed or joined, and kernels of experts one
by one. See ``execution.few_rows`` and ``execution.separate_experts``.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxformer.attention import MultiHeadAttention
from jaxformer.execution import few_rows
from jaxformer.execution.separate_experts import separate
from jaxformer.experts import ExpertWeights
from jaxformer.hardware.matrix_products import Library, are_registered
from jaxformer.layers import Embedding, Linear
from jaxformer.narrow_linear import NarrowLinear
from jaxformer.parameters import Parameters, join_path, merge, split

# By the path of a layer: its kernel transposed, joined with those of others; or the kernels of
# experts, one by one; or nothing, where a custom call takes the kernel as it is.
FewRowKernels = Mapping[str, Array | tuple[Array, ...]]


class _Layers(NamedTuple):
    """Where the layers of a model are that can be made ready.

    Attributes:
        linear: paths of linear layers.
        together: paths of those of them that are one product, of each module that says so.
        experts: paths of the kernels of experts.
        tables: paths of embeddings.
        narrow: paths of linear layers with narrow weights.
    """

    linear: tuple[str, ...]
    together: tuple[tuple[str, ...], ...]
    experts: tuple[str, ...]
    tables: tuple[str, ...]
    narrow: tuple[str, ...]


def few_row_kernels(module: nnx.Module, rows: int, tokens: int) -> FewRowKernels:
    """Returns what ``prepare_few_rows`` takes, by the paths of layers, where it is worth it.

    Args:
        module: any.
        rows: of each call that is to come.
        tokens: how many the text may get.
    """
    return few_row_kernels_of(*split(module), rows, tokens)


def few_row_kernels_of(
    definition: nnx.GraphDef[Any], parameters: Parameters, rows: int, tokens: int
) -> FewRowKernels:
    """Returns ``few_row_kernels`` of a module that is split: it is gone through once for all texts.

    Args:
        definition: of the module.
        parameters: of the module.
        rows: see ``few_row_kernels``.
        tokens: see ``few_row_kernels``.
    """
    called = few_row_calls_of(definition, parameters, rows)
    if called or tokens < few_rows.FEWEST_TOKENS_TO_COPY:
        return called
    layers = _find_layers(definition, tuple(parameters))
    kernels = _kernels_of_linear(layers, parameters, rows, tokens)
    return kernels | _kernels_of_experts(layers, parameters, rows)


def few_row_calls_of(
    definition: nnx.GraphDef[Any], parameters: Parameters, rows: int
) -> FewRowKernels:
    """Returns those of ``few_row_kernels`` that take no time to make, for a call without others.

    Args:
        definition: of the module.
        parameters: of the module.
        rows: the fewest of a call.
    """
    layers = _find_layers(definition, tuple(parameters))
    names = {path: _kernel_name(path) for path in layers.linear + layers.experts}
    names |= {path: _table_name(path) for path in layers.tables}
    fit = {path for path, name in names.items() if few_rows.can_use_call(rows, parameters[name])}
    fit |= {
        path
        for path in layers.narrow
        if few_rows.can_use_call(rows, parameters[_weight_name(path)], few_rows.TRANSPOSED_DTYPES)
    }
    return dict.fromkeys(sorted(fit), ())


@functools.lru_cache(maxsize=16)
def _find_layers(definition: nnx.GraphDef[Any], names: tuple[str, ...]) -> _Layers:
    """Finds the layers of a module, given the names of its parameters."""
    stand_ins: dict[str, Any] = dict.fromkeys(names, 0)
    module = merge(definition, stand_ins)
    nodes = {join_path(path): node for path, node in nnx.iter_modules(module)}
    # A kernel that several layers share has the name of one of them, which alone is made ready.
    own = {path: node for path, node in nodes.items() if _kernel_name(path) in names}
    together = []
    for path, node in nodes.items():
        parts = [f"{path}.{name}".lstrip(".") for name in getattr(node, "PROJECTED_TOGETHER", ())]
        # Layers with something of their own are called one by one.
        if parts and all(type(own.get(part)) is Linear for part in parts):
            together.append(tuple(parts))
    linear = [path for path, node in own.items() if isinstance(node, Linear)]
    experts = [path for path, node in own.items() if type(node) is ExpertWeights]
    tables = [
        path
        for path, node in nodes.items()
        if isinstance(node, Embedding) and _table_name(path) in names
    ]
    narrow = [
        path
        for path, node in nodes.items()
        if isinstance(node, NarrowLinear) and _weight_name(path) in names
    ]
    return _Layers(tuple(linear), tuple(together), tuple(experts), tuple(tables), tuple(narrow))


def _kernel_name(path: str) -> str:
    return f"{path}.kernel".lstrip(".")


def _table_name(path: str) -> str:
    return f"{path}.embedding".lstrip(".")


def _weight_name(path: str) -> str:
    return f"{path}.weight".lstrip(".")


def _kernels_of_experts(
    layers: _Layers, parameters: Parameters, rows: int
) -> dict[str, tuple[Array, ...]]:
    """Returns the kernels of experts one by one, which takes no memory."""
    found = {path: separate(parameters[_kernel_name(path)], rows) for path in layers.experts}
    return {path: kernels for path, kernels in found.items() if kernels is not None}


def _kernels_of_linear(
    layers: _Layers, parameters: Parameters, rows: int, tokens: int
) -> dict[str, Array]:
    """Returns the kernels of linear layers, transposed.

    Those that are one product are one array, under the path of the first.
    """
    kernels = {path: [parameters[_kernel_name(path)]] for path in layers.linear}
    copied_bytes = sum(kernel.nbytes for (kernel,) in kernels.values())
    if not few_rows.is_worth_copies(rows, tokens, copied_bytes):
        return {}
    for paths in layers.together:
        if len({kernels[path][0].dtype for path in paths}) == 1:
            kernels[paths[0]] = [kernel for path in paths for kernel in kernels.pop(path)]
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
    has_calls = any(map(_is_call, kernels.values()))
    for path, node in nnx.iter_modules(module):
        own = kernels.get(join_path(path))
        if isinstance(node, MultiHeadAttention):
            node.uses_custom_call = has_calls
        elif _is_call(own):
            assert isinstance(node, Embedding | ExpertWeights | Linear | NarrowLinear)
            node.uses_custom_call = True
        elif isinstance(node, Embedding):
            node.for_few_rows = True
        elif isinstance(node, ExpertWeights) and isinstance(own, tuple):
            node.separate = nnx.data(own)
        elif isinstance(node, Linear) and own is not None:
            is_joined = len(own) > node.kernel.shape[1]
            setattr(node, "joined_OI" if is_joined else "kernel_OI", nnx.data(own))


def library_for_prompt(kernels: FewRowKernels) -> Library | None:
    """Returns whose custom calls compute the products of a prompt, None where XLA does."""
    has_calls = any(map(_is_call, kernels.values()))
    return "jaxformer" if has_calls and are_registered("jaxformer") else None


def _is_call(own: Array | tuple[Array, ...] | None) -> bool:
    """Returns whether a layer's entry of ``FewRowKernels`` stands for a custom call."""
    return isinstance(own, tuple) and not own
