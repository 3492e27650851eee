"""The dialects of Hugging Face: models of transformers compute the same once they are ported."""

import collections
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer import positions
from jaxformer.porting.api import from_torch
from jaxformer.porting.dialects import HUGGING_FACE
from jaxformer.porting.model_types import model_types
from tests.support.hugging_face import table
from tests.support.hugging_face.building import build_case, build_exact, randomize
from tests.support.hugging_face.cases import ALL_CASES, CASES
from tests.support.hugging_face.precision import in_float32, in_float64, source_tables
from tests.support.hugging_face.proof import Proof
from tests.support.hugging_face.running import assert_close, run_source, run_target, tokens
from tests.support.tiers import SLOW, first_of_each, full_except

pytestmark = pytest.mark.usefixtures("float64")

ROTARY = (
    "llama", "llama linear", "llama llama3", "mistral", "qwen2", "qwen3", "gemma", "gemma2",
    "gpt_neox", "gpt_neox linear", "phi",
)  # fmt: skip
SOME = ("gpt2", "llama", "bert", "t5", "mixtral", "vit")
MAKES_TEXT = [name for name, case in ALL_CASES.items() if case.makes_text]


def test_every_model_type_has_two_cases():
    counts = collections.Counter(case.dialect for case in ALL_CASES.values())
    assert counts.keys() == set(table.MODEL_TYPES)
    assert min(counts.values()) > 1, counts


def test_the_page_of_model_types_is_up_to_date():
    assert table.out_of_date() == [], "run: python docs/write_models.py"


def file_of(name):
    """Returns the file of a case's dialect; of models that see, the model type."""
    dialect = ALL_CASES[name].dialect
    file = HUGGING_FACE.get(dialect, dialect)
    # A pair is made of halves.
    return "clip" if file == "dual_encoder" else file


@pytest.fixture(scope="module")
def proof(request):
    return Proof(request.param)


def first_of_its_file(values):
    """Returns parameters of which the slow tier has all but the first of each file of dialects."""
    return first_of_each(values, file_of, SLOW)


# The default tier has some types of each kind of model. The full one has each type, and of the
# first of each file runs without a mask and texts; the slow one has all configurations. The arrays
# of every type come back to the bit in ``test_hugging_face_arrays``.
@pytest.mark.parametrize(
    "proof",
    full_except(
        first_of_each(ALL_CASES, lambda name: ALL_CASES[name].dialect, SLOW),
        lambda name: name in SOME,
    ),
    indirect=True,
)
def test_outputs_hidden_states_and_gradients_are_equal(proof):
    found = proof.outputs_and_gradients()
    assert found["outputs"] <= 1e-12
    assert found["states"] <= 1e-12
    # BLOOM adds slope · position to scores, numbers a hundred times as large as the scores.
    assert found["gradients"] <= 1e-11


@pytest.mark.parametrize("proof", first_of_its_file(ALL_CASES), indirect=True)
@pytest.mark.tier("full")
def test_outputs_are_equal_without_a_mask(proof):
    found = proof.without_mask()
    assert found["outputs"] <= 1e-12
    candidate, reference = proof.rounding_of_tables()
    assert candidate <= max(2 * reference, 1e-12)


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    "dialect", first_of_each(table.MODEL_TYPES, lambda name: HUGGING_FACE.get(name, name), SLOW)
)
def test_the_parts_of_a_model_type_are_those_that_are_listed(dialect):
    (listed,) = (t.parts for t in model_types() if t.name == dialect)
    assert list(listed) == table.parts_of_dialect(dialect)


@pytest.mark.parametrize(
    "name", first_of_its_file(full_except(MAKES_TEXT, lambda name: name in ("gpt2", "llama")))
)
def test_greedy_texts_are_equal(name):
    found, expected = Proof(name).texts()
    assert np.array_equal(found, expected)
    assert len(np.unique(found)) > 2


@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.tier("full")
def test_what_is_left_in_float64_is_the_rotary_tables(name, monkeypatch):
    case = CASES[name]
    source = randomize(build_case(case))
    target = from_torch(source, case.dialect)
    ids = tokens(5)
    with in_float32():
        expected = run_source(source, ids)[0].detach()
        assert_close(run_target(target, ids)[0], expected, 1e-5)
        tables = source_tables(source)
    monkeypatch.setattr(positions, "rotary_tables", lambda *settings: tables)
    assert_close(run_target(target, ids)[0], expected, 1e-11)


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_tables_differ_in_last_bits_only(name):
    case = CASES[name]
    source = build_case(case)
    position = from_torch(source, case.dialect).blocks[0].attention.position
    target = positions.rotary_tables(
        position.max_length, position.width, position.base, position.scaling
    )
    # A frequency is a quotient, a power and, where it is stretched, up to five operations more:
    # eight roundings of 2^-24. The angle, one more, is up to as many radians as the position.
    bound = 9 * 2.0**-24 * np.arange(position.max_length)[:, None] + 2.0**-23
    for found, expected in zip(source_tables(source), target, strict=True):
        assert found.shape == expected.shape
        assert (np.abs(found - expected) <= bound).all()


def test_token_types_are_equal():
    proof = Proof("bert no pooler")
    ids = tokens(7)
    types = np.random.default_rng(8).integers(0, 3, ids.shape)
    with in_float64():
        (expected,) = run_source(proof.exact_source, ids, token_type_ids=types)
        (found,) = run_target(proof.target, ids, None, jnp.asarray(types))
    assert_close(found, expected.detach(), 1e-12)


@pytest.mark.tier("full")
def test_gelu_fast_is_gelu_new_to_ten_digits():
    case = CASES["gpt_neox"]
    case = dataclasses.replace(case, settings={**case.settings, "hidden_act": "gelu_fast"})
    source = build_exact(case, randomize(build_case(case)).state_dict())
    target = from_torch(source, "gpt_neox")
    ids = tokens(9)
    # It has 0.7978845608 for sqrt(2/π): 4e-12 of the tanh's argument.
    with in_float64():
        assert_close(run_target(target, ids)[0], run_source(source, ids)[0].detach(), 1e-11)
    assert np.float32(0.7978845608) == np.float32(np.sqrt(2 / np.pi))
