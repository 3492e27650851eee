"""Names of a package whose modules are imported once one of them is asked for."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazily(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A ``__getattr__`` for a package: JAX and torch are imported only by who needs them.

    The command line's --help does not.

    Args:
        package: its name.
        modules: of each public name the module of the package that has it.
    """

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    return get
