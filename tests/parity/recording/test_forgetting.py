"""Large values that are soon made again are forgotten; what is read is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parity import compare
from jaxformer.parity.recording.operators import graph
from jaxformer.parity.recording.operators.graph import Recent, Value
from jaxformer.parity.recording.operators.tape import Tape
from jaxformer.parity.recording.operators.torch_run import TorchRun

pytestmark = pytest.mark.usefixtures("settings_of_jax")

X = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32)


@pytest.fixture
def everything_is_forgotten(monkeypatch):
    """Every value that may be forgotten is, as soon as another one is read."""
    monkeypatch.setattr(graph, "LARGE", 1)
    monkeypatch.setattr(graph, "MOST_BYTES", 0)


def chain(tape: Tape, data: np.ndarray, length: int) -> list[Value]:
    """Returns an input and so many values, each larger by 1 than the one before."""
    values = [tape.add(data, "input", "x")]
    for _ in range(length):
        values += tape.record("add", [values[-1]], [values[-1].data + 1], lambda x: [x + 1])
    return values


def is_kept(value: Value) -> bool:
    return value._data is not None


def test_a_value_that_was_forgotten_is_made_again(everything_is_forgotten):
    tape = Tape(observe=lambda value: None)
    values = chain(tape, np.arange(4.0), 3000)
    assert sum(map(is_kept, values)) == 2, "the input and the last one"
    assert (values[1000].data == np.arange(4.0) + 1000).all()


def test_small_values_and_those_of_dear_operators_are_kept():
    tape = Tape(observe=lambda value: None)
    assert all(map(is_kept, chain(tape, np.arange(4.0), 10)))
    first = tape.add(np.ones(graph.LARGE), "input", "y")
    (product,) = tape.record("dot_general", [first], [first.data + 1], lambda y: [y + 1])
    assert not product.is_quick


def test_what_was_put_right_is_no_longer_made_again(everything_is_forgotten):
    tape = Tape(observe=lambda value: None)
    values = chain(tape, np.ones(4), 3)
    values[2].data = np.full(4, 7.0)
    assert (values[1].data == 2).all(), "which forgets the third one"
    assert (values[2].data == 7).all()
    assert (values[3].data == 8).all()


def test_a_value_that_stands_for_another_follows_it(everything_is_forgotten):
    recent = Recent()
    other = np.arange(3.0)
    value = Value(0, np.zeros(3))
    value.stand_for(lambda: other, recent)
    assert value.stands_for_another
    assert (value.data == other).all()


class Reference(torch.nn.Module):
    """Integers that become floats, a view, memory that is written to, complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(1, 9) / 7
        hidden = self.first(x) * places
        hidden = hidden.view(-1, 2, 4).exp().log().reshape(-1, 8)
        turned = torch.view_as_real(torch.view_as_complex(hidden.reshape(-1, 4, 2)) * 1j)
        made = torch.nn.functional.gelu(turned.reshape(-1, 8))
        made = made.clone().add_(1)
        return self.second(made)


def test_a_run_of_pytorch_is_read_as_if_all_were_kept(monkeypatch):
    module = Reference()
    kept = TorchRun(module, [X], {})
    monkeypatch.setattr(graph, "LARGE", 1)
    monkeypatch.setattr(graph, "MOST_BYTES", 0)
    seen: list[Value] = []
    run = TorchRun(module, [X], {}, before_forgetting=seen.append)
    cotangent = np.ones((3, 4))
    both = [
        one.backward({one.tape.outputs[0].index: cotangent}) and one.tape.values
        for one in (kept, run)
    ]
    assert len(seen) > 20
    assert not any(map(is_kept, seen))
    for wanted, value in zip(*both, strict=True):
        assert value.data.dtype == wanted.data.dtype
        # Arrays that lie in another order in memory may be rounded otherwise.
        np.testing.assert_allclose(value.data, wanted.data, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("is_exact", [True, False])
def test_the_report_is_the_same(monkeypatch, is_exact):
    """With a bug in the middle, what comes after it is put right from values made again."""
    torch.manual_seed(0)
    reference = torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.GELU(), torch.nn.Linear(8, 4), torch.nn.GELU()
    )
    params = {name: jnp.asarray(p.detach().numpy()) for name, p in reference.named_parameters()}

    def port(params, x):
        x = x @ params["0.weight"].T + params["0.bias"]
        x = jax.nn.gelu(x, approximate=not is_exact)
        x = x @ params["2.weight"].T + params["2.bias"]
        return jax.nn.gelu(x, approximate=False)

    wanted = str(compare(reference, (port, params), X))
    assert ("tanh form" in wanted) != is_exact
    monkeypatch.setattr(graph, "LARGE", 1)
    monkeypatch.setattr(graph, "MOST_BYTES", 0)
    assert str(compare(reference, (port, params), X)) == wanted
