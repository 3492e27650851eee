"""How messages of every stage write numbers, lines of code and lists of names."""

import math
import os
from collections.abc import Sequence

# A longer list of names is cut, and says how many more there are.
MOST_NAMES = 3


def apart(value: float, other: float) -> str:
    """Returns a number with six digits, or with as many as show that it is not another one.

    >>> apart(2.0, 1.0), apart(1.0000002, 1.0), apart(0.35355339059327373, 0.35355338)
    ('2', '1.0000002', '0.3535533906')
    """
    far = abs(value - other) / (max(abs(value), abs(other)) or 1.0)
    digits = 6 if not 0 < far < 1 else max(6, 2 - math.floor(math.log10(far)))
    return f"{value:.{min(digits, 17)}g}"


def shorten(source: str) -> str:
    """Returns a "path:line" relative to the working folder, or from the package on."""
    path, _, line = source.rpartition(":")
    if not path:
        return source
    _, found, inside = path.rpartition(f"site-packages{os.sep}")
    if found:
        return f"{inside}:{line}"
    relative = os.path.relpath(path)
    return f"{path if relative.startswith('..') else relative}:{line}"


def listed(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """Returns the first names, and how many more there are.

    >>> listed(["q", "k", "v"]), listed(["a", "b", "c", "d", "e"])
    ('q, k, v', 'a, b, c and 2 more')
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def name_error(error: BaseException) -> str:
    r"""Returns the class of an error and the first line of what it says.

    >>> name_error(KeyError()), name_error(ValueError("one\ntwo"))
    ('KeyError', 'ValueError: one')
    """
    return ": ".join(filter(None, (type(error).__name__, *str(error).strip().splitlines()[:1])))
