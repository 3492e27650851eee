"""Plans of models with experts: what they hold and compute, beside the built model."""

import json
import math

import jax
import pytest
from flax import nnx

from jaxformer.cli.main import main
from jaxformer.costs import count_training_operations
from jaxformer.data.corpora import Corpus
from jaxformer.parameters import abstract
from jaxformer.planning.programs import compile_training
from jaxformer.planning.resources import estimate_from_programs, mesh_sizes
from jaxformer.planning.step_model import estimate_step
from jaxformer.training.config import TrainConfig
from jaxformer.training.experiment import Experiment
from jaxformer.training.parallel.sharding_rules import sharding_table
from jaxformer.transformer_lm import TransformerLM
from tests.support.tiers import full_after
from tests.support.tiny import TEXT, TINY

EXPERTS = {
    "num_layers": 4, "d_model": 32, "num_heads": 4, "d_ff": 48, "context_length": 16,
    "activation": "swiglu", "norm": "rms_norm", "num_experts": 8, "experts_per_token": 3,
    "expert_d_ff": 24, "shared_expert_d_ff": 16, "dense_layers": [0, 2],
}  # fmt: skip
ALL = {**EXPERTS, "dense_layers": [], "feed_forward_bias": True, "router_bias": True}


def prepare(model, **settings):
    values = {"model": model, "batch_size": 16, "steps_per_call": 2, **settings}
    return Experiment.prepare(TrainConfig.from_dict(values), Corpus("text", TEXT, ""))


def built(config):
    """The abstract model and the shapes of its parameters."""
    return abstract(lambda rngs: TransformerLM(config, rngs=rngs))


@pytest.mark.parametrize("settings", [EXPERTS, ALL], ids=["some", "all"])
def test_parameters_and_operations_are_those_of_the_built_model(settings):
    config = prepare(settings, strategy="mesh", fsdp=4, tensor=2).config
    mesh = mesh_sizes(config, 8)
    step = estimate_step(config, mesh)
    model = config.model
    _, shapes = built(model)
    table = sharding_table(shapes, mesh)
    assert step.parameter_count == sum(shape.size for shape in shapes.values())
    assert step.parameters == 4 * sum(math.prod(row.part) for row in table)
    # Without the experts that a token does not have, the model has as many.
    _, chosen = built(model.replace(num_experts=3))
    left_out = sum(model.has_experts(layer) for layer in range(4)) * 5
    router = left_out * (32 + (1 if settings is ALL else 0))
    assert step.active_count == sum(shape.size for shape in chosen.values()) + router
    tokens = config.batch_size * config.window
    assert step.model_operations == tokens * count_training_operations(
        _module(model), config.window
    )


def _module(model):
    return nnx.eval_shape(lambda: TransformerLM(model, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(
    ("fsdp", "tensor", "expert"), full_after(0, [(2, 1, 4), (4, 2, 1), (1, 1, 1)], slow_after=1)
)
def test_what_stays_on_a_device_is_what_xla_is_given(fsdp, tensor, expert):
    # One layer of each kind: every other layer adds the same again.
    model = {**EXPERTS, "num_layers": 2, "dense_layers": [0]}
    experiment = prepare(model, strategy="mesh", fsdp=fsdp, tensor=tensor, expert=expert)
    with experiment.execution_settings():
        program = compile_training(experiment, jax.devices())
    estimate = estimate_from_programs(experiment, jax.devices(), {"training": program})
    small = 4 * (2 * 16 * tensor // 8 + 2)
    given = program.memory_analysis().argument_size_in_bytes
    assert estimate.parameters + estimate.moments + experiment.train_ids.nbytes + small == given
    if expert > 1:
        # Rows go to the experts: no device gets the matrices of another one's.
        moved = [c for c in estimate.collectives if c.axes == ("expert",)]
        assert {"all-gather", "reduce-scatter"} <= {c.kind for c in moved}
        guess = estimate_step(experiment.config, estimate.mesh)
        for kind in ("all-gather", "reduce-scatter"):
            payload, rows = (
                sum(c.payload for c in found if c.axes == ("expert",) and c.kind == kind)
                for found in (moved, guess.collectives)
            )
            # Beside the rows there are the three experts of each, and their weights.
            assert rows <= payload < 1.25 * rows


def test_a_plan_says_how_many_parameters_a_token_has(text, capsys):
    flags = ["--data", str(text), *map(str, TINY), "--activation", "swiglu", "--num-experts", "6"]
    flags += ["--topology", "H100:8", "--model-only", "--batch-size", "8"]
    assert main(["plan", *flags, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    expert = 3 * 16 * (8 * 16 // 3)
    layers = facts["parameter_count"] - facts["active_count"]
    assert layers % (4 * expert) == 0
    assert main(["plan", *flags]) == 0
    assert " for a token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--num-experts", 4, "--strategy", "mesh", "--expert", 3],
            "num_experts must be divisible by expert: got num_experts=4, expert=3",
        ),
        (["--num-experts", 4, "--expert", 2], "fsdp and tensor and expert need strategy='mesh'"),
        (["--num-experts", 2, "--experts-per-token", 3], "experts_per_token must be at most"),
        (["--num-experts", 4, "--expert-groups", 3], "expert_groups must divide num_experts"),
        (["--num-experts", 4, "--activation", "gelu"], "experts"),
        (
            ["--num-experts", 4, "--expert-d-ff", 9, "--strategy", "mesh", "--tensor", 2],
            "must be divisible by tensor: got num_heads=2, width 9, tensor=2; use 1",
        ),
    ],
)
def test_settings_that_do_not_go_together_are_rejected_in_one_line(refuse, text, flags, words):
    arguments = ["plan", "--data", text, *TINY, "--activation", "swiglu", *flags]
    refuse(arguments, 2, words)
