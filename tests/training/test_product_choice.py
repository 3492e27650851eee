"""Whose products are faster: measured once, kept, and measured again where nothing is kept."""

import functools
import threading
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

from jaxformer.hardware.custom_call_builds import UnavailableError
from jaxformer.hardware.matrix_products import LIBRARIES
from jaxformer.training import product_choice
from jaxformer.training.product_choice import (
    CLEAR_GAIN,
    CLEAR_TURNS,
    FEWEST_TURNS,
    LARGEST_SHAPE,
    LEAST_GAIN,
    SECONDS,
    fastest_library,
)
from tests.execution.test_called_products import MISSING

SHAPE = (64, 16, 48)


ALL = [*LIBRARIES]


@pytest.fixture
def available(monkeypatch, tmp_path):
    """Whose products can be used here, with an empty cache; to be changed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(product_choice, "_LIBRARIES", LIBRARIES)
    monkeypatch.setattr(product_choice, "LEAST_WIDTH_OF_TORCH", 1)
    monkeypatch.setattr(product_choice, "torch_version", lambda: "1.0")
    found = [*LIBRARIES]

    def check(library):
        if library not in found:
            raise UnavailableError("missing")

    monkeypatch.setattr(product_choice, "check_products", check)
    monkeypatch.setattr(product_choice, "are_registered", lambda library: library in found)
    return found


@pytest.fixture
def measured(available, monkeypatch):
    """What was measured; the gains are those in ``measured.gains``."""

    class Measured(list):
        gains: ClassVar = {"jaxformer": 1.5, "torch": 2.0}

    calls = Measured()

    def measure(libraries, shape, devices):
        calls.append((libraries, shape))
        return {library: calls.gains[library] for library in libraries}

    monkeypatch.setattr(product_choice, "_measure_gains", measure)
    return calls


def choose(shape=SHAPE, devices=1):
    return fastest_library(*shape, jax.devices()[:devices])


def test_the_fastest_is_chosen(measured):
    assert choose() == "torch"
    measured.gains = {"jaxformer": 1.5, "torch": 1.4}
    assert choose(devices=2) == "jaxformer"
    measured.gains = dict.fromkeys(LIBRARIES, LEAST_GAIN - 0.01)
    assert choose(devices=3) is None, "what gains too little"


def test_it_is_measured_once_for_each_shape(measured):
    assert [choose() for _ in range(3)] == ["torch"] * 3
    assert measured == [(ALL, SHAPE)]
    measured.gains = {"jaxformer": 1.5, "torch": 0.5}
    assert choose() == "torch"
    assert choose((128, 16, 48)) == "jaxformer"
    assert choose(devices=2) == "jaxformer"
    assert len(measured) == 3
    # What is larger than large is not made to be measured.
    assert choose((10**6, 10**6, 10**6)) == "jaxformer"
    assert choose((10**7, 10**6, 10**6)) == "jaxformer"
    assert measured[3:] == [(ALL, LARGEST_SHAPE)]


def test_what_is_missing_is_not_measured(measured, available):
    available.remove("torch")
    assert choose() == "jaxformer"
    assert measured == [(["jaxformer"], SHAPE)]
    available.remove("jaxformer")
    assert choose() is None
    assert len(measured) == 1
    available.append("torch")
    assert choose() == "torch", "another choice is measured anew"


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"other": "text"}', '{"other": {"x": 1.0}}'])
def test_a_damaged_file_is_made_anew(measured, tmp_path, damage):
    choose()
    path = tmp_path / "jaxformer" / "products.json"
    whole = path.read_text()
    path.write_text(damage)
    assert choose() == "torch"
    assert path.read_text() == whole
    assert len(measured) == 2


def test_a_cache_that_cannot_be_written_to_is_no_error(measured, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert choose() == "torch"


class Calls:
    """Calls that take what is given, in seconds of a clock of their own."""

    def __init__(self, monkeypatch, *turns):
        self.now, self.made = 0.0, []
        self.turns = [iter(seconds) for seconds in turns]
        monkeypatch.setattr(product_choice.time, "perf_counter", lambda: self.now)

    def call(self, side):
        self.made.append(side)
        self.now += next(self.turns[side])

    def times(self):
        sides = range(len(self.turns))
        found = product_choice._time_in_turn({n: functools.partial(self.call, n) for n in sides})
        return [found[side] for side in sides]


def test_a_clear_answer_ends_the_measurement(monkeypatch):
    calls = Calls(monkeypatch, [1.0, 3.0, 1.0], [2.0, 2.0, 2.0])
    assert calls.times() == [1, 2], "a turn that took longer is one that something else disturbed"
    assert calls.made == [0, 1] * CLEAR_TURNS
    calls = Calls(monkeypatch, [2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    assert calls.times() == [2, 1]
    assert calls.made == [0, 1] * CLEAR_TURNS


def test_what_is_clearly_slower_is_left_out(monkeypatch):
    calls = Calls(monkeypatch, [1.0] * FEWEST_TURNS, [2.0] * CLEAR_TURNS, [1.1] * FEWEST_TURNS)
    assert calls.times() == pytest.approx([1, 2, 1.1])
    assert calls.made == [0, 1, 2] * CLEAR_TURNS + [0, 2] * (FEWEST_TURNS - CLEAR_TURNS)


def test_what_is_not_clear_is_measured_to_the_end(monkeypatch):
    near = CLEAR_GAIN - 0.01
    calls = Calls(monkeypatch, [1.0] * FEWEST_TURNS, [near] * FEWEST_TURNS)
    assert calls.times() == pytest.approx([1, near])
    assert len(calls.made) == 2 * FEWEST_TURNS
    # Half of the turns must be faster, and not a single one.
    calls = Calls(monkeypatch, [0.5, 1.0, 1.0, 1.0, 1.0], [1.0] * FEWEST_TURNS)
    assert calls.times() == [0.5, 1]
    assert len(calls.made) == 2 * FEWEST_TURNS
    short = SECONDS / 100
    calls = Calls(monkeypatch, [short] * 100, [short] * 100)
    assert calls.times() == pytest.approx([short, short])
    assert 2 * short * len(calls.made) / 2 >= SECONDS


def test_what_is_clear_is_decided_as_it_would_be_in_the_end():
    assert 1 / CLEAR_GAIN < LEAST_GAIN < CLEAR_GAIN


def test_what_cannot_be_built_is_left_out(available, monkeypatch):
    """XLA's program is compiled while others are built."""
    done, registered = [], threading.Event()

    def register(library):
        done.append(library)
        if len(done) == len(LIBRARIES):
            registered.set()
        return library != "torch"

    def prepare(multiply, **_):
        # In a thread of its own, or after it was built.
        assert multiply is not jnp.matmul or registered.wait(60)
        return multiply

    monkeypatch.setattr(product_choice, "are_registered", register)
    monkeypatch.setattr(product_choice, "_timed_call", prepare)
    monkeypatch.setattr(
        product_choice, "_time_in_turn", lambda calls: dict.fromkeys(calls, 1.0) | {None: 2.0}
    )
    assert choose() == "jaxformer"
    assert {*done[:2]} == {*ALL}


