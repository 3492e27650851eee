"""Two models side by side, in PyTorch and in JAX: where they part, and whether it is a bug."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxformer.parity.comparison import assert_parity, compare
    from jaxformer.parity.decoding import compare_generation
    from jaxformer.parity.report import Report
    from jaxformer.parity.trajectories import compare_training

__all__ = ["Report", "assert_parity", "compare", "compare_generation", "compare_training"]

_MODULES = {
    "Report": "report",
    "assert_parity": "comparison",
    "compare": "comparison",
    "compare_generation": "decoding",
    "compare_training": "trajectories",
}


def __getattr__(name: str) -> Any:
    # JAX and torch are imported only by who needs them: the command line's --help does not.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
