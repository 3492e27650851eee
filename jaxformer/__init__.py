"""Transformers in JAX that compute the same as their PyTorch twins.

Every component here has a twin of the same name in ``torch_ref``: same file, same class,
same constructor keywords, same attribute paths.

Dimension letters, used in every signature of the project:

======  =====================================================
letter  meaning
======  =====================================================
B       batch
T       query length, in tokens
S       key length, in tokens
D       model width (``d_model``)
N       query heads (``num_heads``)
K       key/value heads (``num_kv_heads``)
H       head width (``head_dim``)
F       feed-forward width (``d_ff``)
V       vocabulary (``vocab_size``)
L       layers (``num_layers``)
A       micro-batches whose gradients are averaged in one step
E       experts of a mixture
C       experts that compute a token
======  =====================================================

A local variable whose layout matters carries it: ``q_BTNH``. Masks are boolean, True = may attend.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxformer.hardware.nvidia_driver import skip_version_check_without_driver

__version__ = "0.1.0"


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


# JAX must not have looked for its devices: whoever imports a part of jaxformer comes here first.
skip_version_check_without_driver()
