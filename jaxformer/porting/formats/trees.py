"""Nested dicts, lists and tuples of values and tensors, as checkpoints hold them."""

from collections.abc import Iterator
from typing import Any

from jaxformer.errors import CheckpointError, UnsafeFileError
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.storage.local_files import safe_repr

MAX_VALUES = 10_000_000
MAX_DEPTH = 100


def walk(tree: Any, place: str) -> Iterator[tuple[str, StoredTensor]]:
    """Yields every tensor of a tree that was read from a file, with its place."""
    if isinstance(tree, StoredTensor):
        yield place, tree
    elif isinstance(tree, dict | list | tuple):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for key, value in items:
            yield from walk(value, below(place, key))


def below(place: str, key: Any) -> str:
    """Returns the place of a value below a place, such as ``model/lm_head.weight``."""
    return f"{place}/{key}" if place else str(key)


def check_tree(tree: Any, where: str) -> int:
    """Checks a tree of plain values; returns the bytes of its tensors, counted at every place.

    A container that is at several places counts at each of them: forty pairs, each of the next one
    twice, unfold to 10^12 values when a program walks through them.

    Raises:
        UnsafeFileError: the tree is nested too deeply, contains itself, or unfolds to more than
            any checkpoint has.
        CheckpointError: it holds a stand-in: something was saved that is not a value.
    """
    known: dict[int, tuple[int, int, int]] = {}

    def measure(node: Any, depth: int) -> tuple[int, int, int]:
        """Returns how many values a node unfolds to, how deep it is, and its tensors' bytes."""
        if isinstance(node, StoredTensor):
            return 1, 0, node.nbytes
        if node is None or isinstance(node, str | bytes | bool | int | float):
            return 1, 0, 0
        if not isinstance(node, dict | list | tuple | set):
            raise CheckpointError(
                f"{where} holds {safe_repr(node)}, which is not a value; save the state_dict alone"
            )
        if id(node) not in known:
            if depth > MAX_DEPTH:
                raise _bomb(where)
            children = node.values() if isinstance(node, dict) else node
            count, height, total = 1, 0, 0
            for child in children:
                values, levels, size = measure(child, depth + 1)
                count, height, total = count + values, max(height, levels), total + size
            known[id(node)] = count, height + 1, total
        count, height, total = known[id(node)]
        if count > MAX_VALUES or depth + height > MAX_DEPTH + 1:
            raise _bomb(where)
        return count, height, total

    return measure(tree, 0)[2]


def _bomb(where: str) -> UnsafeFileError:
    return UnsafeFileError(
        f"{where} is nested more than {MAX_DEPTH} deep or unfolds to millions of values; "
        "do not use this file"
    )
