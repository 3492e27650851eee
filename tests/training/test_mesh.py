"""Every mesh computes the same step, with less memory on each device."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxformer.char_data import evaluation_windows
from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.errors import DeviceError
from jaxformer.execution.layer_scan import scanned_layers
from jaxformer.execution.rematerialization import rematerialization
from jaxformer.parameters import abstract
from jaxformer.training.initial_state import plan_parameters
from jaxformer.training.parallel import device_loop, sharding_rules
from jaxformer.training.parallel import strategy as strategy_module
from jaxformer.training.parallel.devices import check_mesh
from jaxformer.training.parallel.sharding_rules import RULES, check_rules, rule_name, sharding_table
from jaxformer.transformer_lm import TransformerLM
from tests.support.meshes import (
    IDS,
    LENGTH,
    LLAMA,
    MESHES,
    ODD,
    ONE,
    dropping,
    fetch,
    make,
    parameter_shapes,
    parameters_of,
    run,
    run_with,
    state_of,
)
from tests.support.tiers import SLOW, full_after, full_except
from tests.support.tiny import DROPOUT, losses, manifest, resume, train, train_arguments


@pytest.fixture(autouse=True)
def float64():
    """So that only the order of sums differs."""
    with jax.enable_x64(True):
        yield


def assert_same(one, other):
    np.testing.assert_allclose(other[0], one[0], rtol=0, atol=1e-10)
    for name, value in one[1].items():
        np.testing.assert_allclose(other[1][name], value, rtol=0, atol=1e-10, err_msg=name)


# parity_tests/test_train_step.py compares eight devices under pmap with one, too.
@pytest.mark.parametrize(
    "mesh",
    full_except(
        [pytest.param(mesh, marks=[SLOW] * (mesh == "pmap 8")) for mesh in MESHES],
        lambda mesh: mesh == "data 2 x fsdp 2 x tensor 2",
    ),
)
def test_twenty_steps_are_the_same_on_every_mesh(mesh):
    """Losses and parameters equal those of pmap on one device, to 1e-10, with dropout."""
    one = fetch(dropping(LLAMA), ONE)
    assert one[0][-1] < one[0][0] - 0.1
    assert_same(one, fetch(dropping(LLAMA), mesh))


@pytest.mark.parametrize(
    "mesh",
    full_after(
        0,
        [*map(pytest.param, [(8, 1, 1, 4), (8, 2, 2, 2)]), "fsdp 8", "data 2 x fsdp 2 x tensor 2"],
        slow_after=2,
    ),
    ids=str,
)
def test_twenty_steps_of_experts_are_the_same_on_a_mesh(mesh):
    """Each device has its part of every expert's matrix, or some of the experts."""
    config = dropping(LLAMA).replace(
        num_experts=4,
        shared_expert_d_ff=16,
        shared_expert_gate=True,
        feed_forward_bias=True,
        hidden_dropout=0.1,
    )
    one = fetch(config, ONE)
    assert one[0][-1] < one[0][0] - 0.1
    assert_same(one, fetch(config, mesh))


@pytest.mark.tier("slow")
def test_a_model_that_divides_badly_is_the_same_on_a_mesh_in_micro_batches():
    assert_same(fetch(ODD, ONE), fetch(ODD, "data 2 x fsdp 2 x tensor 2", accumulation=2))


@pytest.mark.tier("slow")
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("config", [LLAMA, ODD, dropping(ODD)], ids=["llama", "odd", "dropping"])
def test_every_model_is_the_same_on_every_mesh(config, mesh, accumulation):
    config = dataclasses.replace(config, num_layers=3)
    assert_same(fetch(config, ONE, accumulation), fetch(config, mesh, accumulation))


@pytest.mark.tier("slow")
@pytest.mark.parametrize(
    "execution",
    [
        functools.partial(rematerialization, "dots"),
        functools.partial(rematerialization, "full"),
        scanned_layers,
    ],
    ids=["dots", "full", "scanned"],
)
def test_other_ways_to_run_a_block_change_nothing_on_a_mesh(execution):
    config = dataclasses.replace(dropping(LLAMA), num_layers=3)
    strategy = make.__wrapped__(config, "fsdp 4 x tensor 2")
    with execution():
        losses, state = run_with(strategy, config)
    assert_same(fetch(config, ONE), (losses, strategy.fetch(state.parameters)))


