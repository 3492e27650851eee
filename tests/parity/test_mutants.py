"""The parity debugger names every planted bug, where it is, and nothing else."""

import copy
import zlib

import numpy as np
import pytest

from jaxformer.parity.compare.modules import assert_parity, compare_with
from jaxformer.parity.trace.reference_run import Theirs
from tests.support import mutants as plants
from tests.support.mutants import PLANTS, THEIR_PLANTS
from tests.support.subjects import SUBJECTS, Planted, subject

pytestmark = pytest.mark.usefixtures("float64")

ROTARY = ["unified rotary gated", "llama", "mistral", "gemma2", "gpt_neox", "torch_ref"]
BLOCKS = ["prepost", "minimal", "charlm"]
MODELS = [name for name in SUBJECTS if name not in BLOCKS]
# The models that have a place for a plant, where not all do.
PLACES = {
    "zeroed_bias": [n for n in SUBJECTS if n not in ("llama", "mistral", "gemma2")],
    "swapped": MODELS,
    "mask_shift": [n for n in SUBJECTS if n != "bert"],
    "model_mask": [*ROTARY[1:], "gpt2", "torch_ref post-norm", "encdec gpt"],
    "rotary_layout": ROTARY,
    "rotary_base": ROTARY,
    "soft_cap": ["gemma2"],
    "embedding_scale": ["gemma2", "encdec"],
    "positions_shift": ["unified learned", "gpt2", "bert", "torch_ref post-norm", "encdec gpt"],
}
# The second models of a family are left to the slow run.
SLOW = ("unified alibi post-norm", "mistral", "torch_ref post-norm", "encdec gpt")
# Model by model, so that what one compiles serves the next.
CASES = [
    pytest.param(
        name, plant, id=f"{name}-{plant.__name__}", marks=[pytest.mark.slow] * (name in SLOW)
    )
    for name in SUBJECTS
    for plant in (*PLANTS, *THEIR_PLANTS)
    if name in PLACES.get(plant.__name__, SUBJECTS)
]
# Several at once, which do not stand in each other's place.
TOGETHER = [
    (plants.eps, plants.scaled_gradient),
    (plants.one_element, plants.no_residual, plants.activation),
    (plants.attention_scale, plants.narrow, plants.permuted),
]


def generator(name: str, plant: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(f"{name} {plant}".encode()))


def is_named(report, *planted: Planted) -> None:
    """Demands that just the planted bugs are found, each at its stage."""
    expected = {(path, each.stage) for each in planted for path in each.where}
    found = {(node.path, node.stage) for node in report.culprits}
    assert found == expected, [(n.path, n.stage, n.message, n.worst) for n in report.culprits]
    assert report.verdict == "bug"
    for node in report.culprits:
        assert node.message
        assert node.worst.excess > 1
    for each in planted:
        assert any(each.remark in remark for remark in report.remarks) or not each.remark


@pytest.mark.parametrize(("name", "plant"), CASES)
def test_a_plant_is_named(name, plant):
    random = generator(name, plant.__name__)
    found = subject(name)
    if plant in THEIR_PLANTS:
        theirs = copy.deepcopy(found.theirs)
        planted = plant(found, theirs, random)
        reference = Theirs(theirs, found.inputs, dialect=found.dialect, config=found.ours)
        report = compare_with(reference, found.ours, found.jax_inputs, dtype="float64")
    else:
        ours = found.fresh()
        planted = plant(found, ours, random)
        report = found.compare(ours)
    is_named(report, planted)


@pytest.mark.parametrize("name", [name for name in SUBJECTS if name not in SLOW])
@pytest.mark.parametrize("several", TOGETHER, ids=lambda v: "+".join(p.__name__ for p in v))
def test_plants_do_not_hide_each_other(name, several):
    found = subject(name)
    for attempt in range(50):
        random = np.random.default_rng((attempt, zlib.crc32(name.encode())))
        ours = found.fresh()
        planted = [plant(found, ours, random) for plant in several]
        where = [path for each in planted for path in each.where]
        if len(where) == len(set(where)):
            break
    assert len(where) == len(set(where))
    is_named(found.compare(ours), *planted)


def test_there_are_enough():
    usual = [case.values[0] for case in CASES if not case.marks]
    assert len(usual) >= 200
    assert len({name.partition(" ")[0] for name in usual}) >= 5
    assert set(PLACES) <= {plant.__name__ for plant in PLANTS}


@pytest.mark.parametrize("name", [name for name in SUBJECTS if name not in SLOW])
def test_without_a_plant_there_is_nothing(name):
    found = subject(name)
    report = found.compare(found.fresh())
    assert report.verdict in ("exact", "rounding")
    assert not report.settings
    assert not report.remarks


def test_a_plant_is_named_in_the_dtype_under_test_too():
    found = subject("gpt2")
    ours = found.fresh()
    planted = plants.no_residual(found, ours, generator("gpt2", "bfloat16"))
    report = compare_with(found.reference, ours, found.jax_inputs, dtype="bfloat16")
    is_named(report, planted)
    (node,) = report.culprits
    assert node.in_context.our_rounding > 10 * node.in_context.their_rounding


def test_assert_parity_names_all_culprits():
    found = subject("llama")
    ours = found.fresh()
    plants.eps(found, ours, np.random.default_rng(0))
    ours.blocks[1].attention.scale *= 2
    with pytest.raises(AssertionError, match=r"blocks\.1\.attention: .*norm: "):
        assert_parity(found.theirs, ours, found.inputs, dtype="float64")
    assert assert_parity(found.theirs, None, found.inputs, dtype="float64").verdict == "rounding"
