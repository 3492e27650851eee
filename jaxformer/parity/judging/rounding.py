"""What a dtype rounds: the results and modules of both sides in it, beside float64."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxformer.parity.findings import Node
from jaxformer.parity.judging.verdicts import judge_node
from jaxformer.parity.matching.layouts import Layout
from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.jax_run import JaxRun
from jaxformer.parity.recording.operators.narrow_runs import NarrowRun
from jaxformer.parity.recording.operators.torch_run import TorchRun
from jaxformer.parity.segments.effects import seen_positions
from jaxformer.parity.segments.results import ComparedResult, Results, called
from jaxformer.parity.segments.walk import Walk
from jaxformer.parity.tolerance import ROUNDOFF, rounding, ulps

# One side rounds more than the other if it is so many times as far from the exact numbers: two
# right programs round at other places, which makes less.
MORE = 3.0
# Of more results than these, nothing is said of the others.
MOST_RESULTS = 4


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
            found: dict[str, float] = {}
            if not node.reference_path:
                first = next(self._results(), None)
                found = {} if first is None else self._measure_result(*first)
            elif node.reference_path in own:
                found = self._of_module(own[node.reference_path], node.reference_path)
            if node.in_context is None or not found:
                yield node
                continue
            measured = dataclasses.replace(
                node, in_context=dataclasses.replace(node.in_context, **found)
            )
            yield measured if node.verdict == "bug" else judge_node(measured)

    def remarks(self, nodes: Sequence[Node]) -> Iterator[str]:
        """Yields sentences on the results in the dtype, and one if the candidate loses more.

        Args:
            nodes: with what the dtype rounds.
        """
        results = list(self._results())
        for result, made, wanted in results[:MOST_RESULTS]:
            place = self.walk.candidate.outputs.index(result.candidate)
            name = called(self.walk.candidate.output_names[place]) if len(results) > 1 else ""
            yield self._describe(result, made, wanted, name or "the results")
        more = [node for node in nodes if self._loses_more(node)]
        if not more:
            return
        # The module inside of which the first one is, is one too. A module returns after those
        # inside of it.
        inner = [n for n in more if not any(_is_inside(other, n) for other in more)]
        order = {path: place for place, path in enumerate(self.reference.returned)}
        first = min(inner, key=lambda node: order[node.reference_path])
        found = first.in_context
        where = f", seen first in what {first.path} returns" if first.reference_path else ""
        assert found is not None
        yield (
            f"in {self.dtype} the candidate rounds more than the reference{where}: it is off by "
            f"{found.candidate_rounding:.1e}, the reference by {found.reference_rounding:.1e}"
        )

    def _describe(
        self, result: ComparedResult, made: np.ndarray, wanted: np.ndarray, name: str
    ) -> str:
        """Returns a sentence on a result in the dtype."""
        found = self._measure_result(result, made, wanted)
        own = self._seen(result.layout.invert(made.astype(np.float64), wanted.shape))
        other = self._seen(wanted.astype(np.float64))
        lost = [int((~np.isfinite(array)).sum()) for array in (own, other)]
        if any(lost) or not found:
            return (
                f"in {self.dtype} {lost[0]} of {own.size} numbers of {name} of the candidate are "
                f"not finite, and {lost[1]} of the reference's"
            )
        return (
            f"in {self.dtype} the two sides are up to {np.abs(own - other).max():.2g} apart in "
            f"{name}, where the largest number is {np.abs(other).max():.2g}; from the exact "
            f"numbers the candidate's are {found['candidate_rounding']:.1e} and the reference's "
            f"{found['reference_rounding']:.1e} of their size"
        )

    def _results(self) -> Iterator[tuple[ComparedResult, np.ndarray, np.ndarray]]:
        """Yields results that were compared as a whole, and what both sides make in the dtype."""
        names = self.walk.candidate.output_names, self.walk.reference.output_names
        outputs = self.walk.reference.outputs
        for place, result in self.results.compared.items():
            other = next(n for n, value in enumerate(outputs) if value is result.reference)
            made = self.runs[0].results.get(names[0][place])
            wanted = self.runs[1].results.get(names[1][other])
            if result.part is not None or made is None or wanted is None:
                continue
            if wanted.shape == result.reference.shape and made.size == wanted.size > 0:
                yield result, made, wanted

    def _measure_result(
        self, result: ComparedResult, made: np.ndarray, wanted: np.ndarray
    ) -> dict[str, float]:
        """Returns what is rounded in a result."""
        return self._measure(result.reference, result.layout, made, wanted)

    def _of_module(self, path: str, reference_path: str) -> dict[str, float]:
        """Returns what is rounded in the first value that a module returns."""
        made = self.runs[0].returned.get(path)
        values = [v for mark, v in self.candidate.marks if mark.path == path]
        among = self.reference.returned[reference_path]
        wanted = self.runs[1].returned.get(reference_path, ())
        if made is None or not values or len(among) != len(wanted):
            return {}
        for match in self.walk.matches.get(values[0].index, ()):
            for place, value in enumerate(among):
                if match.value is value:
                    return self._measure(value, match.layout, made[0], wanted[place])
        return {}

    def _measure(
        self, exact: Value, layout: Layout, made: np.ndarray, wanted: np.ndarray
    ) -> dict[str, float]:
        """Returns the fields of a difference that say what is rounded.

        Args:
            exact: the reference's value in float64.
            layout: from the reference's to the candidate's.
            made: the candidate's array in the dtype.
            wanted: the reference's.
        """
        right = self._seen(exact.data)
        if made.size != exact.size or wanted.shape != exact.shape or not np.isfinite(right).all():
            return {}
        own = self._seen(layout.invert(made.astype(np.float64), exact.shape))
        other = self._seen(wanted.astype(np.float64))
        found = [
            rounding(array, right) if np.isfinite(array).all() else np.inf for array in (own, other)
        ]
        return {
            "candidate_rounding": found[0],
            "reference_rounding": found[1],
            "ulps": ulps(own, right, self.dtype) if np.isfinite(found[0]) else np.inf,
        }

    def _loses_more(self, node: Node) -> bool:
        """Returns whether the candidate's module rounds much more than the reference's."""
        found = node.in_context
        if found is None or found.candidate_rounding is None or found.reference_rounding is None:
            return False
        # One that only looks numbers up rounds nothing.
        least = max(found.reference_rounding, ROUNDOFF[self.dtype])
        return found.candidate_rounding > MORE * least

    def _seen(self, array: np.ndarray) -> np.ndarray:
        """Returns the rows (n, ...) of an array (B, T, ...) that are no padding, or all of it."""
        for rows in self._positions:
            if rows is not None and array.shape[:2] == rows.shape:
                return array[rows]
        return array

    @functools.cached_property
    def _positions(self) -> list[np.ndarray | None]:
        return seen_positions(self.walk.reference)


def _is_inside(node: Node, other: Node) -> bool:
    """Returns whether a node's module is inside of another's."""
    return node is not other and f"{node.reference_path}.".startswith(
        f"{other.reference_path}.".lstrip(".")
    )
