"""The two sides of the mirror with equal weights."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jaxformer.parameters import get_parameters, set_parameters
from jaxformer.porting import export_arrays


def perturb(module: nnx.Module, seed: int = 0, std: float = 0.1, dtype: Any = np.float64) -> None:
    """Moves every parameter away from its initial value: ones and zeros hide swapped leaves."""
    random = np.random.default_rng(seed)
    moved = {
        name: jnp.asarray(np.asarray(p) + std * random.standard_normal(p.shape), dtype)
        for name, p in sorted(get_parameters(module).items())
    }
    set_parameters(module, moved)


def copy_to_torch(module: nnx.Module, twin: torch.nn.Module) -> None:
    """Gives the twin the module's weights, by the naming rule and strictly."""
    arrays = export_arrays(get_parameters(module))
    dtype = next(iter(arrays.values())).dtype
    twin.to(getattr(torch, dtype.name))
    twin.load_state_dict({k: torch.from_numpy(v.copy()) for k, v in arrays.items()}, strict=True)
