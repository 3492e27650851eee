"""Plans for a mesh, and for devices that are not here: compiled, reckoned, and held together."""

import dataclasses
import functools
import importlib.util
import json
import os
import subprocess
import sys
import types

import jax
import pytest

from jaxformer.cli.main import main
from jaxformer.data.corpora import Corpus
from jaxformer.hardware.accelerators import ACCELERATORS
from jaxformer.planning.programs import compile_training
from jaxformer.planning.resources import estimate_from_programs, mesh_sizes, temporary_bytes
from jaxformer.planning.step_model import estimate_step
from jaxformer.planning.topologies import Topology
from jaxformer.training.config import TrainConfig
from jaxformer.training.experiment import Experiment
from tests.planning.test_plan import plan
from tests.support.memory import run_python
from tests.support.tiers import full_after
from tests.support.tiny import ROOT, TEXT, TINY

LLAMA = {
    "num_layers": 2, "d_model": 64, "num_heads": 4, "num_kv_heads": 2, "d_ff": 96,
    "context_length": 32, "activation": "swiglu", "norm": "rms_norm", "positions": "rotary",
    "qkv_bias": False, "output_bias": False, "feed_forward_bias": False, "tie_embeddings": False,
}  # fmt: skip
# A model large beside what threads and heaps take, on eight devices of one process.
REAL_STEP = """
import ctypes, dataclasses, gc
import jax, numpy as np
from jaxformer.planning.resources import estimate_from_programs
from jaxformer.planning.programs import compile_run
from jaxformer.data.corpora import load_corpus
from jaxformer.training.experiment import Experiment
from jaxformer.training.parallel import StepSpec, make_strategy
from jaxformer.training.presets import PRESETS
from jaxformer.training.initial_state import plan_parameters
config = PRESETS["llama-style"]()
model = dataclasses.replace(config.model, num_layers=2, d_model=512, num_heads=8, d_ff=1536)
config = dataclasses.replace(
    config, model=model, batch_size=8, strategy="mesh", fsdp=4, tensor=2, steps_per_call=2
)
experiment = Experiment.prepare(config, load_corpus("python-docs"))
devices = jax.devices()
estimate = estimate_from_programs(experiment, devices, compile_run(experiment, devices))
config = experiment.config
strategy = make_strategy(config, StepSpec.from_config(config), devices)
state = strategy.fetch(
    strategy.initial_state(plan_parameters(config.model, config.seed))
)
starts = np.zeros((2, config.batch_size), np.int32)
def run():
    there = strategy.place(state), strategy.place_tokens(experiment.train_ids)
    strategy.train(*there, starts, 2)
run()
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
before = reset()
run()
grown = status("VmHWM") - before
# The evaluation's half of the corpus is not there.
predicted = len(devices) * (estimate.total - experiment.validation_ids.nbytes)
print(json.dumps([predicted, grown]))
"""


def prepare(model, **settings):
    values = {"model": model, "batch_size": 16, "steps_per_call": 2, "strategy": "mesh", **settings}
    return Experiment.prepare(TrainConfig.from_dict(values), Corpus("text", TEXT, ""))


@functools.cache
def compiled(**settings):
    """The needs of a run on eight devices, and the program of its steps."""
    experiment = prepare(LLAMA, **settings)
    with experiment.execution_settings():
        program = compile_training(experiment, jax.devices())
    return estimate_from_programs(experiment, jax.devices(), {"training": program}), program


