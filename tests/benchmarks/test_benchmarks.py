"""The benchmarks run, their results say where they come from, and the documents say the same."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch.nn import functional

import torch_ref.config
import torch_ref.train_step
import torch_ref.transformer_lm
from jaxformer.config import TransformerLMConfig
from jaxformer.parameters import get_parameters, set_parameters
from jaxformer.porting import export_arrays
from jaxformer.transformer_lm import TransformerLM
from tests.support.tiers import full_after

pytestmark = pytest.mark.optimized

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
HELPERS = {"kernels", "measure", "limits", "shapes", "sides", "stand_ins"}
HELPERS |= {"accelerator_attention", "accelerator_losses", "accelerator_resuming"}
SCRIPTS = sorted(
    path
    for path in BENCHMARKS.glob("*.py")
    if path.stem not in HELPERS and not path.stem.startswith("peer_")
)
# Written by a script that has its own form of a result.
LARGE = {"verify-llama-3-8b", "verify-llama-3.2-1b"}
OTHERS = {"verify-cpu", "verify-operators-cpu", "faults", "soak"} | LARGE
OTHERS |= {"kernels-gpt2-small-nvidia-h100-80gb-hbm3"}
RESULTS = [p for p in sorted((BENCHMARKS / "results").glob("*.json")) if p.stem not in OTHERS]


@pytest.fixture
def benchmark_modules(monkeypatch):
    """Imports a module of the benchmarks, as a script of theirs does."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # which they set
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_script_has_help(script):
    done = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage:" in done.stdout


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_say_where_they_come_from(path, benchmark_modules):
    result = json.loads(path.read_text())
    missing = [name for name in benchmark_modules("measure").FIELDS if name not in result]
    assert not missing
    assert result["results"]
    assert {"cpu", "cores", "gpu", "load_average_at_start"} <= result["machine"].keys()
    assert {"python", "jax", "torch"} <= result["versions"].keys()
    script = result["command"].split()[1]
    assert (ROOT / script).exists()
    assert result["benchmark"] == Path(script).stem


def test_documents_say_what_the_results_do(benchmark_modules):
    table = benchmark_modules("table")
    results = table.load()
    for path in table.TARGETS:
        text = path.read_text(encoding="utf-8")
        assert table.render(text, results) == text, f"{path.name}: python benchmarks/table.py"


def test_the_summary_has_every_result_of_every_machine(benchmark_modules):
    """Those that differ in a setting alone are lines of their own."""
    table = benchmark_modules("table")
    results = [
        r for r in table.load() if r["benchmark"] == "training_step" and len(r["results"]) > 1
    ]
    gpu = {"gpu": ["NVIDIA A100, 81559 MiB, 570.1"]}
    cpu = {"gpu": [], "cpu": "Another", "cores": 2}
    variants = [
        (gpu, {}), (gpu, {"no_attention_dropout": True}), (gpu, {"no_dropout": True}),
        (cpu, {}), (cpu, {"batch_size": 64}), ({**cpu, "all_of_mkl": True}, {}),
        ({**cpu, "only_avx2": True}, {}), ({**cpu, "vector_instructions": "AVX2"}, {}),
    ]  # fmt: skip
    for number, (machine, changes) in enumerate(variants):
        usual = {"batch_size": None, "no_dropout": False, "no_attention_dropout": False}
        settings = {**results[0]["settings"], **usual, **changes}
        results.append(
            {**results[0], "machine": machine, "settings": settings, "file": f"variant {number}"}
        )
    summary = table.summary(results)
    assert "| NVIDIA A100 |" in summary
    for result in results:
        assert f"(../../benchmarks/results/{result['file']})" in summary


def test_a_figure_that_is_not_a_results_is_found(benchmark_modules):
    table = benchmark_modules("table")
    text = "<!-- speed: training_step -->\n81 ms\n<!-- end of training_step -->\n"
    assert "81 ms" not in table.render(text, [])
    with pytest.raises(SystemExit, match="not closed"):
        table.render(text.replace("end of", "end"), [])


