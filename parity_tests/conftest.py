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
    "test_schedules",
    "test_optimizers",
    "test_train_step",
    "test_training_parity",
    "test_analysis",
    "test_scaling",
    "test_costs",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs the files of this folder in the order of the ladder, and test_cases.py case by case.

    All proofs of a case then share its pair, which a fixture of a module keeps until the next one.
    """
    places = [i for i, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    steps = {name: step for step, name in enumerate(LADDER)}
    cases: dict[str, int] = {}

    def step(item: pytest.Item) -> tuple[int, int]:
        called = getattr(item, "callspec", None)
        pair = called.params.get("pair") if called else None
        is_proof = item.path.stem == "test_cases" and pair is not None
        case = cases.setdefault(pair.name, len(cases)) if is_proof else len(items)
        return steps.get(item.path.stem, len(steps)), case

    climbing = sorted((items[i] for i in places), key=step)
    for place, item in zip(places, climbing, strict=True):
        items[place] = item


@pytest.fixture(autouse=True, scope="module")
def everything_in_float64(float64):
    """Runs every test of this folder in float64: parity is first a statement on mathematics."""
