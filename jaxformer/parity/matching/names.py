"""Names of modules that the user gives: candidate paths to reference paths."""

import difflib
from collections.abc import Collection, Iterable, Mapping


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


def suggest(name: str, known: Iterable[str]) -> str:
    """Returns a question for the known name that is most like another one, "" if none is."""
    close = difflib.get_close_matches(name, known, 1)
    return f" (did you mean {close[0]}?)" if close else ""
