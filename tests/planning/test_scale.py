"""The table of docs/explanation/scale.md can be read; its model is no farther off than is said."""

import json

import pytest

from jaxformer.planning.resources import mesh_sizes
from jaxformer.planning.step_model import estimate_step
from jaxformer.planning.topologies import Topology
from tests.benchmarks.test_benchmarks import BENCHMARKS, benchmark_modules
from tests.support.tiers import first_of_each

__all__ = ["benchmark_modules"]  # a fixture
ROWS = json.loads((BENCHMARKS / "results/scale.json").read_text(encoding="utf-8"))["results"]


@pytest.mark.parametrize(
    "row",
    first_of_each(ROWS, lambda row: row["preset"]),
    ids=lambda row: f"{row['preset']}-{row['topology']}",
)
def test_a_row_is_what_the_model_says_now(row, benchmark_modules):
    options = benchmark_modules("scale").options_of(row["command"])
    config, topology = options.config, Topology.parse(options.topology)
    guess = estimate_step(config, mesh_sizes(config, topology.count))
    estimate = row["model"]
    assert estimate["source"] == "model"
    assert estimate["devices"] == topology.count
    for name in ("parameters", "moments", "gradients", "activations"):
        assert estimate[name] == getattr(guess, name)
    assert estimate["training"] == guess.gradients + guess.activations + guess.temporary
    assert estimate["operations_per_step"] == guess.model_operations
    assert estimate["total"] == guess.total + estimate["corpus"]


@pytest.mark.parametrize(
    "row",
    [row for row in ROWS if "compiled" in row],
    ids=lambda row: f"{row['preset']}-{row['topology']}",
)
def test_the_model_is_near_the_compiler(row, benchmark_modules):
    scale = benchmark_modules("scale")
    assert abs(scale.deviation(row)) <= scale.LARGEST_DEVIATION[scale.kind_of(row)]
    model, compiled = row["model"], row["compiled"]
    assert compiled["source"] == "compiled"
    for name in ("parameters", "moments", "gradients", "operations_per_step", "mesh"):
        assert compiled[name] == model[name]


def test_the_family_is_planned_at_three_sizes_on_tpus_and_gpus():
    kinds = {(row["preset"], row["topology"].partition(":")[0]) for row in ROWS}
    for preset in ("llama-1b", "llama-7b", "llama-70b"):
        assert {k for p, k in kinds if p == preset} >= {"v5e", "v5p", "v6e", "H100"}
