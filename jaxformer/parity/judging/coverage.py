"""What was compared where values are anchors: a node for each module, and what is missing."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence

from jaxformer.parity.findings import Coverage, Difference, Node
from jaxformer.parity.judging.verdicts import judge_node, worst_difference
from jaxformer.parity.matching.anchors import Table
from jaxformer.parity.matching.parameters import ParameterMatches
from jaxformer.parity.recording.operators.graph import Operator
from jaxformer.parity.recording.operators.jax_run import JaxRun
from jaxformer.parity.recording.operators.kinds import LAYOUT_ONLY, SUMS
from jaxformer.parity.recording.operators.torch_run import TorchRun
from jaxformer.parity.segments.gradients import Gradients
from jaxformer.parity.segments.results import Results
from jaxformer.parity.segments.walk import Walk
from jaxformer.parity.tolerance import allowed_error
from jaxformer.parity.words import listed, shorten


@dataclasses.dataclass(frozen=True, order=True)
class CountedOperators:
    """Operators with parameters: how many were compared, and how many there are.

    Attributes:
        reference: those of the reference.
        candidate: those of the candidate.
    """

    reference: tuple[int, int] = (0, 0)
    candidate: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, walk: Walk) -> "CountedOperators":
        """Returns the counts of a walk, after its passes."""
        own, right = walk.candidate.operators, walk.reference.operators
        return cls(
            _count(walk.expected, walk.checked, right, walk.reached),
            _count(walk.own_expected, walk.own_checked, own, walk.matches),
        )

    def __add__(self, other: "CountedOperators") -> "CountedOperators":
        """Returns the counts of two parts of a model together."""
        return CountedOperators(
            _added(self.reference, other.reference), _added(self.candidate, other.candidate)
        )


def _added(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]


def judge_modules(kind: str, reference: TorchRun, walk: Walk) -> Iterator[Node]:
    """Yields a node for each module of the reference that was called.

    Its paths on both sides are those of the reference, whose modules a candidate need not have.

    Args:
        kind: of the candidate.
        reference: the run.
        walk: after both passes.
    """
    errors: dict[int, float] = {}
    for match in (match for found in walk.matches.values() for match in found):
        errors[match.value.index] = max(errors.get(match.value.index, 0.0), match.error)
    paths = [path for path in reference.kinds if path in reference.returned]
    for order, path in enumerate(paths):
        values = [v for v in reference.returned[path] if v.index in walk.reached]
        found = [
            Difference(errors.get(v.index, 0.0), scale, allowed_error(scale))
            for v, scale in zip(values, map(walk.index.largest, values), strict=True)
        ]
        parts = path.split(".") if path else []
        message = "not compared: no value of the candidate equals what it returns"
        node = Node(
            path,
            path,
            reference.kinds[path] if path else kind,
            reference.kinds[path],
            sum(".".join(parts[:n]) in reference.returned for n in range(len(parts))),
            order,
            message="" if found else message,
            in_context=worst_difference(found),
        )
        yield judge_node(node)


def measure_coverage(
    nodes: Sequence[Node], walk: Walk, parameters: ParameterMatches, gradients: Gradients
) -> Coverage:
    """Returns how much was compared.

    Args:
        nodes: of the reference's modules, with their bugs.
        walk: after both passes.
        parameters: which of them are equal.
        gradients: how many were compared.
    """
    missing = sum(node.verdict == "incomplete" for node in nodes)
    floats = [value for value in walk.candidate.values if value.is_activation]
    wanted = len(walk.reference.parameters)
    lost = sum(name in walk.reference.parameters for name in parameters.missing)
    operators = CountedOperators.of(walk)
    return Coverage(
        (len(nodes) - missing, len(nodes)),
        (_count_found(parameters), len(walk.candidate.parameters)),
        operators.reference,
        (sum(value.index in walk.matches for value in floats), len(floats)),
        (gradients.compared, gradients.expected),
        walk.largest_error,
        _modules_of_candidate(walk),
        (wanted - lost, wanted),
        operators.candidate,
    )


def _count(
    expected: Collection[int],
    checked: Collection[int],
    operators: Sequence[Operator],
    equal: Collection[int],
) -> tuple[int, int]:
    """Returns how many operators with parameters were compared, and how many there are.

    One without a counterpart, such as a fused product, was compared where a sum, a multiple or a
    part of what it made is equal on both sides.

    Args:
        expected: places of operators that read a parameter.
        checked: places of operators whose counterpart was compared.
        operators: of the tape.
        equal: places of values that are equal on both sides.
    """
    passes = LAYOUT_ONLY | SUMS | {"mul", "div", "neg"}
    shown: set[int] = set()
    for operator in reversed(operators):
        if operator.name in passes and any(
            value.index in shown or value.index in equal for value in operator.outputs
        ):
            shown.update(value.index for value in operator.inputs)
    compared = {
        operator.index
        for operator in operators
        if operator.index in checked
        or any(value.index in shown or value.index in equal for value in operator.outputs)
    }
    return len(compared.intersection(expected)), len(expected)


def _count_found(parameters: ParameterMatches) -> int:
    return len(parameters.whole) + len(parameters.in_parts)


def _modules_of_candidate(walk: Walk) -> tuple[int, int] | None:
    """Returns how many modules made an equal value, of all; None if the framework names none."""
    called: set[str] = set()
    compared: set[str] = set()
    for value in walk.candidate.values:
        if value.is_activation and value.producer is not None and value.producer.module:
            called.add(value.producer.module)
            if value.index in walk.matches:
                compared.add(value.producer.module)
    return (len(compared), len(called)) if called else None


def find_incomplete(
    walk: Walk,
    results: Results,
    unused: Sequence[str],
    unverified: Sequence[str],
    lacking: Sequence[str],
) -> Iterator[str]:
    """Yields a sentence for each part that was not compared, and why.

    Args:
        walk: after both passes.
        results: those that were compared.
        unused: sentences on what has no effect.
        unverified: parameters of the candidate that nothing shows to be right.
        lacking: sentences on parameters of the reference that the candidate lacks, and on what
            zeros hide; some may be empty.
    """
    tape = walk.candidate
    yield from results.uncompared
    if not tape.outputs and not tape.choices:
        yield "the candidate returns no floats"
    yield from unused
    for name in unverified:
        yield (
            f"the numbers of {name} of the candidate are those of no parameter of the reference, "
            "and no result depends on them"
        )
    yield from filter(None, lacking)
    for name in sorted(tape.opaque):
        yield f"{name} computes in a dtype of its own"


def describe_table(table: Table) -> str:
    """Returns a sentence on a constant that is only rounded to float32."""
    producer = table.value.producer
    where = shorten(producer.source) if producer is not None else "a constant of the function"
    shape = tuple(table.value.shape)
    return f"{where}, of shape {shape}: {table.error:.1e} from the reference's"


def describe_casts(run: JaxRun, parameters: ParameterMatches) -> Iterator[str]:
    """Yields a sentence for each line, and each side's parameters, rounded to 16 bits."""
    for dtype in sorted({*parameters.rounded.values()}):
        names = [name for name, kept in parameters.rounded.items() if kept == dtype]
        yield f"parameters of one side, to {dtype}: {listed(names)}"
    for (source, dtype), count in run.narrow_casts().items():
        where = shorten(source) if source else "a line unknown"
        yield f"{where}, to {dtype}" + (f" in {count} places" if count > 1 else "")
