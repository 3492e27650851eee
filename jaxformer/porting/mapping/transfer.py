"""Converts tensors between source and target by links; each is converted when it is read."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.packings import Shape
from jaxformer.porting.mapping.rules import Link, contiguous

Tensors = Mapping[str, StoredTensor]


def import_tensors(links: Iterable[Link], tensors: Tensors) -> dict[str, StoredTensor]:
    """Returns target tensors (parameters or moments) from source tensors, to be read in order."""
    return {name: tensor for each in links for name, tensor in _target_of(each, tensors)}


def export_tensors(links: Iterable[Link], tensors: Tensors) -> dict[str, StoredTensor]:
    """Returns source tensors (parameters or moments) from target tensors, to be read in order."""
    return {name: tensor for each in links for name, tensor in _source_of(each, tensors)}


def _target_of(each: Link, tensors: Tensors) -> list[tuple[str, StoredTensor]]:
    sources = [tensors[name] for name in each.source]
    return _converted(each.target, each.target_shapes, sources, each.view_as_target)


def _source_of(each: Link, tensors: Tensors) -> list[tuple[str, StoredTensor]]:
    sources = [tensors[name] for name in each.target]
    return _converted(each.source, each.source_shapes, sources, each.view_as_source)


def _converted(
    names: Sequence[str],
    shapes: Sequence[Shape],
    sources: Sequence[StoredTensor],
    convert: Callable[[Sequence[np.ndarray]], list[np.ndarray]],
) -> list[tuple[str, StoredTensor]]:
    """Returns tensors that are converted together when the first of them is read."""
    waiting: dict[int, np.ndarray] = {}

    def view(place: int) -> np.ndarray:
        if place not in waiting:
            waiting.clear()
            waiting.update(enumerate(convert([read_view(source) for source in sources])))
        return waiting.pop(place)

    def tensor(place: int, shape: Shape) -> StoredTensor:
        read = _Read(functools.partial(view, place))
        return StoredTensor(shape, sources[0].dtype, read)

    return [
        (name, tensor(place, shape))
        for place, (name, shape) in enumerate(zip(names, shapes, strict=True))
    ]


@dataclasses.dataclass(frozen=True)
class _Read:
    """Reads a converted tensor, or a view of it for another conversion.

    A matrix that is transposed on import and again on export is never copied: a port from one
    PyTorch layout to another holds it once.
    """

    view: Callable[[], np.ndarray]

    def __call__(self) -> np.ndarray:
        array = contiguous(self.view())
        # A view of what others hold cannot be written to.
        return array if array.flags.writeable else array.copy()


def read_view(source: StoredTensor) -> np.ndarray:
    """Returns a tensor, which the caller only reads.

    It may be a view of what others hold, and need not be C-contiguous.
    """
    view: Callable[[], np.ndarray] = getattr(source.read, "view", source.read)
    return view()
