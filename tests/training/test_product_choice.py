"""Whose products are faster: measured once, kept, and measured again where nothing is kept."""

import threading

import jax
import pytest

from jaxformer.hardware.custom_calls import UnavailableError
from jaxformer.training import product_choice
from jaxformer.training.product_choice import (
    CLEAR_GAIN,
    CLEAR_TURNS,
    FEWEST_TURNS,
    LARGEST_SHAPE,
    LEAST_GAIN,
    SECONDS,
    is_torch_faster,
)
from tests.hardware.test_torch_library import needs_products

SHAPE = (64, 16, 48)


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """The shapes that were measured; the gain is that in ``measured.gain``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    class Measured(list):
        gain = 2.0

    calls = Measured()

    def gain(*arguments):
        calls.append(arguments[:3])
        return calls.gain

    monkeypatch.setattr(product_choice, "_gain", gain)
    monkeypatch.setattr(product_choice, "register_products", lambda: None)
    return calls


def test_it_is_measured_once_for_each_shape(measured):
    devices = jax.devices()[:1]
    assert [is_torch_faster(*SHAPE, devices) for _ in range(3)] == [True] * 3
    assert measured == [SHAPE]
    measured.gain = LEAST_GAIN - 0.01
    assert is_torch_faster(*SHAPE, devices)
    assert not is_torch_faster(128, 16, 48, devices)
    assert not is_torch_faster(*SHAPE, jax.devices()[:2])
    assert len(measured) == 3
    # What is larger than large is not made to be measured.
    assert not is_torch_faster(10**6, 10**6, 10**6, devices)
    assert not is_torch_faster(10**7, 10**6, 10**6, devices)
    assert measured[3:] == [LARGEST_SHAPE]


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"other": "text"}'])
def test_a_damaged_file_is_made_anew(measured, tmp_path, damage):
    devices = jax.devices()[:1]
    is_torch_faster(*SHAPE, devices)
    path = tmp_path / "jaxformer" / "products.json"
    whole = path.read_text()
    path.write_text(damage)
    assert is_torch_faster(*SHAPE, devices)
    assert path.read_text() == whole
    assert measured == [SHAPE] * 2


def test_a_cache_that_cannot_be_written_to_is_no_error(measured, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert is_torch_faster(*SHAPE, jax.devices()[:1])


class Calls:
    """Two calls that take what is given, in seconds of a clock of their own."""

    def __init__(self, monkeypatch, *turns):
        self.now, self.made = 0.0, []
        self.turns = [iter(seconds) for seconds in turns]
        monkeypatch.setattr(product_choice.time, "perf_counter", lambda: self.now)

    def call(self, side):
        self.made.append(side)
        self.now += next(self.turns[side])

    def gain(self):
        return product_choice._time_in_turn(lambda: self.call(0), lambda: self.call(1))


def test_a_clear_answer_ends_the_measurement(monkeypatch):
    calls = Calls(monkeypatch, [1.0, 3.0, 1.0], [2.0, 2.0, 2.0])
    assert calls.gain() == 0.5, "a turn that took longer is one that something else disturbed"
    assert calls.made == [0, 1] * CLEAR_TURNS
    calls = Calls(monkeypatch, [2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    assert calls.gain() == 2.0
    assert calls.made == [0, 1] * CLEAR_TURNS


def test_what_is_not_clear_is_measured_to_the_end(monkeypatch):
    near = CLEAR_GAIN - 0.01
    calls = Calls(monkeypatch, [1.0] * FEWEST_TURNS, [near] * FEWEST_TURNS)
    assert calls.gain() == pytest.approx(1 / near)
    assert len(calls.made) == 2 * FEWEST_TURNS
    # Half of the turns must be faster, and not a single one.
    calls = Calls(monkeypatch, [0.5, 1.0, 1.0, 1.0, 1.0], [1.0] * FEWEST_TURNS)
    assert calls.gain() == 0.5
    assert len(calls.made) == 2 * FEWEST_TURNS
    short = SECONDS / 100
    calls = Calls(monkeypatch, [short] * 100, [short] * 100)
    assert calls.gain() == pytest.approx(1)
    assert 2 * short * len(calls.made) / 2 >= SECONDS


def test_what_is_clear_is_decided_as_it_would_be_in_the_end():
    assert 1 / CLEAR_GAIN < LEAST_GAIN < CLEAR_GAIN


@pytest.fixture
def steps(monkeypatch, tmp_path):
    """What is done to measure, in order; a name in ``steps.missing`` fails."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(product_choice, "torch_version", lambda: "1.0")

    class Steps(list):
        missing = None
        registered = threading.Event()

    done = Steps()

    def note(name):
        done.append(name)
        if name == done.missing:
            raise UnavailableError(f"{name} fails")

    def prepare(multiply, **_):
        if multiply is product_choice.product:
            note("compile torch's")
        else:
            # While the other thread registers torch's.
            assert done.registered.wait(60)
            note("compile XLA's")

    def register():
        note("register")
        done.registered.set()

    monkeypatch.setattr(product_choice, "check_products", lambda: note("check"))
    monkeypatch.setattr(product_choice, "register_products", register)
    monkeypatch.setattr(product_choice, "_timed_call", prepare)
    monkeypatch.setattr(product_choice, "_time_in_turn", lambda *_: 2.0)
    return done


def test_xlas_program_is_compiled_while_torchs_are_registered(steps):
    assert is_torch_faster(*SHAPE, jax.devices()[:1])
    assert steps[:2] == ["check", "register"]
    assert {*steps[2:4]} == {"compile XLA's", "compile torch's"}


@pytest.mark.parametrize("missing", ["check", "register"])
def test_what_is_missing_is_found_before_anything_is_compiled(steps, missing, tmp_path):
    steps.missing = missing
    assert not is_torch_faster(*SHAPE, jax.devices()[:1])
    assert steps == ["check", "register"][: 1 + (missing == "register")]
    steps.registered.set()
    assert not (tmp_path / "jaxformer" / "products.json").exists()


@needs_products
@pytest.mark.optimized
@pytest.mark.parametrize("devices", [1, 2])
def test_both_are_timed(devices, monkeypatch):
    monkeypatch.setattr(product_choice, "SECONDS", 0.1)
    assert 0.01 < product_choice._gain(*SHAPE, jax.devices()[:devices]) < 100
