"""What is known of a reference's parameters: their names and numbers, and what is not trained."""

from typing import Any

import numpy as np

from jaxformer.parity.recording.torch_values import require_torch, view


def first_names(module: Any) -> dict[str, str]:
    """Returns the first name of each parameter and buffer, by every name that it has."""
    first: dict[int, str] = {}
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def padding_rows(module: Any) -> dict[str, int]:
    """Returns the row of the padding token of each embedding that has one, by its parameter."""
    torch = require_torch()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        names[id(inner.weight)]: inner.padding_idx
        for inner in module.modules()
        if isinstance(inner, torch.nn.Embedding) and inner.padding_idx is not None
        if id(inner.weight) in names
    }


def frozen_names(module: Any) -> frozenset[str]:
    """Returns the parameters that a module does not train, by name; none if it trains no other.

    Who runs a model, and does not train it, may have all of them frozen.
    """
    trainable = {
        name: parameter.requires_grad
        for name, parameter in module.named_parameters()
        if parameter.is_floating_point() or parameter.is_complex()
    }
    frozen = frozenset(name for name, is_trained in trainable.items() if not is_trained)
    return frozen if len(frozen) < len(trainable) else frozenset()


def stored_numbers(parameter: Any) -> np.ndarray:
    """Returns the numbers of a parameter as they are kept, or in float32 if they have 16 bits."""
    array = view(parameter)
    if array.dtype.kind == "c":
        return np.stack([array.real, array.imag], -1)
    return array.astype(np.float32) if array.dtype.itemsize == 2 else array
