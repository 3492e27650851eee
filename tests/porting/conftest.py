import pytest

from jaxformer.execution import grouped_products


@pytest.fixture(autouse=True)
def two_sizes_of_blocks(monkeypatch):
    """An expert's rows are multiplied in blocks of two sizes, each a piece of code to compile.

    All of them are in tests/execution/test_grouped_products.py, parity_tests and tests/parity.
    """
    monkeypatch.setattr(grouped_products, "MOST_SIZES", 2)
