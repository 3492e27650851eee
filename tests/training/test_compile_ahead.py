"""The step is compiled while its state is drawn: the same program, compiled once."""

import jax
import numpy as np
import pytest

from jaxformer.execution.rematerialization import rematerialization
from jaxformer.training.initial_state import plan_parameters
from jaxformer.training.parallel import Strategy
from tests.support.meshes import BATCH, IDS, LLAMA, ONE, make
from tests.support.tiny import losses, resume, train

STEPS = 3
STARTS = np.arange(STEPS * BATCH, dtype=np.int32).reshape(STEPS, BATCH)


def three_steps(strategy):
    state = strategy.initial_state(plan_parameters(LLAMA, 1))
    tokens = strategy.place_tokens(IDS)
    state, history = strategy.train(state, tokens, STARTS, STEPS)
    return history["train_loss"], strategy.fetch(state.parameters)


def compile_ahead(strategy):
    strategy.compile_ahead(strategy.spec.state_shapes(), len(IDS), STEPS)


@pytest.mark.parametrize("mesh", [ONE, "pmap 8", "fsdp 4 x tensor 2"], ids=str)
def test_what_is_compiled_ahead_is_the_same_program(mesh, monkeypatch):
    expected_losses, expected = three_steps(make.__wrapped__(LLAMA, mesh))
    strategy = make.__wrapped__(LLAMA, mesh)
    # What holds while it is begun is what it is traced with; this changes no number.
    with rematerialization("full"):
        compile_ahead(strategy)
    lowered = []
    monkeypatch.setattr(strategy, "lower_steps", lambda *arguments: lowered.append(arguments))
    found_losses, found = three_steps(strategy)
    assert not lowered, "it is compiled once"
    np.testing.assert_allclose(found_losses, expected_losses, rtol=1e-6)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("mesh", [ONE, "pmap 8", "fsdp 4 x tensor 2"], ids=str)
def test_shapes_and_arrays_lower_to_the_same_text(mesh):
    strategy = make.__wrapped__(LLAMA, mesh)
    texts = []
    lower = strategy.lower_steps

    def note(*arguments):
        lowered = lower(*arguments)
        texts.append(lowered.as_text())
        return lowered

    strategy.lower_steps = note
    compile_ahead(strategy)
    strategy._compiled_ahead.popitem()[1].result()
    three_steps(strategy)
    assert len(texts) == 2
    assert texts[0] == texts[1]


def test_other_shapes_are_compiled_when_they_come():
    strategy = make.__wrapped__(LLAMA, ONE)
    strategy.compile_ahead(strategy.spec.state_shapes(), len(IDS), STEPS + 1)
    expected_losses, _ = three_steps(make.__wrapped__(LLAMA, ONE))
    assert (three_steps(strategy)[0] == expected_losses).all()


def test_an_error_of_the_compiler_is_that_of_the_first_step(monkeypatch):
    class Lowered:
        def compile(self, compiler_options=None):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no room")

    strategy = make.__wrapped__(LLAMA, ONE)
    monkeypatch.setattr(strategy, "lower_steps", lambda *arguments: Lowered())
    compile_ahead(strategy)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"^RESOURCE_EXHAUSTED: no room$"):
        three_steps(strategy)


def test_only_a_run_whose_weights_are_drawn_is_compiled_ahead(text, monkeypatch):
    """A checkpoint may not fit, which is said before anything is compiled."""
    begun = []
    ahead = Strategy.compile_ahead

    def note(self, *arguments):
        begun.append(arguments[1:])
        ahead(self, *arguments)

    monkeypatch.setattr(Strategy, "compile_ahead", note)
    assert train(text, "run", "--steps", 2) == 0
    assert len(begun) == 1
    assert resume("run", "--steps", 4) == 0
    assert train(text, "warm", "--steps", 2, "--init-from", "run", "--fresh-optimizer") == 0
    assert len(begun) == 1
    monkeypatch.setattr(Strategy, "compile_ahead", lambda *arguments: None)
    assert train(text, "other", "--steps", 4) == 0
    assert losses("other")[1] == losses("run")[1]
