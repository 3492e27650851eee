"""NVIDIA GPUs that need not be here: what XLA must know of them to compile for them.

Nothing is measured on a device, so XLA takes its default tiles where on a GPU it would measure,
and libraries' workspaces may differ. Figures of chips: NVIDIA's white papers on the A100 and H100,
and the CUDA C++ Programming Guide's table of compute capabilities.
"""

import dataclasses
import os
from typing import Any

import jax
from jax.experimental import topologies

from jaxformer.errors import DeviceError
from jaxformer.planning.topologies import Topology


@dataclasses.dataclass(frozen=True)
class Chip:
    """The properties of a GPU that XLA takes into account.

    Attributes:
        name: what JAX calls it.
        capability: CUDA's compute capability.
        processors: streaming multiprocessors.
        lanes: float32 units of each.
        shared: KiB of shared memory of each.
        cache: MiB of L2.
        clock: GHz, at most.
    """

    name: str
    capability: tuple[int, int]
    processors: int
    lanes: int
    shared: int
    cache: int
    clock: float


# By name in ``hardware.accelerators.ACCELERATORS``.
CHIPS = {
    "A100-40GB": Chip("NVIDIA A100-SXM4-40GB", (8, 0), 108, 64, 164, 40, 1.41),
    "A100-80GB": Chip("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 164, 40, 1.41),
    "H100": Chip("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 228, 50, 1.98),
    "H200": Chip("NVIDIA H200", (9, 0), 132, 128, 228, 50, 1.98),
}


def describe_gpus(topology: Topology) -> Any | None:
    """Returns GPUs as ``jax.experimental.topologies`` describes them, all in one host.

    Returns:
        None where JAX has no CUDA plugin here, or the kind's chip is not in the table.

    Raises:
        DeviceError: the plugin rejects the description.
    """
    chip = CHIPS.get(topology.accelerator.name)
    if chip is None:
        return None
    # Without a driver the plugin otherwise does not load, and this call loads it.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    jax.devices()
    try:
        return topologies.get_topology_desc(
            topology.accelerator.name,
            "cuda",
            topology=f"1x1x{topology.count}",
            target_config=_describe(topology, chip),
        )
    except NotImplementedError:
        return None
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        raise DeviceError(
            f"{topology.accelerator.name} cannot be compiled for: {reason}; use --model-only"
        ) from error


def _describe(topology: Topology, chip: Chip) -> str:
    """Returns XLA's ``GpuTargetConfigProto``, as text; sizes in bytes."""
    accelerator = topology.accelerator
    major, minor = chip.capability
    shared = chip.shared * 2**10
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  shared_memory_per_block: {48 * 2**10}
  shared_memory_per_block_optin: {shared - 2**10}
  shared_memory_per_core: {shared}
  core_count: {chip.processors}
  fpus_per_core: {chip.lanes}
  l2_cache_size: {chip.cache * 2**20}
  clock_rate_ghz: {chip.clock}
  memory_bandwidth: {int(accelerator.bandwidth)}
  device_memory_size: {int(accelerator.memory)}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{chip.name}"
"""
