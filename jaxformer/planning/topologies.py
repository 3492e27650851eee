"""The devices that a plan is for: their kind, their number, and how fast they are connected."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from jaxformer.errors import UsageError
from jaxformer.hardware.accelerators import ACCELERATORS, Accelerator

# A ring of a torus closes at this many chips on v5e and v6e; elsewhere where every dimension is a
# multiple of four (the pages of v5e, v6e, v4 and v5p).
CLOSED_2D, CLOSED_3D = 16, 4


@dataclasses.dataclass(frozen=True)
class Topology:
    """A number of devices of one kind, connected to each other.

    Attributes:
        accelerator: the kind.
        shape: such as (4, 4) for a TPU slice, or (8,) for eight GPUs.
    """

    accelerator: Accelerator
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, name: str) -> "Topology":
        """Returns the topology of a name such as ``v5e:4x4``, ``v5p:2x2x1`` or ``H100:64``.

        Raises:
            UsageError: there is no such kind, or the shape is not one of its slices.
        """
        kind, _, shape = name.partition(":")
        found = next((a for a in ACCELERATORS if a.name.lower() == kind.lower()), None)
        if found is None:
            known = ", ".join(a.name for a in ACCELERATORS)
            raise UsageError(f"--topology {name}: there is no {kind}; choose among {known}")
        dimensions = 0 if found.links is None else found.links.dimensions
        if not re.fullmatch(r"[1-9]\d{0,5}(x[1-9]\d{0,5})*", shape):
            example = "x".join("2" * (dimensions or 1)) if dimensions else "8"
            raise UsageError(f"--topology {name}: say how many, such as {found.name}:{example}")
        sizes = tuple(int(size) for size in shape.split("x"))
        if len(sizes) != max(dimensions, 1):
            raise UsageError(
                f"--topology {name}: a slice of {found.name} has {dimensions} dimensions"
                if dimensions
                else f"--topology {name}: {found.name} is counted, such as {found.name}:8"
            )
        return cls(found, sizes)

    @property
    def count(self) -> int:
        """How many devices there are."""
        return math.prod(self.shape)

    @property
    def is_tpu(self) -> bool:
        """Whether libtpu compiles for it."""
        return self.accelerator.pattern.startswith("TPU")

    def rate(self, axes: Sequence[str], mesh: Mapping[str, int]) -> float | None:
        """Returns the bytes per second that a device sends along axes of a mesh.

        A torus carries a ring in each dimension, over two links where it closes and over one where
        it does not; a group of n devices has as many dimensions, the longest first, as hold n. Of
        GPUs in one host all links serve; across hosts each carries what its network takes, and all
        of a group's devices in one host share in that.

        Args:
            axes: some of the mesh.
            mesh: sizes of all axes; along the last one, devices are neighbours.

        Returns:
            None where the accelerator's links, or the network they would need, are unknown.
        """
        links = self.accelerator.links
        if links is None:
            return None
        if links.dimensions:
            usable, held = 0, 1
            for size in sorted(self.shape, reverse=True):
                if held < math.prod(mesh[axis] for axis in axes) and size > 1:
                    usable, held = usable + (2 if self._closes(size) else 1), held * size
            return links.rate * usable / (2 * links.dimensions)
        if links.joined is None or self._per_host(axes, mesh) == math.prod(mesh[a] for a in axes):
            return links.rate
        if links.network is None:
            return None
        return min(links.rate, links.network * self._per_host(axes, mesh))

    def _closes(self, size: int) -> bool:
        if len(self.shape) == 2:
            return size == CLOSED_2D
        return all(each % CLOSED_3D == 0 for each in self.shape)

    def _per_host(self, axes: Sequence[str], mesh: Mapping[str, int]) -> int:
        """Returns how many of the first device's group are in its host, itself included."""
        joined = self.accelerator.links.joined if self.accelerator.links else None
        numbers = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
        group = numbers[tuple(slice(None) if axis in axes else 0 for axis in mesh)]
        return int(np.sum(group < (joined or numbers.size)))
