"""``verify --mode grad`` of a folder of transformers and its port accuses nothing."""

import pytest

from jaxformer.porting.dialects import HUGGING_FACE
from tests.support.hugging_face.cases import ALL_CASES, CASES
from tests.support.hugging_face.folders import round_trip
from tests.support.hugging_face.proof import Proof
from tests.support.verified import verify

# Of every file of dialects the first case: a new one is tried without being named here.
FIRST = {HUGGING_FACE[case.dialect]: name for name, case in reversed(CASES.items())}
# Of each mechanism one: decoder, encoder, encoder-decoder, experts, vision, sound.
FULL = {"llama", "experts"}


def check(name, folder):
    trip = round_trip(Proof(name), folder)
    code, lines = verify(trip.folder, trip.file, "--mode", "grad")
    assert code == 0, "\n".join(lines)
    assert lines[-1] in ("equal (rounding)", "equal (amplified)")
    return " ".join(" ".join(lines).split())


@pytest.mark.tier("full")
@pytest.mark.parametrize("file", sorted(FULL))
def test_a_port_of_each_mechanism_is_equal(file, tmp_path):
    text = check(FIRST[file], tmp_path)
    # A buffer that the candidate trains has a gradient too, which is compared.
    is_trained = "final_logits_bias is a buffer, which no optimizer of the reference moves" in text
    assert is_trained == (file == "bart")


@pytest.mark.tier("slow")
@pytest.mark.parametrize("file", sorted(FIRST.keys() - FULL))
def test_a_port_of_each_dialect_is_equal(file, tmp_path):
    check(FIRST[file], tmp_path)


@pytest.mark.tier("slow")
@pytest.mark.parametrize("dialect", ["mbart", "marian", "pegasus", "m2m_100", "blenderbot"])
def test_a_port_of_each_kin_of_bart_is_equal(dialect, tmp_path):
    check(next(n for n, case in ALL_CASES.items() if case.dialect == dialect), tmp_path)
