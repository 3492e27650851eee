"""The memory, speed and links of known accelerators, from their makers' data sheets.

Peaks are of matrix products without sparsity, in operations per second (a multiplication and an
addition are two), for one JAX device. NVIDIA: the data sheets of V100, T4, A10, A30, A40, A100, L4,
L40S, H100, H200 and HGX B200, whose figures with sparsity are halved here, and the GA102, Ada and
RTX Blackwell white papers for the GeForce cards, at float32 accumulation. TPU: the system
architecture pages of Cloud TPU; a v3 chip is two JAX devices.

Memory bandwidths are of the same pages (B200: an eighth of DGX B200's 64 TB/s). So are links, whose
figures for both directions together are halved here; bridges between pairs of cards are left out.
Networks between hosts are those of NVIDIA's own systems: DGX-1 (four 100 Gb/s adapters for eight
GPUs), DGX A100 (eight of 200 Gb/s), DGX H100, H200 and B200 (eight of 400 Gb/s). TPU v4's links:
Jouppi et al., arXiv 2304.01433, table 4.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import jax

from jaxformer.hardware.units import format_rate

TERA = 1e12
GIGA = 10**9


@dataclass(frozen=True)
class Links:
    """How devices of one kind are connected; rates are of what one device sends.

    Attributes:
        name: its common name.
        rate: over all its links together, in bytes per second.
        joined: the largest number of devices that they join; None if a slice can have any size.
        dimensions: of the torus that the links make, two links in each; 0 where all devices reach
            each other through a switch.
        network: between groups of joined devices, in bytes per second; None where unknown.
    """

    name: str
    rate: float
    joined: int | None = 8
    dimensions: int = 0
    network: float | None = None


@dataclass(frozen=True)
class Accelerator:
    """One JAX device of a kind.

    Attributes:
        name: its common name.
        pattern: a regular expression for the whole ``jax.Device.device_kind``.
        memory: in bytes, as advertised; a system keeps some of it for itself.
        bfloat16: peak in operations per second; None where the device has no such units.
        tensor_float32: peak of float32 products that round their factors (TF32, or bfloat16 on a
            TPU), which JAX's default precision allows; None where there are no such units.
        float32: peak of float32 products that round nothing; None where no data sheet says.
        bandwidth: of its memory, in bytes per second.
        links: to other devices of the kind; None where unknown.
    """

    name: str
    pattern: str
    memory: float
    bfloat16: float | None
    tensor_float32: float | None
    float32: float | None
    bandwidth: float
    links: Links | None

    def peak(self, dtype: str, precision: str | None = None) -> float | None:
        """Returns the peak for arrays of ``dtype`` at JAX's matmul precision, or None if unknown.

        Args:
            dtype: float32 or bfloat16.
            precision: ``jax.config.jax_default_matmul_precision``.
        """
        if dtype == "bfloat16":
            return self.bfloat16
        if dtype == "float32" and precision in (None, "default", "fastest", "tensorfloat32"):
            return self.tensor_float32 or self.float32
        return self.float32 if dtype == "float32" else None


PCIE_3, PCIE_4, PCIE_5 = (
    Links(f"PCIe {n}", rate * GIGA) for n, rate in ((3, 16), (4, 32), (5, 64))
)
NVLINK_2 = Links("NVLink 2", 150 * GIGA, network=6.25 * GIGA)
NVLINK_3 = Links("NVLink 3", 300 * GIGA, network=25 * GIGA)
NVLINK_4 = Links("NVLink 4", 450 * GIGA, network=50 * GIGA)
NVLINK_5 = Links("NVLink 5", 900 * GIGA, network=50 * GIGA)


def _gpu(
    name: str,
    pattern: str,
    gigabytes: float,
    bfloat16: float | None,
    tensor_float32: float | None,
    float32: float,
    bandwidth: float,
    links: Links,
) -> Accelerator:
    halves, rounded = (None if p is None else p * TERA for p in (bfloat16, tensor_float32))
    return Accelerator(
        name,
        f"(NVIDIA |Tesla )?{pattern}",
        gigabytes * GIGA,
        halves,
        rounded,
        float32 * TERA,
        bandwidth * GIGA,
        links,
    )


def _tpu(
    name: str,
    pattern: str,
    gigabytes: float,
    bfloat16: float,
    bandwidth: float,
    links: Links | None,
) -> Accelerator:
    peak, memory = bfloat16 * TERA, gigabytes * GIGA
    return Accelerator(name, f"TPU ({pattern})", memory, peak, peak, None, bandwidth * GIGA, links)


def _ici(rate: float, dimensions: int) -> Links:
    return Links("ICI", rate * GIGA, None, dimensions)


ACCELERATORS = (
    _gpu("T4", "T4", 16, None, None, 8.1, 300, PCIE_3),
    _gpu("V100-16GB", "V100-SXM2-16GB", 16, None, None, 15.7, 900, NVLINK_2),
    _gpu("V100-32GB", "V100-SXM2-32GB", 32, None, None, 15.7, 900, NVLINK_2),
    _gpu("A10", "A10", 24, 125, 62.5, 31.2, 600, PCIE_4),
    _gpu("A30", "A30", 24, 165, 82, 10.3, 933, PCIE_4),
    _gpu("A40", "A40", 48, 149.7, 74.8, 37.4, 696, PCIE_4),
    _gpu("A100-40GB", "A100-SXM4-40GB", 40, 312, 156, 19.5, 1555, NVLINK_3),
    _gpu("A100-40GB-PCIe", "A100-PCIE-40GB", 40, 312, 156, 19.5, 1555, PCIE_4),
    _gpu("A100-80GB", "A100-SXM4-80GB", 80, 312, 156, 19.5, 2039, NVLINK_3),
    _gpu("A100-80GB-PCIe", "A100 80GB PCIe", 80, 312, 156, 19.5, 1935, PCIE_4),
    _gpu("L4", "L4", 24, 121, 60, 30.3, 300, PCIE_4),
    _gpu("L40S", "L40S", 48, 362, 183, 91.6, 864, PCIE_4),
    _gpu("H100", "H100 80GB HBM3", 80, 989.4, 494.7, 67, 3350, NVLINK_4),
    _gpu("H100-PCIe", "H100 PCIe", 80, 756, 378, 51, 2000, PCIE_5),
    _gpu("H100-NVL", "H100 NVL", 94, 835, 417.5, 60, 3900, PCIE_5),
    _gpu("H200", "H200", 141, 989.4, 494.7, 67, 4800, NVLINK_4),
    _gpu("H200-NVL", "H200 NVL", 141, 835, 417.5, 60, 4800, PCIE_5),
    _gpu("B200", "B200", 180, 2250, 1100, 75, 8000, NVLINK_5),
    _gpu("RTX-3090", "GeForce RTX 3090", 24, 71, 35.6, 35.6, 936, PCIE_4),
    _gpu("RTX-4090", "GeForce RTX 4090", 24, 165.2, 82.6, 82.6, 1008, PCIE_4),
    _gpu("RTX-5090", "GeForce RTX 5090", 32, 209.5, 104.8, 104.8, 1792, PCIE_5),
    _tpu("v3", "v3", 16, 61.5, 450, None),
    _tpu("v4", "v4", 32, 275, 1200, _ici(300, 3)),
    _tpu("v5e", "v5 lite|v5e", 16, 197, 800, _ici(200, 2)),
    _tpu("v5p", "v5|v5p", 95, 459, 2765, _ici(600, 3)),
    _tpu("v6e", "v6 lite|v6e", 32, 918, 1600, _ici(400, 2)),
)


def find_accelerator(device_kind: str) -> Accelerator | None:
    """Returns the accelerator with JAX's name ``device_kind``, or None if the table has none.

    A part of a card (MIG), a laptop's or another edition of it has other peaks and is not found.
    """
    for accelerator in ACCELERATORS:
        if re.fullmatch(accelerator.pattern, device_kind):
            return accelerator
    return None


@dataclass(frozen=True)
class Utilization:
    """The share of the devices' peak that a run uses.

    Attributes:
        operations: of one token, as ``costs.count_training_operations`` counts them.
        peak: of all devices together, in operations per second; None where unknown.
    """

    operations: int
    peak: float | None

    @classmethod
    def of(cls, operations: int, devices: Sequence[jax.Device], dtype: str) -> "Utilization":
        """Returns the utilization of ``devices``, all of one kind, in products of ``dtype``."""
        accelerator = find_accelerator(devices[0].device_kind)
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        peak = None if accelerator is None else accelerator.peak(dtype, precision)
        return cls(operations, None if peak is None else peak * len(devices))

    def record(self, tokens_per_second: float) -> dict[str, float]:
        """Returns ``model_flops_utilization``, a share of the peak, if that is known."""
        if self.peak is None:
            return {}
        return {"model_flops_utilization": self.operations * tokens_per_second / self.peak}

    def describe(self, tokens_per_second: float) -> str:
        """Returns the utilization in words, or operations per second where the peak is unknown."""
        for share in self.record(tokens_per_second).values():
            return f"{100 * share:.1f}% MFU"
        return format_rate(self.operations * tokens_per_second)