def test_a_run_cut_into_calls_computes_the_same_bits_on_a_mesh():
    whole, parameters = fetch(dropping(LLAMA), "fsdp 4 x tensor 2")
    cut, parameters_of_cut = fetch(dropping(LLAMA), "fsdp 4 x tensor 2", per_call=5)
    assert (whole == cut).all()
    for name, value in parameters.items():
        assert (value == parameters_of_cut[name]).all()


def held(state):
    """Bytes of a state on each device."""
    sizes = dict.fromkeys(jax.devices(), 0)
    for array in jax.tree.leaves(state):
        for shard in array.addressable_shards:
            sizes[shard.device] += shard.data.nbytes
    return sizes


@pytest.mark.parametrize("mesh", full_after(1, ["fsdp 4 x tensor 2", "data 8", "fsdp 8"]))
def test_each_device_holds_its_part_and_no_more(mesh):
    config = dropping(LLAMA)
    strategy = make(config, mesh)
    table = sharding_table(strategy.spec.shapes, dict(strategy.mesh.shape))
    part = sum(np.prod(line.part, dtype=int) for line in table)
    whole = sum(np.prod(line.shape, dtype=int) for line in table)
    # Parameters and two moments, and three counters of steps.
    expected = {8 * 3 * part + 4 * 3}
    assert set(held(strategy.place(state_of(config))).values()) == expected
    _, state = run(config, mesh)
    assert set(held(state).values()) == expected, "steps leave them where they are"
    if mesh == "data 8":
        assert part == whole
    else:
        assert whole / 8 <= part < whole / 8 * 1.15, "all but vectors are in eight parts"


@pytest.mark.tier("full")
def test_the_first_state_is_drawn_in_parts_and_is_the_same():
    one, many = make(LLAMA, "mesh of one"), make(LLAMA, "data 2 x fsdp 2 x tensor 2")
    expected, found = (s.initial_state(plan_parameters(LLAMA, 3)) for s in (one, many))
    assert len(set(held(found).values())) == 1
    assert max(held(found).values()) < max(held(expected).values()) / 3
    for a, b in zip(
        jax.tree.leaves(one.fetch(expected)), jax.tree.leaves(many.fetch(found)), strict=True
    ):
        np.testing.assert_allclose(b, a, rtol=0, atol=1e-12)


def test_parameters_are_put_together_again_for_the_way_back():
    """Otherwise every device would keep all of them until then; read as lowered, before XLA."""
    strategy = make(LLAMA, "fsdp 8")
    state = strategy.spec.state_shapes()
    text = strategy.lower_steps(*strategy.step_shapes(state, len(IDS), 2)).as_text()
    whole = re.findall(r"sharding_constraint.*\[\{\}, \{\}\]> : tensor<24x40x", text)
    assert len(whole) == 2 * 3, "two matrices, forward, backward and their gradient"


@pytest.mark.tier("full")
def test_devices_of_a_cpu_synchronize_once_a_step():
    # Under pmap; every synchronization costs as much as the sum of a large array.
    strategy = make(LLAMA, (2, None, None))
    state = strategy.spec.state_shapes()
    program = strategy.compile_steps(*strategy.step_shapes(state, len(IDS), 2)).as_text()
    sums = re.findall(r"= (.*) all-reduce\(", program)
    numbers = 1 + sum(p.size for p in strategy.spec.shapes.values())
    assert [re.findall(r"\[(\d+)\]", shape) for shape in sums] == [[str(numbers)]]


