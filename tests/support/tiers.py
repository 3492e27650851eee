"""The tiers of tests: each test is in one, ``default`` unless its marker ``tier`` says another."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest

TIERS = ("default", "full", "slow")
FULL = pytest.mark.tier("full")
SLOW = pytest.mark.tier("slow")


def tier_of(marks: Iterable[Any]) -> str:
    """Returns the slowest tier that is among the markers of a test.

    Raises:
        pytest.UsageError: a marker names no tier.
    """
    named = [name for mark in marks if mark.name == "tier" for name in mark.args]
    if unknown := set(named) - set(TIERS):
        raise pytest.UsageError(f"no tiers: {sorted(unknown)}; there are {', '.join(TIERS)}")
    return max(named, key=TIERS.index, default=TIERS[0])


def full_except(
    values: Iterable[Any], keep: Callable[..., bool], others: pytest.MarkDecorator = FULL
) -> list[Any]:
    """Returns parameters of which the default tier runs those that ``keep`` accepts.

    Args:
        values: what ``pytest.mark.parametrize`` takes; a tuple is one value for each name.
        keep: is called with the values of a parameter.
        others: the mark of all others.
    """
    result = []
    for value in values:
        known = value if hasattr(value, "marks") else as_parameter(value)
        marks = known.marks if keep(*known.values) else (*known.marks, others)
        result.append(pytest.param(*known.values, id=known.id, marks=marks))
    return result


def full_after(count: int, values: Iterable[Any], slow_after: int | None = None) -> list[Any]:
    """Returns parameters of which the default tier runs the first ``count``.

    Args:
        count: how many the default tier runs.
        values: as for ``full_except``.
        slow_after: how many the default and the full tier run together; default all.
    """
    known = list(values)
    end = len(known) if slow_after is None else slow_after
    full = full_except(known[count:end], lambda *_: False)
    return known[:count] + full + full_except(known[end:], lambda *_: False, SLOW)


def as_parameter(value: Any) -> Any:
    """Returns a plain parameter as pytest.param makes them."""
    return pytest.param(*value) if isinstance(value, tuple) else pytest.param(value)


def first_of_each(
    values: Iterable[Any],
    family: Callable[..., Any],
    others: pytest.MarkDecorator = FULL,
    count: int = 1,
) -> list[Any]:
    """Returns parameters of which the default tier runs the first of each family.

    Args:
        values: as for ``full_except``.
        family: gives what the values of a parameter belong to.
        others: the mark of all others.
        count: how many of each family are first.
    """
    seen: Counter[Any] = Counter()

    def is_first(*given: Any) -> bool:
        seen[family(*given)] += 1
        return seen[family(*given)] <= count

    return full_except(values, is_first, others)
