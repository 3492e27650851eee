"""Names of modules that the user gives: candidate paths to reference paths."""

from collections.abc import Collection, Mapping

from jaxformer.errors import suggest


def check_names(
    names: Mapping[str, str], candidate: Collection[str], reference: Collection[str]
) -> None:
    """Checks that the modules of a map of names exist.

    Args:
        names: candidate paths to reference paths.
        candidate: paths of all modules of the candidate.
        reference: those of the reference.

    Raises:
        ValueError: a path does not exist; all such paths are listed.
    """
    sides = ("candidate", names, candidate), ("reference", names.values(), reference)
    problems = [
        f"the {side} has no {name}{suggest(name, known)}"
        for side, given, known in sides
        for name in given
        if name not in known
    ]
    if problems:
        raise ValueError("; ".join(problems))
