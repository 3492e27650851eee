from pathlib import Path

import pytest

# From parts to models to what uses them: the first failure is nearest to the bug.
LADDER = (
    "test_mirror",
    "test_cases",
    "test_mutants",
    "test_properties",
    "test_initializers",
    "test_families",
    "test_logits",
    "test_generation",
    "test_generation_cache",
    "test_char_data",
    "test_optimizers",
    "test_train_step",
    "test_training_parity",
    "test_analysis",
    "test_scaling",
    "test_costs",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the files of this folder in the order of the ladder."""
    places = [i for i, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    steps = {name: step for step, name in enumerate(LADDER)}
    climbing = sorted(
        (items[i] for i in places), key=lambda item: steps.get(item.path.stem, len(steps))
    )
    for place, item in zip(places, climbing, strict=True):
        items[place] = item


@pytest.fixture(autouse=True, scope="module")
def everything_in_float64(float64):
    """Runs every test of this folder in float64: parity is first a statement on mathematics."""
