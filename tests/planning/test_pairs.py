"""Plans of encoders and decoders: what they hold and compute, beside the built model."""

import json
import math

import jax
import pytest

from jaxformer.cli.main import main
from jaxformer.config import TransformerLMConfig
from jaxformer.costs import count_training_operations
from jaxformer.parameters import abstract, merge
from jaxformer.planning.plan import find_plan
from jaxformer.planning.resources import mesh_sizes
from jaxformer.planning.step_model import estimate_step
from jaxformer.training.config import PairTrainConfig, TrainConfig
from jaxformer.training.parallel.sharding_rules import sharding_table
from jaxformer.training.parallel.step_spec import make_model
from jaxformer.training.presets import PRESETS
from tests.support.tiers import full_after
from tests.support.tokens import write_t5

SIZES = {
    "source_vocab_size": 37, "target_vocab_size": 37, "num_encoder_layers": 3,
    "num_decoder_layers": 2, "d_model": 16, "num_heads": 4, "d_ff": 40, "context_length": 24,
}  # fmt: skip
T5 = {
    **SIZES,
    "positions": "relative_buckets",
    "shared_embedding": True,
    "tie_embeddings": True,
    "head_bias": False,
    "activation": "geglu_tanh",
    "norm": "rms_norm",
    "block": "pre_norm",
}
BART = {
    **SIZES,
    "positions": "learned",
    "shared_positions": False,
    "encoder_num_heads": 2,
    "encoder_d_ff": 24,
    "embedding_norm": True,
}
OTHERS = {**SIZES, "source_vocab_size": 31, "num_kv_heads": 2, "lora_rank": 3}


def settings_of(model, **more):
    return PairTrainConfig.from_dict(
        {"model": model, "batch_size": 16, "block_size": 11, "source_length": 23, **more}
    )


def check_counts(config, mesh):
    """The parameters of a plan are those of the built model; returns that and the plan."""
    definition, shapes = abstract(lambda rngs: make_model(config.model, rngs))
    step = estimate_step(config, mesh)
    assert step.parameter_count == sum(shape.size for shape in shapes.values())
    table = sharding_table(shapes, mesh)
    assert step.parameters == 4 * sum(math.prod(row.part) for row in table)
    return merge(definition, shapes), step


@pytest.mark.parametrize("model", [T5, BART, OTHERS], ids=["t5", "bart", "lora"])
def test_parameters_and_operations_are_those_of_the_built_model(model):
    config = settings_of(model, strategy="mesh", fsdp=4, tensor=2)
    built, step = check_counts(config, mesh_sizes(config, 8))
    tokens = config.batch_size * config.tokens_per_row
    counted = tokens * count_training_operations(built, *config.row_lengths)
    # Those of a token are rounded down.
    assert 0 <= step.model_operations - counted < tokens
    collectives = {(one.kind, one.axes) for one in step.collectives}
    assert {("all-gather", ("fsdp",)), ("all-reduce", ("tensor",))} <= collectives
    one = {"data": 1, "fsdp": 1, "tensor": 1}
    more = estimate_step(settings_of(model, source_length=24), one)
    assert more.activations > estimate_step(settings_of(model), one).activations


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "llama-70b"])
def test_parameters_of_a_preset_are_those_of_the_built_model(name):
    config = PRESETS[name]().replace(vocab_size=65)
    check_counts(config, mesh_sizes(config, 1))


@pytest.mark.parametrize(
    "settings",
    [
        {"first_norm": False},
        {"first_norm": False, "activation": "swiglu", "num_experts": 3, "dense_layers": (1,)},
        {"embedding_width": 6, "projected_embeddings": "tokens"},
        {"layer_groups": 2, "layers_in_group": 1},
    ],
    ids=str,
)
def test_layers_that_differ_and_narrow_tables_are_counted(settings):
    model = TransformerLMConfig(
        vocab_size=7, num_layers=4, d_model=8, num_heads=2, context_length=5, **settings
    )
    config = TrainConfig(model=model)
    built, step = check_counts(config, mesh_sizes(config, 1))
    tokens = config.batch_size * config.window
    assert step.model_operations == tokens * count_training_operations(built, config.window)


@pytest.mark.parametrize(("fsdp", "tensor"), full_after(0, [(4, 2), (1, 1)], slow_after=1))
def test_what_stays_on_a_device_is_what_xla_is_given(fsdp, tensor):
    from jaxformer.planning.plan import _of_pairs
    from jaxformer.planning.programs import compile_run
    from jaxformer.planning.resources import estimate_from_programs

    strategy = "pmap" if fsdp == tensor == 1 else "mesh"
    model = {**BART, "num_encoder_layers": 2, "num_decoder_layers": 1}
    config = settings_of(model, strategy=strategy, fsdp=fsdp, tensor=tensor, steps_per_call=3)
    experiment, devices = _of_pairs(config), jax.devices()[: fsdp * tensor]
    programs = compile_run(experiment, devices)
    estimate = estimate_from_programs(experiment, devices, programs)
    # Of each pair inputs, targets and a source, of three steps; how many; the step's number.
    row = 11 + 11 + 23
    small = 4 * (3 * 16 * row * tensor // len(devices) + 2)
    given = programs["training"].memory_analysis().argument_size_in_bytes
    assert estimate.parameters + estimate.moments + small == given
    assert estimate.corpus == 0
    assert estimate.tokens_per_step == 16 * (11 + 23)


@pytest.mark.tier("full")
def test_a_plan_of_a_folder_needs_no_data(tmp_path, capsys):
    write_t5(tmp_path / "t5")
    command = ["plan", "--init-from", str(tmp_path / "t5"), "--json", "--devices", "1"]
    capsys.readouterr()
    assert main([*command, "--block-size", "9", "--source-length", "30"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["source"] == "compiled"
    assert facts["tokens_per_step"] == 12 * 39
    import transformers

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "t5")
    assert facts["parameter_count"] == model.num_parameters()
    assert main([*command, "--block-size", "9", "--topology", "H100:4", "--model-only"]) == 0
    assert json.loads(capsys.readouterr().out)["source"] == "model"


@pytest.mark.parametrize(
    "changed",
    [{"attention_dropout": 0.1}, {"score_soft_cap": 3.0}, {"attention_kernel": "plain"},
     {"positions": "alibi"}, {"dtype": "float32"}],
    ids=str,
)  # fmt: skip
def test_what_no_fused_kernel_computes_keeps_its_weights(changed):
    config = PRESETS["gpt2-small"]().replace(attention_dropout=0.0, dtype="bfloat16")
    one = {"data": 1, "fsdp": 1, "tensor": 1}
    fused, plain = (estimate_step(each, one) for each in (config, config.replace(**changed)))
    # Twelve heads, in twelve layers, of each token: a weight for every key.
    assert plain.activations - fused.activations >= 8 * 1024 * 12 * 12 * 1023 * 4


def test_a_run_that_does_not_fit_gets_flags():
    large = {**T5, "d_model": 4096, "num_heads": 32, "num_encoder_layers": 24, "d_ff": 16384,
             "num_decoder_layers": 24, "context_length": 2048}  # fmt: skip
    config = settings_of(large, block_size=512, source_length=2048)
    estimate = find_plan(config.replace(strategy="mesh"), topology="H100:16", model_only=True)
    assert not estimate.fits_here
    assert estimate.remedy is not None
    assert estimate.remedy["fsdp"] == 16
