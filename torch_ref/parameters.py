"""A module's parameters as a flat dict of numpy arrays, by path."""

import numpy as np
import torch

Parameters = dict[str, np.ndarray]


def get_parameters(module: torch.nn.Module) -> Parameters:
    """Returns copies of the parameters by path, bfloat16 as float32 (numpy has none)."""
    return {name: to_numpy(parameter) for name, parameter in module.named_parameters()}


def set_parameters(module: torch.nn.Module, parameters: Parameters) -> None:
    """Puts new values in place of the module's parameters, each kept in the parameter's dtype.

    Raises:
        RuntimeError: a name is missing or unknown, or a shape differs (torch lists them all).
    """
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in parameters.items()}
    module.load_state_dict(tensors, strict=True)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Returns a copy of the tensor as a numpy array."""
    tensor = tensor.detach().cpu()
    return (
        tensor.to(torch.float32 if tensor.dtype == torch.bfloat16 else tensor.dtype).numpy().copy()
    )