def test_evaluation_of_an_odd_number_of_windows_is_the_plain_mean():
    starts, mask = evaluation_windows(len(IDS), LENGTH)
    assert len(starts) % 2 == 1
    found = []
    for mesh in ("mesh of one", "data 2 x fsdp 2 x tensor 2"):
        strategy = make(LLAMA, mesh)
        parameters, tokens = strategy.place(parameters_of(LLAMA)), strategy.place_tokens(IDS)
        found.append(strategy.evaluate(parameters, tokens, starts, mask, 3))
    np.testing.assert_allclose(found, found[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("mesh", "size", "parts"),
    [(ONE, 4, [2, 2]), (ONE, 3, [3]), (ONE, 1000, None), ("data 2 x fsdp 2 x tensor 2", 4, [16])],
    ids=str,
)
def test_one_cpu_evaluates_two_parts_at_a_time(monkeypatch, mesh, size, parts):
    """Where their number is even, and on no mesh, and without windows computed in vain."""
    rows, step = [], device_loop.evaluation_step

    def note(parameters, inputs, *rest, **options):
        rows.append(len(inputs))
        return step(parameters, inputs, *rest, **options)

    monkeypatch.setattr(device_loop, "evaluation_step", note)
    starts, mask = evaluation_windows(len(IDS), LENGTH)
    strategy = make(LLAMA, mesh)
    parameters, tokens = strategy.place(parameters_of(LLAMA)), strategy.place_tokens(IDS)
    found = strategy.evaluate(parameters, tokens, starts, mask, size)
    half = -(-len(starts) // 2)
    assert rows == ([half, half] if parts is None else parts)
    plain = strategy.evaluate(parameters, tokens, starts, mask, 1)
    assert found == pytest.approx(plain, abs=1e-12)


@pytest.mark.parametrize(
    ("windows", "size", "expected"),
    [(160, 64, 54), (70, 32, 24), (33, 32, 18), (64, 64, 64), (5, 64, 6), (1, 64, 2), (9, 1, 1)],
)
def test_the_calls_of_an_evaluation_take_about_as_many_windows(windows, size, expected):
    strategy = make(LLAMA, ONE)
    shapes = strategy.evaluation_shapes(strategy.spec.shapes, len(IDS), windows, size)
    assert shapes[3].shape[-2:] == (expected, LENGTH)
    assert expected <= size


BASE = {"vocab_size": 34, "d_model": 24, "num_heads": 4, "context_length": 13, "num_layers": 2}
BERT = {"head": "masked_lm", "causal": False, "pooler": True, "num_token_types": 2}
ALL_PARTS = [
    {"embedding_norm": True, "branch_output_norm": True, "query_key_norm": True},
    {"activation": "geglu", "num_kv_heads": 2, "head_bias": True, "tie_embeddings": False},
    {"positions": "relative", "head_bias": True, "norm": "rms_norm"},
    {"block": "parallel", "shared_norm": True, "positions": "alibi"},
    {"block": "post_norm", "positions": "sinusoidal", "final_norm": False},
    {
        "block": "output_norm",
        "activation": "xielu",
        "query_key_norm": True,
        "query_key_norm_over": "own_head",
    },
    {"lora_rank": 2, "lora_targets": "q_proj"},
    {**BERT, "num_task_types": 3},
    {"attention_sinks": True},
    {**BERT, "embedding_width": 12},
    {"embedding_width": 12, "projected_embeddings": "tokens"},
    {
        "activation": "swiglu",
        "feed_forward_bias": False,
        "num_experts": 4,
        "shared_expert_d_ff": 16,
        "shared_expert_gate": True,
        "choice_bias": True,
    },
    {
        "positions": "rotary",
        "latent_width": 12,
        "query_latent_width": 8,
        "rotary_head_dim": 4,
        "head_dim": 8,
    },
]


def test_every_part_of_every_model_has_a_rule_and_every_rule_a_part():
    used = set()
    for settings in ALL_PARTS:
        _, shapes = abstract(
            lambda rngs, s=settings: TransformerLM(TransformerLMConfig(**BASE, **s), rngs=rngs)
        )
        table = sharding_table(shapes, {"data": 1, "fsdp": 2, "tensor": 2})
        assert {line.name for line in table} == shapes.keys()
        used |= {rule_name(name) for name in shapes}
    both = EncoderDecoderConfig(
        **{k: v for k, v in BASE.items() if k not in ("vocab_size", "num_layers")},
        source_vocab_size=29, target_vocab_size=29, positions="learned", shared_positions=False,
        embedding_norm=True, shared_embedding=False, branch_output_norm=True,
    )  # fmt: skip
    _, shapes = abstract(lambda rngs: EncoderDecoder(both, rngs=rngs))
    check_rules(shapes)
    assert used | {rule_name(name) for name in shapes} == RULES.keys()


def test_parameters_without_a_rule_are_all_named(monkeypatch):
    monkeypatch.delitem(RULES, "q_proj.kernel")
    names = ["blocks.0.attention.q_proj.kernel", "blocks.1.attention.q_proj.kernel"]
    two = dataclasses.replace(LLAMA, num_layers=2)
    with pytest.raises(ValueError, match=", ".join(names)):
        make(two, "fsdp 8")
    check_rules(set(parameter_shapes(two)[1]) - set(names))


def test_an_axis_that_does_not_divide_is_left_out():
    sizes = {"data": 1, "fsdp": 4, "tensor": 2}
    spec = sharding_rules.parameter_spec
    assert spec("token_embedding.embedding", (34, 24), sizes) == PartitionSpec("tensor", "fsdp")
    assert spec("token_embedding.embedding", (29, 24), sizes) == PartitionSpec(None, "fsdp")
    assert spec("lm_head.kernel", (26, 34), sizes) == PartitionSpec(None, "tensor")
    assert spec("o_proj.kernel", (24, 30), sizes) == PartitionSpec(("tensor", "fsdp"), None)
    assert spec("o_proj.kernel", (20, 30), sizes) == PartitionSpec("tensor", None)


@pytest.mark.parametrize(
    ("devices", "fsdp", "tensor", "way_out"),
    [
        (8, 3, 1, "use fsdp 1 or 2 or 4 or 8"),
        (8, 4, 4, "use fsdp 1 or 2"),
        (6, 1, 4, "use tensor 1 or 2"),
    ],
)
def test_a_mesh_that_cannot_be_made_is_rejected_with_those_that_can(devices, fsdp, tensor, way_out):
    with pytest.raises(DeviceError, match=way_out):
        check_mesh(devices, fsdp, tensor)


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--fsdp", 8], 2, ["fsdp and tensor need strategy='mesh'", "fsdp=8"]),
        (["--strategy", "mesh", "--tensor", 3], 2, ["divisible by tensor", "use 1, 2"]),
        (["--strategy", "mesh", "--fsdp", 0], 2, ["fsdp must be positive"]),
        (["--strategy", "mesh", "--fsdp", 3, "--devices", 8], 9, ["--fsdp 1 or 2 or 4 or 8"]),
        (["--strategy", "mesh", "--fsdp", 8, "--devices", 8], 9, ["--batch-size 4", "use 8"]),
    ],
)
def test_what_does_not_fit_is_rejected(refuse, text, flags, code, words):
    refuse(train_arguments(text, "run", *flags), code, *words)


