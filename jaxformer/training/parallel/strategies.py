"""The ways to run the one step on several devices."""

from jaxformer.training.device_loop import cut_windows
from jaxformer.training.parallel.device_counts import check_batch_size, check_mesh
from jaxformer.training.parallel.mesh import MeshParallel
from jaxformer.training.parallel.pmap import DataParallel
from jaxformer.training.parallel.strategy import Strategy

__all__ = [
    "DataParallel",
    "MeshParallel",
    "Strategy",
    "check_batch_size",
    "check_mesh",
    "cut_windows",
]
