"""The shortest time that a step can take: a model's estimate, not a measurement.

Three times bound a step: its operations over the peak of the devices, the bytes that pass through
a device's memory over its bandwidth, and the bytes that it sends over the rate of its links
(Williams, Waterman and Patterson, 2009). The step takes the longest of the three if all else hides
behind it perfectly, which is the best case.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxformer.planning.collectives import Collective
from jaxformer.planning.topologies import Topology


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The times that bound a step, in seconds; None where a rate is unknown.

    Attributes:
        compute: for its operations, those computed again to save memory included.
        memory: for what passes through a device's memory.
        interconnect: for what a device sends, one collective after the other.
        utilization: the model's operations, nothing counted twice, as a share of those that the
            devices could compute in the longest of the three times.
    """

    compute: float | None
    memory: float
    interconnect: float | None
    utilization: float | None

    @property
    def seconds(self) -> float | None:
        """The time of a step, the longest of the three; None where one is unknown."""
        times = (self.compute, self.memory, self.interconnect)
        return None if None in times else max(t for t in times if t is not None)

    @property
    def bound(self) -> str | None:
        """The name of the longest of the three; None where one is unknown."""
        named = {n: getattr(self, n) for n in ("compute", "memory", "interconnect")}
        return next((n for n, t in named.items() if t == self.seconds), None)

    def to_dict(self) -> dict[str, Any]:
        """A plain dict, for JSON."""
        return {**dataclasses.asdict(self), "seconds": self.seconds, "bound": self.bound}


def find_roofline(
    topology: Topology,
    mesh: Mapping[str, int],
    *,
    dtype: str,
    model_operations: float,
    operations: float,
    traffic: float,
    collectives: Sequence[Collective],
    precision: str | None = None,
) -> Roofline:
    """Returns the roofline of one step.

    Args:
        topology: the devices.
        mesh: sizes of its axes.
        dtype: what products are made in.
        model_operations: of a step, on all devices, nothing counted twice.
        operations: those that are made.
        traffic: bytes through one device's memory in a step.
        collectives: of a step.
        precision: see ``Accelerator.peak``.
    """
    peak = topology.accelerator.peak(dtype, precision)
    compute = None if peak is None else operations / (peak * topology.count)
    memory = traffic / topology.accelerator.bandwidth
    times = []
    for one in collectives:
        rate = topology.rate(one.axes, mesh)
        times.append(None if rate is None else one.sent / rate)
    interconnect = None if None in times else math.fsum(t for t in times if t is not None)
    found = Roofline(compute, memory, interconnect, None)
    if peak is None or found.seconds is None:
        return found
    share = model_operations / (peak * topology.count * found.seconds)
    return dataclasses.replace(found, utilization=share)
