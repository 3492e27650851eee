"""Plans compiled for NVIDIA GPUs that are not here."""

import importlib.util

import pytest
from jax.experimental import topologies

from jaxformer.errors import DeviceError
from jaxformer.hardware.accelerators import find_accelerator
from jaxformer.planning.gpu_topologies import CHIPS, describe_gpus
from jaxformer.planning.topologies import Topology
from tests.planning.test_plan import plan
from tests.support.tiny import TINY

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
HAS_PLUGIN = any(importlib.util.find_spec(name) for name in PLUGINS)


def describe(monkeypatch, answer, name="H100:8"):
    """What ``describe_gpus`` makes of JAX's answer."""
    monkeypatch.setattr(topologies, "get_topology_desc", answer)
    return describe_gpus(Topology.parse(name))


@pytest.mark.parametrize("name", CHIPS)
def test_a_chip_has_the_name_that_jax_gives_it(name):
    accelerator = find_accelerator(CHIPS[name].name)
    assert accelerator is not None
    assert accelerator.name == name


def test_xla_is_told_what_the_chip_is(monkeypatch):
    told = []
    answer = describe(monkeypatch, lambda *given, **settings: told.append((given, settings)))
    assert answer is None
    [((_, platform), settings)] = told
    assert platform == "cuda"
    assert settings["topology"] == "1x1x8"
    lines = {line.strip() for line in settings["target_config"].splitlines()}
    assert lines >= {
        "core_count: 132",
        "l2_cache_size: 52428800",
        "device_memory_size: 80000000000",
        "memory_bandwidth: 3350000000000",
        "shared_memory_per_block_optin: 232448",
        "cuda_compute_capability { major: 9 minor: 0 }",
        'device_description_str: "NVIDIA H100 80GB HBM3"',
    }


def test_without_a_compiler_or_a_description_the_model_stands_in(monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError("topology not implemented for platform cuda")

    assert describe(monkeypatch, refuse) is None
    assert describe(monkeypatch, refuse, "V100-32GB:1") is None


def test_what_the_plugin_says_is_passed_on(monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("INVALID_ARGUMENT: no such field\nmore")

    words = "^H100 cannot be compiled for: INVALID_ARGUMENT: no such field; use --model-only$"
    with pytest.raises(DeviceError, match=words):
        describe(monkeypatch, refuse)


@pytest.mark.skipif(not HAS_PLUGIN, reason="needs the extra cuda")
def test_a_run_is_compiled_for_gpus_that_are_not_here(text, capsys):
    flags = ["--data", text, *TINY, "--topology", "H100:2", "--dtype", "bfloat16", "--devices", 2]
    flags += ["--d-model", 64, "--context-length", 128]
    facts = plan(capsys, *flags, "--strategy", "mesh", "--fsdp", 2)
    assert facts["source"] == "compiled"
    assert facts["device_kind"] == "NVIDIA H100 80GB HBM3"
    assert facts["capacity"] == 60e9
    assert 0 < facts["training"] < 2**24
    assert {c["kind"] for c in facts["collectives"]} >= {"all-gather", "reduce-scatter"}
    assert plan(capsys, *flags, "--strategy", "mesh", "--model-only")["source"] == "model"
