"""Moving averages of weights, and the gradient noise scale, in whole runs."""

import numpy as np
import pytest

import jaxformer
from jaxformer.checkpoints import CheckpointFolder
from jaxformer.cli.main import main
from jaxformer.losses import cross_entropy
from jaxformer.training.logging.noise_scale import NoiseScale
from tests.support.tiny import losses, records, resume, same_run, train

EMA = ["--ema", 0.8, "--steps", 20, "--decay-steps", 20]


@pytest.mark.tier("full")
def test_the_average_is_saved_resumed_evaluated_and_ported(text, capsys):
    assert train(text, "whole", *EMA) == 0
    assert train(text, "cut", *EMA, "--steps", 10) == 0
    assert resume("cut", "--steps", 20) == 0
    same_run("cut", "whole", 20)
    arrays, _ = CheckpointFolder("whole/checkpoints").restore(20)
    assert arrays.keys() == {"parameters", "mu", "nu", "ema", "step"}

    model = jaxformer.load("whole")
    kernel = model.module.blocks[0].attention.q_proj.kernel[...]
    name = "blocks.0.attention.q_proj.kernel"
    np.testing.assert_array_equal(kernel, arrays["ema"][name])
    assert np.abs(kernel - arrays["parameters"][name]).max() > 1e-4
    # The validation loss is that of the average, over all windows; here without the last.
    ids = model.tokenizer.encode(text.read_text())
    ids = ids[int(0.9 * len(ids)) :]
    count = (len(ids) - 1) // 8 * 8
    inputs, targets = (ids[n : n + count].reshape(-1, 8) for n in (0, 1))
    model.module.eval()
    loss = float(cross_entropy(model.module(inputs), targets))
    assert losses("whole", "val_loss")[20] == pytest.approx(loss, abs=0.02)

    capsys.readouterr()
    assert main(["port", "whole", "out.pt"]) == 0
    assert "AdamW" not in capsys.readouterr().err


def test_a_run_keeps_its_average(text, refuse, capsys):
    assert train(text, "run", "--steps", 10) == 0
    capsys.readouterr()
    words = "a resumed run must keep optimizer.ema (None -> 0.9)"
    refuse(["train", "--resume", "--out", "run", "--ema", 0.9], 2, words)


@pytest.mark.tier("full")
def test_an_average_begins_with_the_weights_of_a_checkpoint(text):
    assert train(text, "first", "--steps", 10) == 0
    assert train(text, "next", "--init-from", "first", "--steps", 11, "--ema", 0.5) == 0
    folder = CheckpointFolder("next/checkpoints")
    (before, _), (after, _) = folder.restore(10), folder.restore(11)
    for name, average in before["ema"].items():
        np.testing.assert_array_equal(average, before["parameters"][name])
        expected = (before["parameters"][name] + after["parameters"][name]) / 2
        np.testing.assert_allclose(after["ema"][name], expected, rtol=1e-5, atol=1e-8)


def test_the_noise_scale_is_that_of_the_gradients():
    """Gradients of windows are drawn around G with a known covariance; a run may change parts."""
    random = np.random.default_rng(0)
    mean, spread = random.standard_normal(50), 4.0
    scale, resumed, records = NoiseScale(16), NoiseScale(16), []
    for i in range(400):
        count = 4 if i < 390 else 8
        parts = mean + spread / np.sqrt(16 / count) * random.standard_normal((count, 50))
        part_norm = np.sqrt(np.mean(np.sum(parts**2, 1)))
        norm = np.linalg.norm(parts.mean(0))
        records.append({"grad_norm": norm, "part_grad_norm": part_norm, "gradient_parts": count})
        found = scale.update(records[-1])
    assert found == pytest.approx(spread**2 * 50 / np.sum(mean**2), rel=0.2)
    resumed.replay(records[:-1])
    assert resumed.update(records[-1]) == found


@pytest.mark.tier("full")
def test_the_noise_scale_is_measured_where_it_is_wanted(text):
    more = ["--noise-scale", "--accumulation", 2, "--decay-steps", 20]
    assert train(text, "whole", *more, "--steps", 20) == 0
    assert train(text, "cut", *more, "--steps", 10) == 0
    assert resume("cut", "--steps", 20) == 0
    measured = losses("whole", "noise_scale")
    assert len(measured) > 0
    assert losses("cut", "noise_scale") == measured
    assert len(losses("whole", "part_grad_norm")) == 20
    assert train(text, "plain", "--steps", 1) == 0
    assert not any("part_grad_norm" in record for record in records("plain"))
    # Twice the devices are twice the parts, whose gradients are noisier.
    assert resume("cut", "--steps", 30, "--devices", 2) == 0
    assert list(losses("cut", "gradient_parts").values()) == [2] * 20 + [4] * 10
    assert losses("cut", "noise_scale")[21] == pytest.approx(measured[20], rel=0.2)


def test_the_noise_scale_needs_parts(text, capsys):
    assert train(text, "run", "--noise-scale") == 2
    assert "give --accumulation 2 or more" in capsys.readouterr().err
