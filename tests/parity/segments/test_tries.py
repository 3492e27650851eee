"""Bugs of a recurrence are found after few tries: few operators are run again."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare
from jaxformer.parity.recording.operators.running_again import run_again
from jaxformer.parity.segments import divergences, ends
from tests.support.tiers import full_after

pytestmark = pytest.mark.usefixtures("settings_of_jax")

WIDTH, HIDDEN = 6, 8
IDS = np.random.default_rng(0).integers(0, 11, (2, 5))


class Recurrence(torch.nn.Module):
    """Two layers of an LSTM over tokens, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.tokens = torch.nn.Embedding(11, WIDTH)
        self.rnn = torch.nn.LSTM(WIDTH, HIDDEN, num_layers=2, batch_first=True)
        self.out = torch.nn.Linear(HIDDEN, 11)

    def forward(self, ids):
        return self.out(self.rnn(self.tokens(ids))[0])


REFERENCE = Recurrence()
ARRAYS = {name: one.detach().numpy() for name, one in REFERENCE.named_parameters()}


def forward(params, ids, bug=""):
    def layer(n, x):
        def step(carry, x):
            h, c = carry
            z = x @ params[f"rnn.weight_ih_l{n}"].T + params[f"rnn.bias_ih_l{n}"]
            z = z + h @ params[f"rnn.weight_hh_l{n}"].T + params[f"rnn.bias_hh_l{n}"]
            i, f, g, o = jnp.split(z, 4, -1)
            g = g if bug == "no tanh" else jnp.tanh(g)
            f = f + 1 if bug == "bias" else f
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * g
            kept = jax.lax.stop_gradient(c) if bug == "stopped" else c
            h = jax.nn.sigmoid(o) * jnp.tanh(kept)
            return (h, c), h

        first = jnp.zeros((len(x), HIDDEN), x.dtype)
        return jax.lax.scan(step, (first, first), x.swapaxes(0, 1))[1].swapaxes(0, 1)

    h = layer(1, layer(0, params["tokens.weight"][ids]))
    return h @ params["out.weight"].T + params["out.bias"]


@pytest.fixture
def count(monkeypatch):
    """Counts the operators that are run again."""
    found = {"runs": 0}

    def counted(operators, given, *args):
        made = run_again(operators, given, *args)
        found["runs"] += len(made) - len(given)
        return made

    for module in (divergences, ends):
        monkeypatch.setattr(module, "run_again", counted)
    return found


@pytest.mark.parametrize(
    ("bug", "line"), full_after(0, [("no tanh", "* g"), ("bias", "f = f + 1")])
)
def test_a_wrong_step_is_found(bug, line, count):
    report = compare(REFERENCE, (lambda p, ids: forward(p, ids, bug), ARRAYS), IDS)
    assert report.verdict == "bug"
    first = report.root_causes[0]
    path, _, number = first.jax_source.rpartition(":")
    assert path == __file__
    assert line in Path(path).read_text().splitlines()[int(number) - 1]
    assert first.diagnosis
    assert 0 < count["runs"] < 300_000


@pytest.mark.tier("full")
def test_a_stopped_gradient_is_found(count):
    report = compare(REFERENCE, (lambda p, ids: forward(p, ids, "stopped"), ARRAYS), IDS)
    assert report.verdict == "bug"
    assert all(cause.is_backward for cause in report.root_causes)
    assert "the candidate stops gradients at " in str(report)
    assert 0 < count["runs"] < 500_000
