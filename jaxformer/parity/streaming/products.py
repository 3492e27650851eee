"""Embeddings and heads whose arrays are too large to be held whole, in passes of a model.

Logits are products of the hidden states with each row of a matrix, and rows do not meet. So the
module's own code is run on a slice of its rows at a time.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxformer.layers import Embedding
from jaxformer.parameters import merge
from jaxformer.parity.recording.torch_values import require_torch
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.casts import DTYPES
from jaxformer.porting.mapping.transfer import read_view

# Numbers of a slice: 64 MiB in float64, which about ten arrays have at a time.
SLICE = 1 << 23
Arrays = Mapping[str, np.ndarray]
# The axis of the vocabulary, by the name of the array; of the others it is the only one.
VOCABULARY_AXIS = {"kernel": 1}


def slices(arrays: Arrays) -> Iterator[tuple[slice, dict[str, np.ndarray]]]:
    """Yields slices of the vocabulary, and the arrays of each."""
    name, matrix = max(arrays.items(), key=lambda item: item[1].ndim)
    axis = VOCABULARY_AXIS.get(name, 0)
    step = max(1, SLICE // matrix.shape[1 - axis])
    for start in range(0, matrix.shape[axis], step):
        part = slice(start, start + step)
        yield (
            part,
            {
                name: array[:, part] if name in VOCABULARY_AXIS else array[part]
                for name, array in arrays.items()
            },
        )


def reference_slice(module: Any, arrays: Arrays, to_tensor: Callable[[np.ndarray], Any]) -> Any:
    """Returns a large head of the reference with a slice of its rows.

    Args:
        module: a linear layer, or an embedding that is also the head.
        arrays: of the slice, by name.
        to_tensor: returns an array as a tensor of the dtype that is wanted.
    """
    torch = require_torch()
    part = copy.copy(module)
    own = {name: torch.nn.Parameter(to_tensor(array)) for name, array in arrays.items()}
    vars(part)["_parameters"] = {**module._parameters, **own}
    for method in ("forward", "attend"):
        # That of the whole head, see ``add_products``.
        vars(part).pop(method, None)
    return part


def candidate_slices(owner: Any, arrays: Arrays, dtype: str) -> Iterator[tuple[slice, Any]]:
    """Yields slices of the vocabulary, and the candidate's head with the arrays of each.

    Args:
        owner: the module.
        arrays: its arrays, by name within it.
        dtype: to run in.
    """
    definition: Any = nnx.split(owner)[0]
    for part, own in slices(arrays):
        wide = {leaf: jnp.asarray(array.astype(DTYPES[dtype])) for leaf, array in own.items()}
        yield part, merge(definition, wide)


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
    torch: Any = require_torch()
    method = "attend" if path.endswith(".attend") else "forward"

    def product(x: Any) -> Any:
        with torch.no_grad():
            parts = [
                getattr(reference_slice(module, own, to_tensor), method)(x)
                for _, own in slices(read())
            ]
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
