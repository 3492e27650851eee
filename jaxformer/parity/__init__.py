"""Two models side by side, in PyTorch and in JAX: where they part, and whether it is a bug."""

from typing import TYPE_CHECKING

from jaxformer.porting.lazy import lazily

if TYPE_CHECKING:
    from jaxformer.parity.comparison import assert_parity, compare
    from jaxformer.parity.decoding import compare_generation
    from jaxformer.parity.report import Report
    from jaxformer.parity.trajectories import compare_training

__all__ = ["Report", "assert_parity", "compare", "compare_generation", "compare_training"]

__getattr__ = lazily(
    __name__,
    {
        "Report": "report",
        "assert_parity": "comparison",
        "compare": "comparison",
        "compare_generation": "decoding",
        "compare_training": "trajectories",
    },
)
