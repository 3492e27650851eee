"""How much was compared where pairs of modules are the segments, and what was never reached."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from flax import nnx

from jaxformer.parameters import join_path
from jaxformer.parity.findings import Coverage, Node
from jaxformer.parity.judging.coverage import CountedOperators
from jaxformer.parity.matching.pairs import Pair, PairKey
from jaxformer.porting.mapping.rules import Link


@dataclasses.dataclass(frozen=True)
class Called:
    """Paths of the modules that were called.

    Attributes:
        reference: of the reference.
        candidate: of the candidate.
    """

    reference: Collection[str] = ()
    candidate: Collection[str] = ()

    def __or__(self, other: "Called") -> "Called":
        reference = {*self.reference, *other.reference}
        return Called(reference, {*self.candidate, *other.candidate})


def measure_pair_coverage(
    pairs: Sequence[Pair],
    nodes: Mapping[PairKey, Node],
    called: Called,
    names: Collection[str],
    parameters: tuple[int, int],
    reference_parameters: tuple[int, int],
    operators: CountedOperators,
    backward: bool,
) -> Coverage:
    """Returns how much was compared, in modules and in operators.

    Args:
        pairs: all of them.
        nodes: of the pairs, judged.
        called: which modules.
        names: of the candidate's parameters.
        parameters: of the candidate, how many were compared and how many there are.
        reference_parameters: the same of the reference.
        operators: of both sides.
        backward: whether gradients were compared.
    """
    compared = [pair for pair in pairs if _was_compared(nodes.get(pair.candidate))]
    reference = {path for pair in compared for path in pair.reference}
    candidate = {path for pair in compared for path in pair.candidate}
    gradients = {
        name
        for pair in compared
        for short in nodes[pair.candidate].backward
        for name in (short, f"{pair.path}.{short}")
        if name in names
    }
    return Coverage(
        _share(reference, called.reference),
        parameters,
        operators.reference,
        gradients=(len(gradients), parameters[1]) if backward else (0, 0),
        candidate_modules=_share(candidate, called.candidate),
        reference_parameters=reference_parameters,
        candidate_operators=operators.candidate,
    )


def linked_parameters(reference: Any, links: Sequence[Link]) -> tuple[int, int]:
    """Returns how many parameters of the reference are linked to the candidate's, and of how many.

    Args:
        reference: the model; a tied parameter counts once.
        links: of parameters of both sides.
    """
    places = {n: id(p) for n, p in reference.named_parameters(remove_duplicate=False)}
    found = {places[name] for link in links for name in link.source if name in places}
    return len(found), len({*places.values()})


def find_unreached(
    pairs: Sequence[Pair], called: Called, parameters: Collection[str], module: nnx.Module
) -> Iterator[str]:
    """Yields a sentence for each module with parameters that the candidate's pass never reached.

    What the reference does not call either is no part of the comparison. A module that cannot be
    called, such as a table of relative positions, is read by the one that holds it; one whose parts
    are called is reached.

    Args:
        pairs: all of them.
        called: which modules.
        parameters: names of the candidate's.
        module: the candidate.
    """
    read = {join_path(path) for path, part in nnx.iter_modules(module) if not callable(part)}
    called |= Called(candidate=read)
    for pair in pairs:
        if not all(path in called.reference for path in pair.reference):
            continue
        for path in pair.candidate:
            if not _reaches(called.candidate, path) and _reaches(parameters, path):
                yield (
                    f"{path} of the candidate is never called; "
                    f"the reference calls {pair.reference_path}"
                )


def _reaches(paths: Collection[str], path: str) -> bool:
    """Returns whether a path, or one inside of it, is among some."""
    return any(each == path or each.startswith(f"{path}.") for each in paths)


def _was_compared(node: Node | None) -> bool:
    return node is not None and node.forward is not None


def _share(compared: Collection[str], called: Collection[str]) -> tuple[int, int]:
    return len({*compared}.intersection(called)), len({*called})