def test_turns_alternate_and_the_first_call_is_apart(benchmark_modules):
    measure = benchmark_modules("measure")
    called = []
    sides = {name: lambda name=name: called.append(name) for name in "abc"}
    found = measure.interleave(sides, 4, warm_up=2)
    assert called[:6] == ["a", "a", "b", "b", "c", "c"]
    assert called[6:] == [*"abc", *"bca", *"cab", *"abc"]
    assert all(side["seconds"]["count"] == 4 for side in found.values())


def test_what_comes_before_a_turn_is_not_timed(benchmark_modules, monkeypatch):
    measure, called = benchmark_modules("measure"), []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: float(len(called)))
    sides = {name: lambda name=name: called.append(name) for name in "ab"}
    before = {"a": lambda: called.append("ready")}
    found = measure.interleave(sides, 2, before=before)
    assert called == ["a", "b", "ready", "a", "b", "b", "ready", "a"]
    assert found["a"]["seconds"]["max"] == 1


def test_a_spread_is_of_the_values(benchmark_modules):
    spread = benchmark_modules("measure").spread([5.0, 1.0, 2.0, 4.0, 3.0])
    assert spread == {"median": 3, "min": 1, "max": 5, "q1": 2, "q3": 4, "count": 5}


def test_kernels_are_summed_by_name_and_their_overlap_counts_once(benchmark_modules):
    kernels = benchmark_modules("kernels")
    events = [
        kernels.Event("product", 9e3, 4e3, "late"),
        kernels.Event("product", 0, 6e3, "dot"),
        kernels.Event("copy", 5e3, 2e3),
    ]
    table = kernels.summarize(events, 2)
    assert (table["span"], table["busy"], table["sum"]) == (6.5, 5.5, 6.0)
    product, copied = table["kernels"]
    assert (product["name"], product["work"]) == ("product", "dot")
    assert (product["microseconds_per_step"], product["count_per_step"]) == (5.0, 1.0)
    assert (copied["microseconds_per_step"], copied["share"]) == (1.0, 0.16667)
    with pytest.raises(ValueError, match="no kernels"):
        kernels.summarize([], 1)


@pytest.mark.parametrize("framework", full_after(1, ["torch", "jax"]))
def test_kernels_are_read_from_a_trace(framework, benchmark_modules, tmp_path):
    kernels = benchmark_modules("kernels")
    compiled = jax.jit(lambda x: jnp.sin(x @ x))
    work = {
        "jax": lambda: compiled(jnp.ones((300, 300))).block_until_ready(),
        "torch": lambda: torch.ones(99).cumsum(0),
    }
    trace = {"jax": kernels.trace_jax, "torch": kernels.trace_torch}[framework]
    kernels.write("a side, cast", trace, work[framework], 1, tmp_path)
    table = json.loads((tmp_path / "kernels-a-side-cast.json").read_text())
    assert any(("sin", "cumsum")[framework == "torch"] in row["name"] for row in table["kernels"])
    assert len((tmp_path / "kernels-a-side-cast.txt").read_text().splitlines()) > 1


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_torch_is_timed_with_its_fused_causal_attention(dropout, monkeypatch):
    calls = []
    fused = functional.scaled_dot_product_attention

    def spy(*arguments, **keywords):
        calls.append(keywords)
        return fused(*arguments, **keywords)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    config = torch_ref.config.TransformerLMConfig(
        d_model=12, num_heads=3, context_length=7, num_layers=2, vocab_size=11,
        attention_dropout=dropout,
    )  # fmt: skip
    model = torch_ref.transformer_lm.TransformerLM(config)
    ids = torch.arange(14).reshape(2, 7) % 11
    torch_ref.train_step.language_model_loss(model, ids, ids).backward()
    assert [(call["is_causal"], call["attn_mask"]) for call in calls] == [(True, None)] * 2
    assert all(call["dropout_p"] == dropout for call in calls)
    model.eval()
    allowed = torch.ones(7, 7, dtype=torch.bool)
    allowed[5, 2] = False
    model(ids, allowed)
    assert not calls[-1]["is_causal"]
    assert not calls[-1]["attn_mask"][0, 0, 5, 2]


