"""Compares a model in PyTorch (the reference) with a model in JAX (the candidate).

In go two models and their inputs. Out comes a ``Report``: where the two diverge, which modules are
root causes, and whether each difference is a bug or rounding.

- ``trace/``: runs one side and records the calls of its modules.
- ``matching/``: finds which modules, calls and arrays of the two sides belong together.
- ``comparison/``: ``compare``, ``assert_parity``, ``compare_training``, ``compare_generation``.
- ``streaming/``: the same comparison of checkpoints larger than memory, block by block.
- ``graphs/``: compares any other JAX function, operator by operator, with no names given.
- ``tolerance``: the line between rounding and a bug.
- ``report/``: the report as data, in the terminal, as JSON and as HTML.
- ``repro/``: one module with a bug, written to a folder with a script that shows the bug.
- ``pytest_plugin``: the fixture ``jaxformer_parity``.
- ``sources/``: opens the checkpoints and tokens that ``jaxformer verify`` compares.

torch is imported only inside functions of this package; it comes with the extra ``torch``.
"""

from typing import TYPE_CHECKING

from jaxformer import lazy_attributes

if TYPE_CHECKING:
    from jaxformer.parity.comparison.api import assert_parity, compare
    from jaxformer.parity.comparison.generation import compare_generation
    from jaxformer.parity.comparison.training import compare_training
    from jaxformer.parity.report.report import Report

__all__ = ["Report", "assert_parity", "compare", "compare_generation", "compare_training"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "Report": "report.report",
        "assert_parity": "comparison.api",
        "compare": "comparison.api",
        "compare_generation": "comparison.generation",
        "compare_training": "comparison.training",
    },
)
