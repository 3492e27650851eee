"""Weights, optimizer state and settings between PyTorch and JAX."""

from typing import TYPE_CHECKING

from jaxformer.execution.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from jaxformer.porting.api import from_torch, to_torch
    from jaxformer.porting.checkpoint import load_model, open_checkpoint
    from jaxformer.porting.mapping.naming import export_arrays, import_arrays
    from jaxformer.porting.train_states import train_state_from_torch, train_state_to_torch

__all__ = [
    "export_arrays",
    "from_torch",
    "import_arrays",
    "load_model",
    "open_checkpoint",
    "to_torch",
    "train_state_from_torch",
    "train_state_to_torch",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "export_arrays": "mapping.naming",
        "from_torch": "api",
        "import_arrays": "mapping.naming",
        "load_model": "checkpoint",
        "open_checkpoint": "checkpoint",
        "to_torch": "api",
        "train_state_from_torch": "train_states",
        "train_state_to_torch": "train_states",
    },
)
