"""A plugin of pytest: the fixture ``jaxformer_parity``, and ``--parity-html`` for its reports.

pytest loads it where jaxformer is installed. Importing it imports neither JAX nor torch.
"""

import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Longer names of files are cut.
MOST_LETTERS = 120


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option ``--parity-html``."""
    parser.getgroup("jaxformer").addoption(
        "--parity-html",
        metavar="FOLDER",
        type=Path,
        default=None,
        help="write a page for each comparison of the fixture jaxformer_parity",
    )


def page_name(test: str) -> str:
    """Returns the name of a test's pages, without ".html": no two tests have the same.

    >>> page_name("tests/test_port.py::TestSmall::test_right[float32]")
    'tests.test_port.TestSmall.test_right[float32]'
    """
    place, bracket, case = test.partition("[")
    name = re.sub(r"(\.py)?::|/", ".", place) + bracket + case
    safe = re.sub(r"[^\w.\[\]-]+", "_", name).lstrip(".")[:MOST_LETTERS]
    return safe if safe == name else f"{safe}-{zlib.crc32(test.encode()):08x}"


@pytest.fixture
def jaxformer_parity(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Gives ``jaxformer.assert_parity``, which fails a test with the root causes.

    With ``--parity-html FOLDER``, each comparison of a test is written there as a page, whether it
    fails or not: ``FILE.TEST.html``, then ``FILE.TEST-2.html``; see ``page_name``.
    """
    from jaxformer.parity.comparison.api import check_parity, compare

    folder: Path | None = request.config.getoption("--parity-html")
    reports: list[Any] = []

    def assert_parity(
        torch_module: Any, candidate: Any = None, inputs: Any = (), **options: Any
    ) -> Any:
        reports.append(compare(torch_module, candidate, inputs, **options))
        return check_parity(reports[-1])

    yield assert_parity
    if folder is not None and reports:
        folder.mkdir(parents=True, exist_ok=True)
        name = page_name(request.node.nodeid)
        for number, report in enumerate(reports, 1):
            path = folder / (f"{name}.html" if number == 1 else f"{name}-{number}.html")
            path.write_text(report._repr_html_())
