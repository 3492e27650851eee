"""Whether an NVIDIA GPU can be used here, found without starting CUDA; free of JAX.

JAX's CUDA plugin asks NVIDIA's libraries for their versions before it looks for a GPU. Where no
driver is there to answer, cuPTI 13.2, which PyTorch 2.15 brings, calls itself until the stack is
full, and the process ends with a segmentation fault and no message; later versions of it make JAX
print a traceback. Without a driver the question can be left out: JAX then finds no GPU, and takes
the CPU.
"""

import ctypes
import os
from pathlib import Path

from jaxformer.errors import DeviceError

SKIP_VERSION_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"
# A GPU of the host, and one that Windows lends to Linux.
NODES = (Path("/dev/nvidia0"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
LIBRARY = "libcuda.so.1"


def has_driver() -> bool:
    """Whether there is a GPU's device node, and the driver's library can be loaded.

    CUDA is not started: what it reads at its start, such as ``CUDA_VISIBLE_DEVICES``, may still be
    set afterwards.
    """
    if not any(node.exists() for node in NODES):
        return False
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


def skip_version_check_without_driver() -> None:
    """Makes JAX's CUDA plugin ask for no versions where no driver could answer.

    It has an effect until JAX looks for its devices, and sets an environment variable that child
    processes inherit.
    """
    if SKIP_VERSION_CHECK not in os.environ and not has_driver():
        os.environ[SKIP_VERSION_CHECK] = "1"


def check_requested_platform() -> None:
    """Rejects ``JAX_PLATFORMS=cuda`` where no GPU can be used.

    Raises:
        DeviceError: JAX is asked for NVIDIA GPUs, and there is no driver.
    """
    requested = os.environ.get("JAX_PLATFORMS", "")
    if "cuda" in requested.split(",") and not has_driver():
        raise DeviceError(
            f"JAX_PLATFORMS={requested} asks for a GPU, and NVIDIA's driver ({LIBRARY} and "
            "/dev/nvidia0) is not here: install it, start the container with --gpus all, or unset "
            "JAX_PLATFORMS"
        )
