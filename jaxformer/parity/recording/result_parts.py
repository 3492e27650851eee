"""The arrays of a result and their paths, on either side."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax

REAL, IMAGINARY = "(real part)", "(imaginary part)"


def opened(leaf: Any) -> Any:
    """Returns a dataclass that JAX does not know as a dict of its fields, another leaf as it is."""
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    fields = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
    return jax.tree.map(opened, fields)


def in_real_parts(named: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yields arrays with their paths; in place of a complex one its real and its imaginary part.

    Args:
        named: tensors or arrays of JAX, with their paths.
    """
    for path, array in named:
        if "complex" in str(getattr(array, "dtype", "")):
            yield f"{path} {REAL}".lstrip(), array.real
            yield f"{path} {IMAGINARY}".lstrip(), array.imag
        else:
            yield path, array


def has_name(path: str) -> bool:
    """Returns whether there is a name in a path; numbers are places in a list."""
    for part in (REAL, IMAGINARY):
        path = path.removesuffix(part).rstrip()
    return any(not part.isdigit() for part in path.split(".") if part)
