"""How several arrays of one code base lie in those of another: fused, by head, in another order.

A ``Packing`` is part of a ``Rule``, see ``rules``. As there, *target* is the jaxformer side. All
arrays have their outputs as first axis.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

Shape = tuple[int, ...]


class Packing:
    """How target arrays lie in source arrays, all with the outputs as first axis: one to one."""

    def count(self, target: int) -> int:
        """Returns the number of source arrays for a number of target arrays."""
        return target

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """Returns the shapes of the source arrays, from those of the target arrays."""
        return tuple(shapes)

    def pack(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the source arrays that hold these target arrays."""
        return list(target)

    def unpack(self, source: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Returns the target arrays, of these shapes, that these source arrays hold."""
        return list(source)


class Fused(Packing):
    """One source array holds the target arrays in turn: GPT-2's c_attn, torch.nn's in_proj."""

    def count(self, target: int) -> int:
        """Returns 1."""
        return 1

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """Returns one shape with the outputs of all."""
        return ((sum(shape[0] for shape in shapes), *shapes[0][1:]),)

    def pack(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Concatenates along the outputs."""
        return [np.concatenate(target)]

    def unpack(self, source: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Splits along the outputs."""
        return np.split(source[0], np.cumsum([shape[0] for shape in shapes])[:-1])


@dataclasses.dataclass(frozen=True)
class FusedByHead(Fused):
    """One source array holds head 0 of every target array, then head 1: GPT-NeoX and BLOOM.

    Where query heads share a key/value head, each of these is preceded by its queries (Falcon).

    >>> packed = FusedByHead(2).pack([np.arange(4), np.array([10, 20]), np.array([30, 40])])
    >>> packed[0].tolist()
    [0, 1, 10, 30, 2, 3, 20, 40]

    Args:
        num_heads: the number of heads, or of groups of them.
    """

    num_heads: int

    def pack(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Interleaves the heads of the target arrays."""
        heads = [array.reshape(self.num_heads, -1, *array.shape[1:]) for array in target]
        return [np.concatenate(heads, axis=1).reshape(-1, *target[0].shape[1:])]

    def unpack(self, source: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Collects the heads of each target array."""
        array = source[0]
        heads = array.reshape(self.num_heads, -1, *array.shape[1:])
        ends = np.cumsum([shape[0] // self.num_heads for shape in shapes])
        parts = np.split(heads, ends[:-1], axis=1)
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


@dataclasses.dataclass(frozen=True)
class ArrayPerHead(Packing):
    """One source array a head, with ``#`` in its name; the target array has all heads."""

    num_heads: int

    def count(self, target: int) -> int:
        """Returns the number of heads."""
        return self.num_heads

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """Returns, for each head, the shape with its share of the outputs."""
        return ((shapes[0][0] // self.num_heads, *shapes[0][1:]),) * self.num_heads

    def pack(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Splits the target array into heads."""
        return np.split(target[0], self.num_heads)

    def unpack(self, source: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Joins the heads."""
        return [np.concatenate(source)]


class FusedByExpert(Fused):
    """One source array holds, for each expert, the outputs of every target array in turn.

    >>> gate, up = np.array([[[1]], [[2]]]), np.array([[[3]], [[4]]])
    >>> FusedByExpert().pack([gate, up])[0].tolist()
    [[[1], [3]], [[2], [4]]]
    """

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """Returns one shape with the outputs of all."""
        experts, _, *inner = shapes[0]
        return ((experts, sum(shape[1] for shape in shapes), *inner),)

    def pack(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Concatenates the outputs of each expert."""
        return [np.concatenate(target, axis=1)]

    def unpack(self, source: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Splits the outputs of each expert."""
        return np.split(source[0], np.cumsum([shape[1] for shape in shapes])[:-1], axis=1)


class NeighboursByExpert(FusedByExpert):
    """One source array holds the outputs of every target array in turn, output by output (gpt-oss).

    >>> gate, up = np.array([[1, 2]]), np.array([[10, 20]])
    >>> NeighboursByExpert().pack([gate, up])[0].tolist()
    [[1, 10, 2, 20]]
    """

    def pack(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Interleaves the outputs of each expert."""
        experts, _, *inner = target[0].shape
        return [np.stack(target, axis=2).reshape(experts, -1, *inner)]

    def unpack(self, source: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Takes every n-th output of each expert."""
        return [source[0][:, place :: len(shapes)] for place in range(len(shapes))]


class RowPerHead(ArrayPerHead):
    """One source array a head, with ``#`` in its name; the target array has a row for each.

    A row may be a matrix: that of an expert.

    >>> RowPerHead(2).pack([np.array([[1, 2], [3, 4]])])
    [array([1, 2]), array([3, 4])]
    """

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """Returns, for each head, the shape of its row."""
        return (shapes[0][1:],) * self.num_heads

    def pack(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Splits the target array into rows."""
        return list(target[0])

    def unpack(self, source: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Stacks the rows."""
        return [np.stack(source)]


@dataclasses.dataclass(frozen=True)
class RotaryPermutation(Packing):
    """Reorders heads between two rotary layouts: one side has halves, the other neighbours.

    A rotary embedding rotates pairs of entries, which are neighbours or lie half a width apart.
    With the first ``width`` outputs of each head reordered, queries and keys on both sides are the
    same vectors in another order, and their products are equal.

    >>> RotaryPermutation(6, 4).pack([np.arange(6)])
    [array([0, 2, 1, 3, 4, 5])]

    Args:
        head_dim: H.
        width: the number of entries of a head that are rotated.
        from_neighbours: whether the source has the neighbours.
        by_row: whether the arrays are (N, H), with a row a head, and not (N · H, …).
    """

    head_dim: int
    width: int
    from_neighbours: bool = False
    by_row: bool = False

    def pack(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Target to source."""
        return [self._reorder(array, to_halves=not self.from_neighbours) for array in target]

    def unpack(self, source: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Source to target."""
        return [self._reorder(array, to_halves=self.from_neighbours) for array in source]

    def _reorder(self, array: np.ndarray, to_halves: bool) -> np.ndarray:
        order = np.arange(self.head_dim)
        pairs = order[: self.width].reshape((-1, 2) if to_halves else (2, -1))
        order[: self.width] = pairs.T.reshape(-1)
        inner = () if self.by_row else array.shape[1:]
        heads = array.reshape(-1, self.head_dim, *inner)
        return heads[:, order].reshape(array.shape)


class Shared(Packing):
    """One source array is each of the target arrays: the first matrix of adapters of one input."""

    def count(self, target: int) -> int:
        """Returns 1."""
        return 1

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """Returns the shape of each."""
        return (shapes[0],)

    def pack(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the first target array, which all others must equal."""
        return [target[0]]

    def unpack(self, source: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Returns the source array for each target array."""
        return [source[0]] * len(shapes)


@dataclasses.dataclass(frozen=True)
class StackedRows(Fused):
    """The target arrays in turn, and rows of zeros to a number of blocks.

    Args:
        blocks: how many arrays of this size there is room for.
    """

    blocks: int

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """Returns one shape with the rows of all blocks."""
        rows, *inner = shapes[0]
        return ((self.blocks * rows, *inner),)

    def pack(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Concatenates, and fills up with zeros."""
        missing = self.blocks - len(target)
        return [np.concatenate([*target, *[np.zeros_like(target[0])] * missing])]

    def unpack(self, source: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Splits, and leaves out what fills up."""
        return np.split(source[0], self.blocks)[: len(shapes)]


@dataclasses.dataclass(frozen=True)
class StackedColumns(Fused):
    """Second matrices of adapters whose first ones are ``StackedRows``: each with its own columns.

    >>> stacked = StackedColumns(2, Fused(), (1, 2, 1), (0, 2))
    >>> stacked.pack([np.array([[5]]), np.array([[7]])])[0].tolist()
    [[5, 0], [0, 0], [0, 0], [0, 7]]

    Args:
        blocks: as there.
        layers: how the layers lie in the array that is adapted.
        outputs: of each of these layers.
        places: those among them that have adapters.
    """

    blocks: int
    layers: Packing
    outputs: tuple[int, ...]
    places: tuple[int, ...]

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """Returns one shape with the outputs of all layers and the columns of all blocks."""
        return self.layers.shapes(self._whole(shapes[0][1]))

    def pack(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Puts each array into its rows and columns; all else is zero."""
        rank = target[0].shape[1]
        whole = [np.zeros(shape, target[0].dtype) for shape in self._whole(rank)]
        for number, (place, array) in enumerate(zip(self.places, target, strict=True)):
            whole[place][:, number * rank : (number + 1) * rank] = array
        return self.layers.pack(whole)

    def unpack(self, source: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Takes each array from its rows and columns."""
        rank = shapes[0][1]
        whole = self.layers.unpack(source, self._whole(rank))
        return [
            whole[place][:, number * rank : (number + 1) * rank]
            for number, place in enumerate(self.places)
        ]

    def _whole(self, rank: int) -> list[Shape]:
        return [(outputs, self.blocks * rank) for outputs in self.outputs]


ONE_TO_ONE = Packing()
SHARED = Shared()


class AsRow(Packing):
    """A vector here is a matrix of one row in the source (BART's bias of the logits)."""

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """Returns the shapes with one axis more, in front."""
        return tuple((1, *shape) for shape in shapes)

    def pack(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Adds the axis."""
        return [array[None] for array in target]

    def unpack(self, source: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Removes the axis."""
        return [array[0] for array in source]


@dataclasses.dataclass(frozen=True)
class Reshaped(Packing):
    """One array has other axes in the source: a convolution's weight, a row with axes of one.

    >>> Reshaped((1, 1, 3)).pack([np.arange(3)])[0].shape
    (1, 1, 3)

    Args:
        shape: of the source array; as many numbers as the target array has, in the same order.
    """

    shape: Shape

    def shapes(self, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """Returns the source's shape."""
        return (self.shape,)

    def pack(self, target: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Gives the array the source's axes."""
        return [target[0].reshape(self.shape)]

    def unpack(self, source: Sequence[np.ndarray], shapes: Sequence[Shape]) -> list[np.ndarray]:
        """Gives the array the target's axes."""
        return [source[0].reshape(shapes[0])]