def test_torchs_optimizer_is_the_fused_one():
    config = torch_ref.config.TransformerLMConfig(
        d_model=12, num_heads=3, context_length=7, num_layers=1, vocab_size=11
    )
    model = torch_ref.transformer_lm.TransformerLM(config)
    state = torch_ref.train_step.TrainState.create(model, torch_ref.config.OptimizerConfig())
    assert all(group["fused"] for group in state.optimizer_state.param_groups)


def test_growth_is_the_power_of_the_size_and_is_drawn(benchmark_modules, monkeypatch):
    growth = benchmark_modules("growth")
    rows = [
        {
            "side": side, "axis": axis, "size": size, "flops": size**2, "compile_seconds": 0.3,
            "seconds_per_step": {"median": size**3 * 1e-4}, "peak_memory": {"process": 2**30},
        }
        for axis, side in (("layers", "jaxformer"), ("layers", "torch_ref"), ("devices", "mesh"))
        for size in (2, 4, 16)
    ]  # fmt: skip
    assert [growth._growth(row, rows) for row in rows[:3]] == [
        {},
        *[{"power_of_time": 3.0, "power_of_flops": 2.0}] * 2,
    ]
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    picture = importlib.import_module("draw_results").draw_growth(
        {"results": rows, "command": "python x", "machine": {"cpu": "AMD"}}
    )
    curves = ElementTree.fromstring(picture).findall("{http://www.w3.org/2000/svg}polyline")
    assert len(curves) == 3 * 3
    assert [point.split(",")[0] for point in curves[0].get("points").split()] == [
        point.split(",")[0] for point in curves[1].get("points").split()
    ]


@pytest.mark.tier("full")
@pytest.mark.parametrize("biases", [False, True])
def test_peers_compute_what_jaxformer_does(biases, benchmark_modules):
    models = benchmark_modules("peer_models")
    config = TransformerLMConfig(
        d_model=12, num_heads=3, context_length=7, num_layers=2, vocab_size=11,
        activation="gelu_tanh" if biases else "gelu",
        **dict.fromkeys(("qkv_bias", "output_bias", "feed_forward_bias", "norm_bias"), biases),
    )  # fmt: skip
    candidate = TransformerLM(config, rngs=nnx.Rngs(0))
    draw = np.random.default_rng(0)
    parameters = {
        name: draw.normal(0, 0.3, array.shape).astype(np.float32)
        for name, array in get_parameters(candidate).items()
    }
    set_parameters(candidate, parameters)
    weights = export_arrays(parameters)
    ids = draw.integers(0, 11, (2, 7))
    expected = np.asarray(candidate(jnp.asarray(ids)))

    plain = models.plain_gpt(config, weights).eval()
    hidden = plain.hidden(torch.from_numpy(ids), torch.arange(7), [None] * 2, None)
    found = (hidden @ plain.tokens.weight.T).detach().numpy()
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()

    flax = models.naive_nnx(config, weights)
    flax.eval()
    found = flax(jnp.asarray(ids), jnp.arange(7)[None], nnx.make_causal_mask(jnp.asarray(ids)))
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.tier("slow")
def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    """On a CPU, what the check of an accelerator does there."""
    out = tmp_path / "checks.json"
    command = [sys.executable, BENCHMARKS / "accelerator_checks.py", "--only", "resume"]
    done = subprocess.run(
        [*command, "--out", out],
        env={**os.environ, "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["results"]
    assert len(rows) == 2
    assert all(row["holds"] and row["bit_exact"] for row in rows)
