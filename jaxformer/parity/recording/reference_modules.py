"""The modules of a reference by path, and its methods that are called like modules."""

from typing import Any

# Methods that are called like modules (as in torch_ref): path of the module + name.
METHODS = ("attend",)


def modules_of(module: Any) -> dict[str, Any]:
    """Returns all modules by path, and by path + name the owners of methods called like modules."""
    found = {}
    for path, inner in module.named_modules():
        found[path] = inner
        for name in METHODS:
            if callable(getattr(inner, name, None)):
                found[f"{path}.{name}".lstrip(".")] = inner
    return found


def owner_of(path: str, module: Any) -> str:
    """Returns the path of the module itself, also where ``path`` is that of a called method."""
    owner, _, name = path.rpartition(".")
    return owner if name in METHODS and callable(getattr(module, name, None)) else path
