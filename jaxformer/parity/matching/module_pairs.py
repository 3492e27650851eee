"""Which module of the reference a module of the candidate is, found by numbers.

Both return the same values and hold the same parameters. Modules without parameters, such as an
activation, are left out: what they return may be what others return too.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxformer.parity.matching.parameters import ParameterMatches
from jaxformer.parity.matching.values import Match
from jaxformer.parity.recording.operators.graph import Value


def pair_by_numbers(
    returned: Mapping[str, Sequence[Value]],
    reference_returned: Mapping[str, Sequence[Value]],
    matches: Mapping[int, Sequence[Match]],
    held: Mapping[str, Collection[str]],
    parameters: ParameterMatches,
    buffers: Collection[str],
    collections: Collection[str],
) -> dict[str, str]:
    """Returns paths of the candidate's modules to paths of the reference's.

    Args:
        returned: of each module of the candidate, the values that it returned, call by call; a
            module after those inside it.
        reference_returned: the same of the reference.
        matches: of each value of the candidate, those of the reference that it equals.
        held: the names of the parameters and buffers in each module of the reference.
        parameters: which of both sides are equal, or almost.
        buffers: the names of the reference's buffers, which a candidate need not have.
        collections: the trees that hold the candidate's parameters.
    """
    returning: dict[int, list[str]] = defaultdict(list)
    for path, values in reference_returned.items():
        for value in values:
            returning[value.index].append(path)
    twins = _twins(parameters)
    optional = {*buffers, *parameters.missing}
    found: dict[str, str] = {}
    for path, values in returned.items():
        inside = _beginnings(path, collections)
        own = [each for name, each in twins.items() if name.startswith(inside)]
        if not path or not own:
            continue
        known = [equal for value in values if (equal := matches.get(value.index))]
        # One that returns what several modules return stands for all of them, as in a scan.
        others = [
            list(dict.fromkeys(other for match in one for other in returning[match.value.index]))
            for one in known
        ]
        for other in others[0] if others else ():
            if (
                other
                and other not in found.values()
                and all(other in each for each in others)
                and _are_same(own, held[other], optional)
            ):
                found[path] = other
                break
    return found


def _twins(parameters: ParameterMatches) -> dict[str, set[str]]:
    """Returns of each parameter of the candidate those of the reference that it may be."""
    whole = {name: set(twins) for name, twins in parameters.whole.items()}
    wrong = {one.candidate: {one.reference} for one in parameters.wrong}
    found = {**whole, **parameters.in_parts, **wrong}
    # JAX begins the path of a field with a dot.
    return {name.lstrip("."): twins for name, twins in found.items()}


def _beginnings(path: str, collections: Iterable[str]) -> tuple[str, ...]:
    """Returns how the names of the parameters in the module at a path begin."""
    return tuple(
        f"{tree}.{path}{end}".lstrip(".") for tree in collections for end in (".", "[", "/")
    )


def _are_same(own: Sequence[set[str]], held: Collection[str], optional: Collection[str]) -> bool:
    """Returns whether two modules may hold the same parameters.

    Args:
        own: of each parameter of the candidate's module, those of the reference that it may be.
        held: the names of those of the reference's module.
        optional: names of those that the candidate need not have, or lacks.
    """
    wanted = {name for name in held if name not in optional}
    return all(twins.intersection(held) for twins in own) and wanted <= set().union(*own)
