"""Compares a model in PyTorch (the reference) with a model in JAX (the candidate).

In go two models and their inputs. Out comes a ``Report``: where the two diverge, which modules are
root causes, and whether each difference is a bug or rounding.

It is one pipeline. Each stage is a package and imports only the stages before it:

1. ``recording/``: runs a side and records what passes through it.
2. ``matching/``: finds the *anchors*: what must hold the same numbers on both sides.
3. ``segments/``: runs what lies between anchors on the reference's numbers, so that one bug hides
   no other.
4. ``judging/``: says what a difference at the end of a segment is: rounding or a bug.
5. ``diagnosis/``: says why a segment is wrong, and in which line of code.
6. ``report/``: the report as data, in the terminal, as JSON and as HTML.

Any model is compared by its operators, with no names given: values with equal numbers are the
anchors, and names of modules, its own or those that a user gives, only label the report. Of
jaxformer's own models, whose modules mirror those of the reference, it is known as well what must
enter each module and leave it. These are anchors too, so that each module is judged by itself. Both
kinds of models go the same way: one recorder of each side, one walk from anchor to anchor, the same
tolerance, verdicts, root causes and reports. A model larger than memory is compared block by block,
each as a model of its own.

What takes models through the stages:

- ``comparison/``: ``compare``, ``assert_parity``, ``compare_training``, ``compare_generation``.
- ``streaming/``: checkpoints larger than memory, block by block.
- ``session``, ``sources/``: what ``jaxformer verify`` compares: checkpoints, and tokens for them.
- ``repro/``: one module with a bug, written to a folder with a script that shows the bug.
- ``pytest_plugin``: the fixture ``jaxformer_parity``.

What all stages share: ``findings`` (a difference, a node, a root cause, as plain data),
``tolerance`` (the line between rounding and a bug), ``words`` (how messages write numbers),
``cores`` (work on large arrays, shared among the cores).

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
