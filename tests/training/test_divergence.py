"""Numbers that are not finite are found on the device, reported, and never saved."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxformer.char_data import window_starts
from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.parameters import split
from jaxformer.train_step import TrainState
from jaxformer.training.parallel import MeshStrategy, PmapStrategy, StepSpec
from jaxformer.transformer_lm import TransformerLM
from tests.execution.test_called_products import MISSING
from tests.support.tiers import full_after
from tests.support.tiny import TEXT, losses, resume, snapshot, steps, train


def test_a_wild_step_is_not_applied_and_not_saved(text, capsys):
    code = train(text, "run", "--steps", 40, "--learning-rate", 1e30, "--clip-norm", 1)
    assert code == 6
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "is not finite" in err
    assert "no step was saved" in err
    assert "learning_rate" in err
    assert steps("run") == []
    (path,) = [p for p in snapshot("run") if p.name.startswith("divergence-")]
    facts = json.loads(path.read_text())
    step = facts["step"]
    assert path.name == f"divergence-{step}.json"
    ids = 9 * len(TEXT) // 10
    expected = window_starts(1337, step - 1, 4, ids - 8).tolist()
    assert facts["window_starts"] == expected
    assert facts["learning_rate"] > 1e29
    assert "nan" in (facts["train_loss"], facts["grad_norm"]) or "inf" in (
        facts["train_loss"], facts["grad_norm"]
    )  # fmt: skip
    assert max(losses("run")) == step


@pytest.mark.tier("full")
def test_an_earlier_checkpoint_is_untouched_and_resumed(whole, capsys):
    shutil.copytree(whole, "run")
    before = snapshot("run/checkpoints")
    # The rate is 1e30 from the first resumed step on.
    assert resume("run", "--steps", 40, "--learning-rate", 1e30, "--eval-interval", 100) == 6
    assert "step 30 is the last one saved" in capsys.readouterr().err
    assert snapshot("run/checkpoints") == before
    assert resume("run", "--steps", 40, "--learning-rate", 1e-3) == 0
    assert steps("run")[-1] == 40


def test_a_state_that_is_not_finite_is_not_saved(text, capsys):
    """One step with an infinite update: its own loss and gradient are finite."""
    flags = ["--steps", 1, "--learning-rate", 1e38, "--min-learning-rate", 1e38]
    assert train(text, "run", *flags, "--warmup-steps", 0, "--weight-decay", 1e30) == 6
    assert "after step 1 is not finite" in capsys.readouterr().err
    assert steps("run") == []
    assert (  # The numbers of the step itself are there.
        list(losses("run")) == [1]
    )


# With jaxformer's products a custom call makes the update.
LOOPS = {
    "pmap": (PmapStrategy, None),
    "custom calls": (PmapStrategy, "jaxformer"),
    "mesh": (functools.partial(MeshStrategy, fsdp=2), None),
}


@pytest.mark.parametrize("loop", full_after(2, LOOPS))
def test_the_device_loop_stops_before_the_update(loop):
    """Token 4 stands at one place of the corpus, and its embedding is infinite."""
    strategy, products = LOOPS[loop]
    if products and products in MISSING:
        pytest.skip("no C compiler")
    config = TransformerLMConfig(
        vocab_size=5,
        num_layers=1,
        d_model=4,
        num_heads=2,
        context_length=3,
        tie_embeddings=False,
    )
    definition, parameters = split(TransformerLM(config, rngs=nnx.Rngs(0)))
    table = parameters["token_embedding.embedding"].at[4].set(jnp.inf)
    parameters = {**parameters, "token_embedding.embedding": table}
    tokens = np.asarray([0, 1, 2, 3] * 5 + [4] + [0, 1, 2, 3] * 5, np.int32)
    starts = np.asarray([[0, 1], [18, 2], [3, 4]], np.int32)
    spec = StepSpec(
        definition=definition,
        optimizer=OptimizerConfig(),
        shapes=parameters,
        seed=0,
        batch_size=2,
        context_length=3,
        uses_dropout=False,
        products=products,
    )
    parallel = strategy(spec, jax.local_devices()[:2])

    def run(count):
        state = parallel.place(TrainState.create(parameters, OptimizerConfig()))
        state, history = parallel.train(state, parallel.place_tokens(tokens), starts, count)
        return parallel.fetch(state), history["train_loss"]

    good, losses_of_one = run(1)
    state, losses_of_three = run(3)
    assert np.isfinite(losses_of_one).tolist() == [True]
    assert np.isfinite(losses_of_three).tolist() == [True, False], "the third is not made"
    assert state.step == good.step == 1
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(good), strict=True)
    assert all(a.tobytes() == b.tobytes() for a, b in pairs)
