"""Packages whose modules are imported when one of their names is used, and not before."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_attributes(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a ``__getattr__`` for a package's ``__init__``.

    Importing the package then costs nothing: ``--help`` needs neither JAX nor torch.

    Args:
        package: its ``__name__``.
        modules: the module, relative to the package, that defines each public name.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return get
