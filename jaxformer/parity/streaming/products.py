"""Embeddings and heads whose arrays are too large to be held whole, in passes of a model."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxformer.layers import Embedding
from jaxformer.parity.recording.calls import torch_trace
from jaxformer.parity.segments.calls.products import method_of, run_slice, slices
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.transfer import read_view


def arrays_of(name: str, tensors: Mapping[str, StoredTensor]) -> dict[str, np.ndarray]:
    """Returns the arrays of a module, given its name and those of the whole model."""
    return {
        leaf: read_view(tensor)
        for full, tensor in tensors.items()
        for path, _, leaf in [full.rpartition(".")]
        if path == name
    }


def add_products(
    module: Any,
    path: str,
    read: Callable[[], dict[str, np.ndarray]],
    to_tensor: Callable[[np.ndarray], Any],
) -> None:
    """Makes a large head of the reference compute its product slice by slice.

    Args:
        module: a linear layer, or an embedding that is also the head.
        path: of the head; it ends in the name of the method if it is an embedding's.
        read: returns its arrays, in PyTorch's layout.
        to_tensor: returns an array as a tensor of the dtype of the pass.
    """
    torch: Any = torch_trace.require_torch()
    method = method_of(path)

    def product(x: Any) -> Any:
        with torch.no_grad():
            parts = [run_slice(module, method, own, to_tensor, x)[0] for _, own in slices(read())]
        return torch.cat(parts, -1)

    vars(module)[method] = product


class FewRows(Embedding):
    """An embedding that holds only the rows of some ids; it is called with the same ids."""

    def __init__(self, rows: Any, table: Any):
        self.rows = rows
        self.embedding = nnx.Param(table)

    def __call__(self, ids: Any) -> Any:
        """Returns the rows of ``ids``, which must be among those that are held."""
        return super().__call__(jnp.searchsorted(jnp.asarray(self.rows.array), ids))