@pytest.mark.tier("full")
def test_a_run_resumes_bit_exact_and_on_another_mesh_up_to_rounding(text, capsys):
    mesh = ["--strategy", "mesh", "--devices", 8, "--fsdp", 2, "--tensor", 2, "--batch-size", 8]
    seldom = ["--eval-interval", 90, "--checkpoint-interval", 6, "--sample-tokens", 0]
    flags = [*mesh, *seldom, *DROPOUT]
    assert train(text, "whole", "--steps", 18, *flags) == 0
    assert train(text, "run", "--steps", 6, "--decay-steps", 18, *flags) == 0
    capsys.readouterr()
    assert resume("run", "--steps", 12) == 0
    assert "not bitwise" not in capsys.readouterr().out
    expected, found = losses("whole"), losses("run")
    assert all(found[step] == expected[step] for step in range(1, 13))
    assert manifest("run", 12)["state_sha256"] == manifest("whole", 12)["state_sha256"]
    changed = ["--strategy", "pmap", "--fsdp", 1, "--tensor", 1]
    assert resume("run", "--steps", 18, *changed) == 0
    out = capsys.readouterr().out
    assert "8 x mesh of data 2, fsdp 2, tensor 2 -> 8 x pmap" in out
    assert "not bitwise" in out
    found = losses("run")
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-10
    # Rounding may be too small for six losses to show; the state shows it.
    assert manifest("run", 18)["state_sha256"] != manifest("whole", 18)["state_sha256"]
    assert manifest("run", 18)["devices"] == "8 x pmap"


def test_xla_flags_win_over_the_options_of_a_step(monkeypatch):
    given = []

    class Lowered:
        def compile(self, compiler_options=None):
            given.append(compiler_options)

    strategy = make(LLAMA, (1, None, None))
    monkeypatch.setattr(strategy, "lower_steps", lambda *arguments: Lowered())
    usual = strategy_module.OPTIONS["cpu"]
    assert len(usual) == 1
    for flags, expected in (("--xla_other=1", usual), (f"--{next(iter(usual))}=false", {})):
        monkeypatch.setenv("XLA_FLAGS", flags)
        strategy.compile_steps(None, None, None, None)
        assert given.pop() == expected


@pytest.mark.tier("full")
@pytest.mark.parametrize("sizes", [("--expert", 1), ("--expert", 2), ("--tensor", 2)], ids=str)
def test_experts_are_trained_in_bfloat16_on_a_mesh(text, sizes):
    """XLA's CPU compiler would end the process if it had to cut their loops by itself."""
    experts = ["--num-experts", 4, "--activation", "swiglu", "--dtype", "bfloat16"]
    mesh = ["--strategy", "mesh", "--devices", 2, *sizes]
    assert train(text, "out", "--steps", 2, *experts, *mesh) == 0
    assert train(text, "one", "--steps", 2, *experts) == 0
    assert losses("out") == pytest.approx(losses("one"), rel=1e-2)
