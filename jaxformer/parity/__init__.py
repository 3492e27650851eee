"""Two models side by side, in PyTorch and in JAX: where they part, and whether it is a bug."""

from typing import TYPE_CHECKING

from jaxformer.execution.lazy_imports import lazy_attributes

if TYPE_CHECKING:
    from jaxformer.parity.compare.generation import compare_generation
    from jaxformer.parity.compare.modules import assert_parity, compare
    from jaxformer.parity.compare.training import compare_training
    from jaxformer.parity.report.model import Report

__all__ = ["Report", "assert_parity", "compare", "compare_generation", "compare_training"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "Report": "report.model",
        "assert_parity": "compare.modules",
        "compare": "compare.modules",
        "compare_generation": "compare.generation",
        "compare_training": "compare.training",
    },
)