@pytest.mark.parametrize(("fsdp", "tensor"), full_after(1, [(4, 2), (8, 1), (1, 1)]))
def test_what_stays_on_a_device_of_a_mesh_is_what_xla_is_given(fsdp, tensor):
    experiment = prepare(LLAMA, fsdp=fsdp, tensor=tensor)
    estimate, program = compiled(fsdp=fsdp, tensor=tensor)
    # Where the windows begin, how many steps, the step's number.
    small = 4 * (2 * 16 * tensor // 8 + 2)
    given = program.memory_analysis().argument_size_in_bytes
    assert estimate.parameters + estimate.moments + experiment.train_ids.nbytes + small == given
    assert estimate.mesh == {"data": 8 // (fsdp * tensor), "fsdp": fsdp, "tensor": tensor}
    # All but the norms is cut.
    assert estimate.parameters < 4 * estimate.parameter_count / (0.9 * fsdp * tensor)
    guess = estimate_step(experiment.config, mesh_sizes(experiment.config, 8))
    for name in ("parameters", "moments", "gradients", "parameter_count"):
        assert getattr(guess, name) == getattr(estimate, name)


@pytest.mark.tier("full")
def test_the_collectives_of_a_mesh_are_those_that_its_rules_make():
    estimate, _ = compiled(fsdp=4, tensor=2)
    found = {(c.kind, c.axes) for c in estimate.collectives}
    assert ("all-gather", ("fsdp",)) in found
    assert any(kind == "all-reduce" and "tensor" in axes for kind, axes in found)
    assert all(c.sent > 0 for c in estimate.collectives)
    alone, _ = compiled(fsdp=1, tensor=1)
    assert {c.axes for c in alone.collectives} == {("data",)}
    assert sum(c.payload for c in alone.collectives) == pytest.approx(
        4 * alone.parameter_count, rel=0.02
    )


@pytest.mark.tier("full")
def test_collectives_count_as_often_as_loops_run():
    """Loops over micro-batches and layers: what is put together is what the model says."""

    def gathered(**settings):
        settings = {"fsdp": 8, "tensor": 1, "scan_layers": True, **settings}
        estimate, _ = compiled(**settings)
        config = prepare(LLAMA, **settings).config
        guess = estimate_step(config, estimate.mesh)
        return (
            sum(c.sent for c in found if c.kind == "all-gather")
            for found in (estimate.collectives, guess.collectives)
        )

    once, expected = gathered()
    assert once == expected
    twice, expected = gathered(accumulation=2)
    # The tables may be put together once for both.
    assert twice == pytest.approx(expected, rel=0.02)
    assert expected == 2 * once


@pytest.mark.tier("full")
def test_a_real_step_on_a_mesh_takes_what_was_predicted(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    predicted, grown = run_python(REAL_STEP, timeout=600)
    assert grown == pytest.approx(predicted, rel=0.15)


def test_what_the_model_says_follows_the_settings():
    def guess(data=1, fsdp=8, tensor=1, **settings):
        config = prepare(LLAMA, **{"fsdp": fsdp, "tensor": tensor, **settings}).config
        return estimate_step(config, {"data": data, "fsdp": fsdp, "tensor": tensor})

    whole = guess()
    half = guess(accumulation=2)
    assert half.activations == whole.activations / 2
    assert guess(dtype="bfloat16").gradients == whole.gradients / 2
    # Added up as they are made, or all of a micro-batch first, where a loop runs the blocks.
    assert half.gradients == whole.gradients
    assert guess(accumulation=2, scan_layers=True).gradients == 2 * whole.gradients
    # While a loss of many logits is computed there is the sum of earlier micro-batches.
    config = prepare(LLAMA, accumulation=2).config
    many = dataclasses.replace(config.model, vocab_size=10**6)
    loss = estimate_step(
        dataclasses.replace(config, model=many), {"data": 8, "fsdp": 1, "tensor": 1}
    )
    logits = config.batch_size * config.model.context_length // (2 * 8) * 4 * 10**6
    assert loss.total == loss.parameters * 2 + loss.moments + loss.activations + logits
    kept = [guess(remat=remat) for remat in ("none", "dots", "full")]
    assert kept[0].activations > kept[1].activations > kept[2].activations
    assert kept[0].operations == kept[0].model_operations
    assert kept[0].operations < kept[1].operations < kept[2].operations
    assert kept[2].operations < 4 / 3 * kept[2].model_operations
    sent = {c.kind: c.sent for c in whole.collectives}
    assert set(sent) == {"all-gather", "reduce-scatter", "all-reduce"}
    assert sent["all-reduce"] < sent["reduce-scatter"] / 10 < sent["all-gather"] / 10
    tensor = guess(fsdp=4, tensor=2)
    assert {c.axes for c in tensor.collectives} == {("fsdp",), ("tensor",)}
    assert [c.kind for c in guess(data=8, fsdp=1).collectives] == ["all-reduce"]
    assert guess(fsdp=1).collectives == ()


def test_gpus_that_are_not_here_are_reckoned_with(text, capsys):
    flags = [
        "--data", text, *TINY, "--topology", "H100:64", "--batch-size", 64,
        "--d-model", 64, "--model-only",
    ]  # fmt: skip
    facts = plan(capsys, *flags, "--devices", 64, "--strategy", "mesh", "--fsdp", 64)
    assert facts["source"] == "model"
    assert facts["devices"] == 64
    assert facts["device_kind"] == "H100"
    assert facts["capacity"] == 60e9
    roofline = facts["roofline"]
    # Across eight hosts, by eight adapters of 50 GB/s in each.
    sent = sum(c["sent"] for c in facts["collectives"])
    assert sent > 0
    assert roofline["interconnect"] == pytest.approx(sent / 400e9)
    assert roofline["seconds"] == roofline[roofline["bound"]]
    share = facts["operations_per_step"] / (facts["peak"] * roofline["seconds"])
    assert roofline["utilization"] == pytest.approx(share)
    assert main(["plan", *map(str, flags)]) == 0
    out = capsys.readouterr().out
    for words in ("a model's estimate for 64 × H100", "all-reduce", "no faster than", "MFU"):
        assert words in out


@pytest.mark.parametrize(
    ("topology", "words"),
    [
        ("H900:8", ["there is no H900", "choose among", "H200"]),
        ("H100", ["say how many, such as H100:8"]),
        ("H100:0", ["say how many"]),
        ("H100:2x4", ["H100 is counted, such as H100:8"]),
        ("v5p:2x2", ["a slice of v5p has 3 dimensions"]),
    ],
)
def test_a_topology_that_is_none_is_refused(refuse, text, topology, words):
    arguments = ["plan", "--data", text, *TINY, "--topology", topology]
    refuse(arguments, 2, f"--topology {topology}", *words)


def test_a_mesh_that_is_none_of_these_devices_is_refused(refuse, text):
    arguments = ["plan", "--data", text, *TINY, "--topology", "H100:8", "--strategy", "mesh"]
    refuse([*arguments, "--fsdp", 3], 9, "--fsdp 3", "does not divide 8 devices")
    refuse([*arguments, "--fsdp", 8], 9, "--batch-size 4 does not divide over 8 devices")


@pytest.mark.parametrize(
    ("name", "axes", "mesh", "rate"),
    [
        # One, two and four of v5e's links of 50 GB/s: a row, a square, a closed square.
        ("v5e:2x2", "fsdp", (1, 2, 2), 50e9),
        ("v5e:4x4", "fsdp", (1, 16, 1), 100e9),
        ("v5e:16x16", "fsdp", (1, 256, 1), 200e9),
        ("v5e:16x16", "tensor", (1, 16, 16), 100e9),
        ("v5p:4x4x4", "fsdp", (1, 64, 1), 600e9),
        ("v5p:2x2x1", "fsdp", (1, 4, 1), 200e9),
        ("H100:8", "fsdp", (1, 8, 1), 450e9),
        ("H100:64", "tensor", (1, 8, 8), 450e9),
        ("H100:64", "fsdp", (1, 8, 8), 50e9),
        ("H100:64", "fsdp", (1, 64, 1), 400e9),
        ("L4:16", "fsdp", (1, 16, 1), None),
        ("v3:8", "fsdp", (1, 8, 1), None),
    ],
)
def test_links_that_a_group_of_devices_can_use(name, axes, mesh, rate):
    sizes = dict(zip(("data", "fsdp", "tensor"), mesh, strict=True))
    assert Topology.parse(name).rate((axes,), sizes) == rate


def test_every_accelerator_has_what_a_roofline_takes():
    for one in ACCELERATORS:
        assert 200e9 < one.bandwidth < 1e13, one.name
        assert one.links is None or 10e9 < one.links.rate < 1e12, one.name


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu")
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_a_mesh_is_compiled_for_a_tpu_with_splash_attention(text, topology):
    """The whole loop of steps; splash attention keeps no array of scores."""
    flags = [
        "--preset", "llama-style", "--data", text, "--topology", topology, "--strategy", "mesh",
        "--fsdp", 2, "--tensor", 2, "--dtype", "bfloat16", "--batch-size", 4, "--context-length",
        512, "--d-model", 256, "--remat", "full", "--scan-layers",
    ]  # fmt: skip
    done = {}
    for kernel in ("splash", "plain"):
        command = [sys.executable, "-m", "jaxformer", "plan", "--json", *map(str, flags)]
        run = subprocess.run(
            [*command, "--attention-kernel", kernel],
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            capture_output=True,
            text=True,
        )
        assert run.returncode == 0, run.stderr
        done[kernel] = json.loads(run.stdout)
    facts = done["splash"]
    assert facts["source"] == "compiled"
    assert facts["mesh"] == {"data": 1, "fsdp": 2, "tensor": 2}
    assert facts["training"] < done["plain"]["training"]
    assert {"all-gather", "all-reduce"} <= {c["kind"] for c in facts["collectives"]}
    assert facts["roofline"]["seconds"] > 0


def test_the_memory_of_a_tpu_is_its_peak():
    """Its other figure counts arguments twice; on a CPU it is the peak that says too little."""
    memory = types.SimpleNamespace(
        argument_size_in_bytes=10,
        output_size_in_bytes=9,
        alias_size_in_bytes=8,
        temp_size_in_bytes=30,
        peak_memory_in_bytes=32,
    )
    program = types.SimpleNamespace(memory_analysis=lambda: memory)
    assert temporary_bytes(program, "tpu") == 22
    assert temporary_bytes(program, "cpu") == 31


def test_needs_are_plain_data():
    estimate, _ = compiled(fsdp=8, tensor=1)
    assert json.loads(json.dumps(estimate.to_dict()))["collectives"]
    assert dataclasses.replace(estimate, roofline=None).tokens_per_second is None
