"""Whose products are faster: measured once, kept, and measured again where nothing is kept."""

import jax
import pytest

from jaxformer.training import product_choice
from jaxformer.training.product_choice import LARGEST_SHAPE, LEAST_GAIN, is_torch_faster
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


@needs_products
@pytest.mark.optimized
@pytest.mark.parametrize("devices", [1, 2])
def test_both_are_timed(devices, monkeypatch):
    monkeypatch.setattr(product_choice, "SECONDS", 0.1)
    assert 0.01 < product_choice._gain(*SHAPE, jax.devices()[:devices]) < 100
