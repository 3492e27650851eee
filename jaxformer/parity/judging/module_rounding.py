"""What a dtype rounds in the first outputs of modules that are known to be the same."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from jaxformer.parity.findings import Node
from jaxformer.parity.judging.verdicts import judge_node
from jaxformer.parity.matching.layouts import Layout
from jaxformer.parity.matching.pairs import PairKey
from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.narrow_runs import NarrowRun
from jaxformer.parity.tolerance import ROUNDOFF, rounding, ulps

# Returns the numbers of an array that belong to tokens that are used, in a line.
Used = Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class OutputPart:
    """What one module of the candidate returns first, of a pair of modules.

    Attributes:
        path: of the module.
        place: which of the arrays that it returns.
        values: of the reference, in float64, what the modules of the pair return.
        places: of each of these modules, by path, which of the arrays that it returns.
        cut: makes of them what the module of the candidate returns.
        layout: from there to the candidate's.
    """

    path: str
    place: int
    values: Sequence[Value]
    places: Mapping[str, int]
    cut: Callable[..., np.ndarray]
    layout: Layout

    def of(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the module's array, given those that the reference's modules return."""
        return self.layout.apply(self.cut(*arrays))


@dataclasses.dataclass(frozen=True)
class Output:
    """What a pair of modules returns first.

    Attributes:
        key: of the pair.
        parts: of each module of the candidate.
        entered: what entered the reference's module first; None if nothing did that is known.
        used: see ``Used``.
    """

    key: PairKey
    parts: Sequence[OutputPart]
    entered: Value | None
    used: Used

    def exact(self) -> np.ndarray:
        """Returns it in float64."""
        return self._joined([part.of([v.data for v in part.values]) for part in self.parts])

    def of_candidate(self, run: NarrowRun) -> np.ndarray | None:
        """Returns what the candidate made in a run; None if that is not known."""
        made = [run.returned.get(part.path, ()) for part in self.parts]
        if any(len(one) <= part.place for one, part in zip(made, self.parts, strict=True)):
            return None
        return self._joined([one[part.place] for one, part in zip(made, self.parts, strict=True)])

    def of_reference(self, run: NarrowRun) -> np.ndarray | None:
        """Returns what the reference made in a run; None if that is not known."""
        found = []
        for part in self.parts:
            rows = [(run.returned.get(path, ()), n) for path, n in part.places.items()]
            if any(len(row) <= n for row, n in rows):
                return None
            found.append(part.of([row[n] for row, n in rows]))
        return self._joined(found)

    def entering(self, run: NarrowRun) -> np.ndarray | None:
        """Returns what entered the candidate's module first in a run; None if that is not known."""
        return next(iter(run.entered.get(self.parts[0].path, ())), None)

    def _joined(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        used = [self.used(array) for array in arrays]
        # A single one as it is: it may be the model's largest.
        return used[0] if len(used) == 1 else np.concatenate(used)


def with_rounding(
    nodes: Mapping[PairKey, Node],
    outputs: Sequence[Output],
    dtype: str,
    run_candidate: Callable[[], NarrowRun],
    run_reference: Callable[[Collection[str]], NarrowRun],
) -> dict[PairKey, Node]:
    """Returns nodes with what a dtype rounds in their first outputs.

    Args:
        nodes: of pairs of modules.
        outputs: of pairs.
        dtype: of the runs.
        run_candidate: runs the candidate in it. Of a run only outputs are kept.
        run_reference: runs the reference in it, given the paths of the modules that count.
    """
    run = run_candidate()
    own = {output.key: (output.of_candidate(run), output.entering(run)) for output in outputs}
    run = run_reference({path for one in outputs for part in one.parts for path in part.places})
    right = {output.key: output.of_reference(run) for output in outputs}
    del run
    found = dict(nodes)
    for output in outputs:
        node = nodes.get(output.key)
        # They are freed on the way, as others are made again.
        (low, given), other = own.pop(output.key), right.pop(output.key)
        if node is None or node.in_context is None or low is None or other is None:
            continue
        # What entered is read first: from it the output may have to be made again.
        before = None if given is None or output.entered is None else output.entered.data
        exact = output.exact()
        if low.size != exact.size:
            continue
        rounded, condition = rounding(low, exact), None
        if given is not None and before is not None and given.size == before.size:
            error = rounding(output.used(given.reshape(before.shape)), output.used(before))
            condition = rounded / max(error, ROUNDOFF[dtype])
        context = dataclasses.replace(
            node.in_context,
            candidate_rounding=rounded,
            reference_rounding=rounding(other, exact),
            ulps=ulps(low, exact, dtype),
        )
        found[output.key] = judge_node(
            dataclasses.replace(node, in_context=context, condition=condition)
        )
    return found
