"""The two sides of the mirror with equal weights."""

import torch
from flax import nnx

from jaxformer.parameters import get_parameters
from jaxformer.porting import export_arrays


def copy_to_torch(module: nnx.Module, twin: torch.nn.Module) -> None:
    """Gives the twin the module's weights, by the naming rule and strictly."""
    arrays = export_arrays(get_parameters(module))
    dtype = next(iter(arrays.values())).dtype
    twin.to(getattr(torch, dtype.name))
    twin.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in arrays.items()}, strict=True)
