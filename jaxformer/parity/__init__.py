"""Compares a model in PyTorch (the reference) with a model in JAX (the candidate).

In go two models and their inputs. Out comes a ``Report``: where the two diverge, which modules are
root causes, and whether each difference is a bug or rounding.

- ``trace/``: runs one side and records the calls of its modules.
- ``matching/``: finds which modules, calls and arrays of the two sides belong together.
- ``compare/``: ``compare``, ``assert_parity``, ``compare_training``, ``compare_generation``.
- ``graphs/``: compares any other JAX function, operator by operator, with no names given.
- ``tolerance``: the line between rounding and a bug.
- ``report/``: the report as data, in the terminal, as JSON and as HTML.
- ``repro/``: one module with a bug, written to a folder with a script that shows the bug.
- ``sources/``: opens the checkpoints and tokens that ``jaxformer verify`` compares.

torch is imported only inside functions of this package; it comes with the extra ``torch``.
"""

from typing import TYPE_CHECKING

from jaxformer import lazy_attributes

if TYPE_CHECKING:
    from jaxformer.parity.compare.api import assert_parity, compare
    from jaxformer.parity.compare.generation import compare_generation
    from jaxformer.parity.compare.training import compare_training
    from jaxformer.parity.report.model import Report

__all__ = ["Report", "assert_parity", "compare", "compare_generation", "compare_training"]

__getattr__ = lazy_attributes(
    __name__,
    {
        "Report": "report.model",
        "assert_parity": "compare.api",
        "compare": "compare.api",
        "compare_generation": "compare.generation",
        "compare_training": "compare.training",
    },
)
