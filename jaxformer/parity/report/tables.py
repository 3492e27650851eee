"""Reports as tables of pandas, where it is installed."""

from collections.abc import Sequence
from typing import Any

from jaxformer.errors import UsageError


def make_dataframe(rows: Sequence[Sequence[Any]], names: Sequence[str]) -> Any:
    """Returns a ``pandas.DataFrame`` of rows, with the names of its columns.

    Raises:
        UsageError: pandas is not installed.
    """
    try:
        import pandas  # type: ignore[import-untyped]
    except ImportError as error:
        raise UsageError("to_dataframe needs pandas: pip install pandas") from error
    return pandas.DataFrame(rows, columns=list(names))
