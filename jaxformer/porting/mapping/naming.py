"""The naming rule: names and layouts of parameters in jaxformer and in torch_ref.

=================== ================== ================ =========
owner               torch_ref leaf     jaxformer leaf   transform
=================== ================== ================ =========
Linear              weight (out, in)   kernel (in, out) transpose
ExpertWeights       weight (E, O, I)   kernel (E, I, O) transpose
Linear, LayerNorm   bias               bias             none
LayerNorm, RMSNorm  weight             scale            none
Embedding           weight             embedding        none
XIELU               alpha_p, alpha_n   the same         none
Router              choice_bias        the same         none
MultiHeadAttention  sinks              the same         none
=================== ================== ================ =========
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxformer.errors import CheckpointError, mismatches

TORCH_LEAVES = {
    "kernel": "weight", "scale": "weight", "embedding": "weight",
    **{leaf: leaf for leaf in ("bias", "alpha_p", "alpha_n", "choice_bias", "sinks")},
}  # fmt: skip


def torch_name(name: str) -> str:
    """Returns the torch_ref name of a jaxformer parameter.

    >>> torch_name("blocks.3.attention.q_proj.kernel")
    'blocks.3.attention.q_proj.weight'
    """
    owner, _, leaf = name.rpartition(".")
    return ".".join(part for part in (owner, TORCH_LEAVES[leaf]) if part)


def export_arrays(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns jaxformer arrays (parameters, gradients, moments) in torch_ref's names and layout."""
    return {torch_name(name): _transpose(name, np.asarray(a)) for name, a in arrays.items()}


def import_arrays(
    arrays: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Returns torch_ref arrays in jaxformer's names and layout.

    Args:
        arrays: by torch_ref's names.
        shapes: of the jaxformer parameters by name; each must be found, and nothing else.

    Raises:
        CheckpointError: a key is missing, unexpected or of another shape; all are listed.
    """
    names = {torch_name(name): name for name in shapes}
    problems = mismatches(
        {key: _torch_shape(name, tuple(shapes[name])) for key, name in names.items()},
        {key: np.shape(array) for key, array in arrays.items()},
        "has shape",
    )
    if problems:
        raise CheckpointError("; ".join(problems))
    return {name: _transpose(name, np.asarray(arrays[key])) for key, name in names.items()}


def turned_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of a matrix, or of one for each expert, after a transpose.

    >>> turned_shape((8, 2, 3))
    (8, 3, 2)
    """
    return (*shape[:-2], *shape[:-3:-1])


def turned(array: np.ndarray) -> np.ndarray:
    """Returns the transpose of a matrix, or of each expert's matrix, as a view."""
    return np.swapaxes(array, -1, -2)


def _torch_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return turned_shape(shape) if name.endswith("kernel") else shape


def _transpose(name: str, array: np.ndarray) -> np.ndarray:
    # A copy: numpy's view of a JAX array is read-only, and a transposed view is not contiguous.
    return np.array(turned(array) if name.endswith("kernel") else array, order="C")
