"""The ways to run the one step on several devices."""

from jaxformer.training.data_parallel import DataParallel
from jaxformer.training.device_counts import check_batch_size, check_mesh
from jaxformer.training.device_loop import cut_windows
from jaxformer.training.mesh_parallel import MeshParallel
from jaxformer.training.strategy import Strategy

__all__ = [
    "DataParallel",
    "MeshParallel",
    "Strategy",
    "check_batch_size",
    "check_mesh",
    "cut_windows",
]
