"""The lower bound of a run's memory follows from its settings, and is never above its need."""

import dataclasses
import functools
import gc
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxformer.config import TransformerLMConfig
from jaxformer.errors import UsageError
from jaxformer.hardware import memory as hardware_memory
from jaxformer.hardware.memory import device_memory, host_memory
from jaxformer.parameters import abstract
from jaxformer.training import startup
from jaxformer.training.config import TrainConfig
from jaxformer.training.memory import (
    check_memory,
    count_matrices,
    least_bytes,
    too_large_for_samples,
)
from jaxformer.transformer_lm import TransformerLM
from tests.support.meshes import BATCH, IDS, ODD, ONE, make, state_of
from tests.support.tiers import full_after
from tests.support.tiny import train, train_arguments

pytestmark = pytest.mark.optimized

SMALL = TransformerLMConfig(
    d_model=12, num_heads=4, context_length=7, num_layers=3, vocab_size=31, d_ff=35
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_kv_heads": 2, "head_dim": 5},
        {"activation": "swiglu", "d_ff": None},
        {"d_ff": None, "head_dim": 4, "positions": "rotary"},
        {"positions": "alibi", "tie_embeddings": False},
        {"positions": "relative"},
        {"head": "masked_lm"},
        {"position_offset": 2, "query_key_norm": True},
        {
            "activation": "swiglu",
            "feed_forward_bias": False,
            "num_experts": 6,
            "expert_d_ff": 10,
            "shared_expert_d_ff": 9,
            "shared_expert_gate": True,
            "dense_layers": (1,),
        },
        {
            "positions": "rotary",
            "head_dim": 10,
            "latent_width": 13,
            "rotary_head_dim": 4,
            "value_head_dim": 7,
            "query_latent_width": 9,
        },
    ],
    ids=str,
)
def test_matrices_are_all_but_biases_and_norms(changes):
    config = dataclasses.replace(SMALL, **changes)
    _, parameters = abstract(lambda rngs: TransformerLM(config, rngs=rngs))
    total = sum(p.size for p in parameters.values())
    vectors = sum(p.size for p in parameters.values() if p.ndim == 1)
    counted = count_matrices(config)
    assert counted <= total
    if changes not in ({"positions": "relative"}, {"head": "masked_lm"}):
        assert counted == total - vectors


def test_every_setting_counts():
    config = TrainConfig(model=SMALL, batch_size=8)
    least = functools.partial(least_bytes, devices=2)
    before = least(config)
    assert before["state"] == 16 * count_matrices(SMALL)
    assert before["batch"] == 4 * 4 * 7 * (3 * 12)
    # The gradients are made after the logits are freed.
    many = least(dataclasses.replace(config, batch_size=800))
    assert many["batch"] == 4 * 400 * 7 * (3 * 12 + 31) - 4 * count_matrices(SMALL)
    # A large vocabulary's logits are made for some positions at a time, here one.
    large = dataclasses.replace(SMALL, vocab_size=1_000_000)
    large = dataclasses.replace(config, model=large, batch_size=8000)
    assert least(large)["batch"] == 4 * 4000 * (7 * 3 * 12 + 1_000_000) - 4 * count_matrices(
        large.model
    )
    half = least(dataclasses.replace(config, dtype="bfloat16"))
    assert half["batch"] == before["batch"] // 2
    assert half["state"] == 14 * count_matrices(SMALL)
    assert least(dataclasses.replace(config, accumulation=2))["batch"] == before["batch"] // 2
    assert least(dataclasses.replace(config, steps_per_call=100))["starts"] == 2 * before["starts"]
    mesh = dataclasses.replace(config, strategy="mesh", fsdp=2)
    assert least(mesh)["state"] == before["state"] // 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--d-model 1024000 --num-heads 4", ["TiB", "50.3 T parameters"]),
        (
            "--d-model 4096000 --num-heads 4",
            ["num_heads times head_dim times d_model must be at most"],
        ),
        ("--num-layers 10000 --d-model 8192", ["8.1 T parameters", "TiB"]),
        ("--d-model 2147483647 --num-heads 1", ["must be at most 4398046511104 elements"]),
        ("--batch-size 2000000000", ["one micro-batch"]),
        ("--steps-per-call 2000000000", ["2,000,000,000 steps per call"]),
        ("--vocab-size 2147483647", ["parameters"]),
    ],
)
def test_a_run_far_too_large_is_rejected_before_anything_is_made(refuse, text, flags, words):
    line = refuse(["train", "--data", text, "--devices", 1, *flags.split()], 2, *words)
    room = f"of {host_memory() / 2**30:,.1f} GiB"
    assert room in line or "elements" in line