def test_torchs_are_tried_on_intels_processors_alone(measured, monkeypatch):
    monkeypatch.setattr(product_choice, "_LIBRARIES", ("jaxformer",))
    assert choose() == "jaxformer"
    assert measured == [(["jaxformer"], SHAPE)]


def test_torchs_are_not_tried_where_jaxformers_are_as_fast(measured, available, monkeypatch):
    monkeypatch.setattr(product_choice, "LEAST_WIDTH_OF_TORCH", 16)
    assert choose() == "torch"
    narrow = (64, 15, 48)
    assert choose(narrow) == "jaxformer"
    assert measured == [(ALL, SHAPE), (["jaxformer"], narrow)]
    available.remove("jaxformer")
    assert choose(narrow) == "torch"


@pytest.mark.skipif("jaxformer" in MISSING, reason="no C compiler")
@pytest.mark.optimized
@pytest.mark.parametrize("devices", [1, 2])
def test_all_are_timed(devices, monkeypatch):
    monkeypatch.setattr(product_choice, "SECONDS", 0.1)
    here = [library for library in LIBRARIES if library not in MISSING]
    gains = product_choice._measure_gains(here, SHAPE, jax.devices()[:devices])
    assert gains.keys() == {*here}
    assert all(0.01 < gain < 100 for gain in gains.values())
