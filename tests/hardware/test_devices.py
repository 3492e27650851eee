"""What known accelerators can do, and how much of it a run makes use of."""

import types

import pytest

from jaxformer.hardware import accelerators as devices
from jaxformer.hardware.accelerators import (
    ACCELERATORS,
    Utilization,
    find_accelerator,
)
from jaxformer.hardware.units import format_rate
from tests.support.tiny import TEXT, records, train


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100-16GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100 80GB PCIe", "A100-80GB-PCIe"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("TPU v3", "v3"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
    ],
)
def test_what_jax_calls_a_device_finds_it(kind, name):
    assert find_accelerator(kind).name == name


@pytest.mark.parametrize(
    "kind",
    [
        "cpu",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA L40",
        "TPU v9",
    ],
)
def test_other_devices_are_not_taken_for_known_ones(kind):
    assert find_accelerator(kind) is None


def test_names_are_one_each_and_peaks_are_in_order():
    assert len({a.name for a in ACCELERATORS}) == len(ACCELERATORS)
    for one in ACCELERATORS:
        assert one.peak("float32") is not None, one.name
        # Half the bytes are never slower, and rounding factors never slower than not.
        peaks = [p for p in (one.bfloat16, one.tensor_float32, one.float32) if p is not None]
        assert peaks == sorted(peaks, reverse=True), one.name


def test_the_peak_is_that_of_the_precision_in_use():
    h100 = find_accelerator("NVIDIA H100 80GB HBM3")
    assert h100.peak("bfloat16") == 989.4e12
    assert h100.peak("float32") == h100.peak("float32", "tensorfloat32") == 494.7e12
    assert h100.peak("float32", "highest") == h100.peak("float32", "float32") == 67e12
    assert h100.peak("float64") is None
    assert find_accelerator("Tesla T4").peak("bfloat16") is None
    assert find_accelerator("Tesla T4").peak("float32") == 8.1e12


def test_utilization_is_a_share_of_all_devices():
    four = [types.SimpleNamespace(device_kind="TPU v4")] * 4
    used = Utilization.of(1_000_000, four, "bfloat16")
    assert used.record(550e6) == {"model_flops_utilization": 0.5}
    assert used.describe(550e6) == "50.0% MFU"
    unknown = Utilization.of(1_000_000, [types.SimpleNamespace(device_kind="cpu")], "float32")
    assert unknown.record(550e6) == {}
    assert unknown.describe(112e3) == "112 GFLOP/s"


def test_rates_are_said_as_people_say_them():
    rates = (3e6, 4.5e9, 112e9, 1.4e12, 55e12, 2.25e15)
    assert [format_rate(rate) for rate in rates] == [
        "0.0 GFLOP/s", "4.5 GFLOP/s", "112 GFLOP/s", "1.4 TFLOP/s", "55 TFLOP/s", "2.2 PFLOP/s",
    ]  # fmt: skip


def test_a_run_on_a_known_device_tells_its_utilization(text, capsys, monkeypatch):
    known = devices.Accelerator("here", "cpu", 1e9, None, None, 2e12, 1e11, None)
    monkeypatch.setattr(devices, "ACCELERATORS", (known,))
    assert train(text, "run", "--steps", 3) == 0
    assert "% MFU" in capsys.readouterr().out
    # One layer of 4 + 8 matrices of 16 × 16, the head, and attention.
    operations = 6 * (12 * 16**2 + len(set(TEXT)) * 16) + 12 * 8 * 16
    for record in records("run"):
        if "train_loss" in record:
            expected = record["tokens_per_second"] * operations / 2e12
            assert record["model_flops_utilization"] == pytest.approx(expected)


def test_a_run_on_an_unknown_device_tells_how_fast_it_computes(text, capsys):
    assert train(text, "run", "--steps", 3) == 0
    out = capsys.readouterr().out
    assert "FLOP/s" in out
    assert "MFU" not in out
    assert not any("model_flops_utilization" in record for record in records("run"))
