"""What a dtype rounds: the results and modules of both sides in it, beside float64."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.findings import Node
from jaxformer.parity.judging.verdicts import judge_node
from jaxformer.parity.matching.operators.layouts import Layout
from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.jax_run import JaxRun
from jaxformer.parity.recording.operators.narrow_runs import NarrowRun
from jaxformer.parity.recording.operators.torch_run import TorchRun
from jaxformer.parity.segments.operators.effects import seen_positions
from jaxformer.parity.segments.operators.results import ComparedResult, Results
from jaxformer.parity.segments.operators.walk import Walk
from jaxformer.parity.tolerance import ROUNDOFF, rounding, ulps

# One side rounds more than the other if it is so many times as far from the exact numbers: two
# right programs round at other places, which makes less.
MORE = 3.0


@dataclasses.dataclass(frozen=True)
class Rounding:
    """Measures what a dtype rounds in a comparison.

    Attributes:
        dtype: in which both sides were run once more.
        runs: these runs, the candidate's and the reference's.
        candidate: the candidate in float64.
        reference: the reference in float64.
        walk: after both passes.
        results: those that were compared.
    """

    dtype: str
    runs: tuple[NarrowRun, NarrowRun]
    candidate: JaxRun
    reference: TorchRun
    walk: Walk
    results: Results

    def nodes(self, nodes: Sequence[Node], names: Mapping[str, str]) -> Iterator[Node]:
        """Yields nodes of modules with what the dtype rounds, where both sides have the module.

        Args:
            nodes: of the reference's modules.
            names: paths of the candidate's modules to those of the reference's.
        """
        own: dict[str, str] = {}
        for path, other in names.items():
            own.setdefault(other, path)
        for node in nodes:
            found: dict[str, Any] = {}
            if not node.reference_path:
                found = self._of_results()
            elif node.reference_path in own:
                found = self._of_module(own[node.reference_path], node.reference_path)
            if node.in_context is None or not found:
                yield node
                continue
            condition = found.pop("condition", None)
            in_context = dataclasses.replace(node.in_context, **found)
            node = dataclasses.replace(node, in_context=in_context, condition=condition)
            yield node if node.verdict == "bug" else judge_node(node)

    def remarks(self, nodes: Sequence[Node]) -> Iterator[str]:
        """Yields a sentence on the results in the dtype, and one on where the candidate loses more.

        Args:
            nodes: with what the dtype rounds.
        """
        for result, made, wanted in self._results():
            measured = self._measure(result.reference, result.layout, made, wanted)
            if "reference_rounding" in measured:
                own = self._seen(result.layout.invert(made.astype(np.float64), wanted.shape))
                other = self._seen(wanted.astype(np.float64))
                yield (
                    f"in {self.dtype} the results of the two sides are up to "
                    f"{np.abs(own - other).max():.2g} apart, where the largest number is "
                    f"{np.abs(other).max():.2g}; from the exact ones the candidate's are "
                    f"{measured['candidate_rounding']:.1e} and the reference's "
                    f"{measured['reference_rounding']:.1e} of their size"
                )
                break
        more = [node for node in nodes if _loses_more(node)]
        # The module inside of which the first one is, is one too.
        inner = [n for n in more if not any(_is_inside(other, n) for other in more)]
        if inner:
            yield (
                f"in {self.dtype} the candidate rounds more than the reference, first in "
                f"{inner[0].path}: {_described(inner[0])}"
            )

    def _results(self) -> Iterator[tuple[ComparedResult, np.ndarray, np.ndarray]]:
        """Yields results that were compared as a whole, and what both sides make in the dtype."""
        names = self.walk.candidate.output_names, self.walk.reference.output_names
        outputs = self.walk.reference.outputs
        for place, result in self.results.compared.items():
            other = next(n for n, value in enumerate(outputs) if value is result.reference)
            made = self.runs[0].results.get(names[0][place])
            wanted = self.runs[1].results.get(names[1][other])
            if result.part is None and made is not None and wanted is not None:
                yield result, made, wanted

    def _of_results(self) -> dict[str, Any]:
        """Returns what is rounded in the first result that was compared as a whole."""
        for result, made, wanted in self._results():
            return self._measure(result.reference, result.layout, made, wanted)
        return {}

    def _of_module(self, path: str, reference_path: str) -> dict[str, Any]:
        """Returns what is rounded in what a module returns first."""
        made = self.runs[0].returned.get(path)
        found = self._twin("return", path, self.reference.returned[reference_path])
        if made is None or found is None:
            return {}
        measured = self._measure(*found, made, self.runs[1].returned.get(reference_path))
        entered, source = self.runs[0].entered.get(path), self._twin("enter", path)
        if measured and entered is not None and source is not None:
            before = self._measure(*source, entered, None)
            error = max(before.get("candidate_rounding", 0.0), ROUNDOFF[self.dtype])
            measured["condition"] = measured["candidate_rounding"] / error
        return measured

    def _twin(
        self, kind: str, path: str, among: Sequence[Value] | None = None
    ) -> tuple[Value, Layout] | None:
        """Returns the reference's value of what first enters or leaves a module, and its layout.

        Args:
            kind: of the mark.
            path: of the candidate's module.
            among: the reference's values that it may be; default any.
        """
        first = next(
            v[0] for m, v in self.candidate.marks.items() if (m.kind, m.path) == (kind, path)
        )
        for match in self.walk.matches.get(first.index, ()):
            if among is None or any(match.value is value for value in among):
                return match.value, match.layout
        return None

    def _measure(
        self, exact: Value, layout: Layout, made: np.ndarray, wanted: np.ndarray | None
    ) -> dict[str, Any]:
        """Returns the fields of a difference that say what is rounded.

        Args:
            exact: the reference's value in float64.
            layout: from the reference's to the candidate's.
            made: the candidate's array in the dtype.
            wanted: the reference's.
        """
        if made.size != exact.size:
            return {}
        right = self._seen(exact.data)
        own = self._seen(layout.invert(made.astype(np.float64), exact.shape))
        if not np.isfinite(right).all():
            return {}
        found = {"candidate_rounding": rounding(own, right), "ulps": ulps(own, right, self.dtype)}
        if wanted is not None and wanted.shape == exact.shape:
            found["reference_rounding"] = rounding(self._seen(wanted.astype(np.float64)), right)
        return found

    def _seen(self, array: np.ndarray) -> np.ndarray:
        """Returns the rows (n, ...) of an array (B, T, ...) that are no padding, or all of it."""
        for rows in self._positions:
            if rows is not None and array.shape[:2] == rows.shape:
                return array[rows]
        return array

    @functools.cached_property
    def _positions(self) -> list[np.ndarray | None]:
        return seen_positions(self.walk.reference)


def _loses_more(node: Node) -> bool:
    """Returns whether the candidate's module rounds much more than the reference's."""
    found = node.in_context
    if found is None or found.candidate_rounding is None or not found.reference_rounding:
        return False
    return found.candidate_rounding > MORE * found.reference_rounding


def _is_inside(node: Node, other: Node) -> bool:
    """Returns whether a node's module is inside of another's."""
    return node is not other and f"{node.reference_path}.".startswith(
        f"{other.reference_path}.".lstrip(".")
    )


def _described(node: Node) -> str:
    """Returns what a node's module rounds on both sides."""
    found = node.in_context
    assert found is not None
    return (
        f"it is off by {found.candidate_rounding:.1e}, the reference by "
        f"{found.reference_rounding:.1e}"
    )