@pytest.mark.parametrize(
    "flags",
    [
        "--d-model 900000 --num-layers 10000 --num-heads 1",
        "--batch-size 2147483647 --vocab-size 4000000",
    ],
)
def test_a_plan_beyond_all_machines_is_rejected(refuse, text, flags):
    words = "more than all machines there are"
    refuse(["plan", "--data", text, "--devices", 1, *flags.split()], 2, words)


def test_the_room_is_shared_by_the_devices_of_a_cpu(monkeypatch):
    monkeypatch.setattr(hardware_memory, "host_memory", lambda: 100_000)
    config = TrainConfig(model=SMALL, batch_size=8, steps_per_call=1)
    check_memory(config, 1, device_memory(jax.devices()[:1]))
    with pytest.raises(UsageError, match="on each of 8 devices"):
        check_memory(config, len(jax.devices()), device_memory(jax.devices()))


def test_samples_need_the_whole_model_on_one_device(monkeypatch):
    config = TrainConfig(model=SMALL, strategy="mesh", fsdp=8)
    # In bytes a parameter: 4 whole, and an eighth of 12 beside them.
    room = int(5.5 * count_matrices(SMALL))
    monkeypatch.setattr(hardware_memory, "host_memory", lambda: 8 * room)
    assert too_large_for_samples(config, device_memory(jax.devices())) is None
    monkeypatch.setattr(hardware_memory, "host_memory", lambda: 8 * (room - 1))
    reason = too_large_for_samples(config, device_memory(jax.devices()))
    assert "no samples will be written" in reason
    assert too_large_for_samples(config, device_memory(jax.devices()[:1])) is None


@pytest.mark.tier("full")
def test_a_run_without_room_for_samples_says_so_once_and_continues(text, monkeypatch, capsys):
    monkeypatch.setattr(
        startup, "too_large_for_samples", lambda *_: "no samples will be written: x"
    )
    assert train(text, "run", "--steps", 20) == 0
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("no samples will be written") == 1
    assert captured.out.count("validation loss") == 2
    assert "│" not in captured.out


def test_a_containers_limit_counts(monkeypatch, tmp_path):
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "limit").write_text("12345\n")
    monkeypatch.setattr(hardware_memory, "CONTAINER_LIMITS", (tmp_path / "max", tmp_path / "none"))
    assert host_memory() > 12345
    monkeypatch.setattr(hardware_memory, "CONTAINER_LIMITS", (tmp_path / "max", tmp_path / "limit"))
    assert host_memory() == 12345


def test_a_text_larger_than_memory_is_rejected(refuse, text, monkeypatch):
    monkeypatch.setattr("jaxformer.data.corpora.host_memory", lambda: 1000)
    refuse(train_arguments(text, "out"), 2, "GiB of text need 6 times as much memory")


@pytest.mark.parametrize(
    "mesh", full_after(0, ["fsdp 8", pytest.param(ONE), "mesh of one"], slow_after=1)
)
def test_a_step_writes_over_a_placed_state_and_not_over_what_was_placed(mesh):
    """Else the first step would copy the whole state: numpy's memory is not XLA's to write to."""
    strategy = make(ODD, mesh)
    given = jax.tree.map(np.asarray, state_of(ODD))
    before = jax.tree.map(np.array, given)
    state = strategy.place(given)
    placed = addresses(state)
    state, _ = strategy.train(
        state, strategy.place_tokens(IDS), np.zeros((2, BATCH), np.int32), count=1
    )
    assert addresses(state) == placed
    jax.tree.map(np.testing.assert_array_equal, given, before)


def addresses(state):
    """Where the parts of parameters and moments lie in memory."""
    return [
        part.data.unsafe_buffer_pointer()
        for x in jax.tree.leaves(state)
        for part in x.addressable_shards
        if part.data.size > 1
    ]


def test_nothing_is_collected_within_the_block():
    assert gc.isenabled()
    with hardware_memory.without_collection():
        assert not gc.isenabled()
        with hardware_memory.without_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(KeyError), hardware_memory.without_collection():
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with hardware_memory.without_collection():
            pass
        assert not gc.isenabled(), "who turned it off wants it off"
    finally:
        gc.enable()


def test_what_stays_is_searched_last():
    """In a process of its own, as the tests have frozen what is there."""
    code = """
import gc
from jaxformer.hardware.memory import without_collection

def generation(made):
    return [n for n in range(3) if any(x is made for x in gc.get_objects(n))]

with without_collection():
    young = [1]
assert generation(young) == [0], "as ever"
with without_collection(all_stays=True):
    old = [1]
assert generation(old) == [2]
assert gc.isenabled() and gc.get_freeze_count() == 0
gc.freeze()
frozen = gc.get_freeze_count()
with without_collection(all_stays=True):
    pass
assert gc.get_freeze_count() == frozen, "what somebody has frozen stays so"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
