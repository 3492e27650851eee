"""Which kernel computes attention, and that each computes the same mathematics as the core."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.attention import scaled_dot_product_attention
from jaxformer.blocks import self_attention_mask
from jaxformer.config import TransformerLMConfig
from jaxformer.execution import fused_attention as fused
from jaxformer.execution.attention_backends import (
    AttentionCall,
    CompilationTarget,
    MaskPattern,
    attention_kernel,
    choose_kernel,
    compiled_for,
    slowed_by_dropout,
)
from jaxformer.hardware import attention_call
from jaxformer.layers import Dropout
from jaxformer.planning.gpu_topologies import describe_gpus
from jaxformer.planning.programs import describe_tpu_slice
from jaxformer.planning.topologies import Topology
from jaxformer.training.parallel.mesh_layout import MeshLayout
from jaxformer.training.parallel.sharding_rules import AXES
from parity_tests.verdict import judge_rounding
from tests.support.tiers import full_after

pytestmark = pytest.mark.usefixtures("float64")

CAUSAL = MaskPattern(causal=True)
CALL = AttentionCall(jnp.bfloat16, head_dim=64, queries=1024, keys=1024, pattern=CAUSAL)
TARGETS = {
    "cpu": CompilationTarget("cpu"),
    "V100": CompilationTarget("cuda", (7, 0)),
    "A100": CompilationTarget("cuda", (8, 0)),
    "H100": CompilationTarget("cuda", (9, 0)),
    "MI300": CompilationTarget("rocm"),
    "TPU": CompilationTarget("tpu"),
}


@pytest.mark.parametrize(
    ("target", "changes", "kernel"),
    [
        ("cpu", {}, "blockwise"),
        ("V100", {}, "plain"),
        ("A100", {}, "cudnn"),
        ("H100", {}, "cudnn"),
        ("MI300", {}, "plain"),
        ("TPU", {}, "splash"),
        ("H100", {"dtype": jnp.float16}, "cudnn"),
        ("H100", {"dtype": jnp.float32}, "plain"),
        ("H100", {"dtype": jnp.float64}, "plain"),
        ("TPU", {"dtype": jnp.float32}, "plain"),
        ("TPU", {"dtype": jnp.float16}, "plain"),
        ("A100", {"head_dim": 128}, "cudnn"),
        ("A100", {"head_dim": 256}, "plain"),
        ("H100", {"head_dim": 256}, "cudnn"),
        ("H100", {"head_dim": 20}, "plain"),
        ("H100", {"pattern": MaskPattern(causal=False)}, "cudnn"),
        ("H100", {"pattern": MaskPattern(causal=True, window=256)}, "cudnn"),
        ("H100", {"pattern": MaskPattern(causal=False, window=256)}, "plain"),
        ("TPU", {"pattern": MaskPattern(causal=False, window=256)}, "splash"),
        ("H100", {"pattern": None}, "plain"),
        ("TPU", {"pattern": None}, "plain"),
        ("H100", {"keys": 2048}, "plain"),
        ("H100", {"keys": 2048, "pattern": MaskPattern(causal=False)}, "cudnn"),
        ("H100", {"bias": True}, "plain"),
        ("TPU", {"bias": True}, "plain"),
        ("H100", {"soft_cap": True}, "plain"),
        ("TPU", {"soft_cap": True}, "splash"),
        ("H100", {"dropout": True}, "plain"),
        ("TPU", {"dropout": True}, "plain"),
        ("H100", {"weights": True}, "plain"),
        ("TPU", {"weights": True}, "plain"),
        ("TPU", {"queries": 1000, "keys": 1000}, "plain"),
        ("TPU", {"queries": 2048, "pattern": MaskPattern(causal=False)}, "splash"),
        ("TPU", {"queries": 2048, "pattern": MaskPattern(causal=False, window=256)}, "plain"),
        ("TPU", {"precision": "highest"}, "plain"),
        ("TPU", {"precision": "default"}, "splash"),
        ("H100", {"precision": "highest"}, "cudnn"),
        ("H100", {"queries": 1000, "keys": 1000}, "cudnn"),
        ("cpu", {"queries": 512, "keys": 512}, "plain"),
        ("cpu", {"queries": 513, "keys": 512}, "blockwise"),
        ("cpu", {"queries": 8192, "keys": 8192, "dtype": jnp.float32}, "blockwise"),
        ("cpu", {"queries": 8192, "keys": 8192, "dropout": True, "pattern": None}, "blockwise"),
        ("cpu", {"queries": 8192, "keys": 8192, "soft_cap": True}, "blockwise"),
        ("cpu", {"queries": 8192, "keys": 8192, "bias": True}, "plain"),
        ("cpu", {"queries": 8192, "keys": 8192, "weights": True}, "plain"),
        ("cpu", {"queries": 1, "keys": 8192}, "plain"),
        ("H100", {"queries": 8192, "keys": 8192, "dtype": jnp.float32}, "plain"),
        ("cpu", {"queries": 8192, "keys": 8192, "called": True}, "called"),
        ("cpu", {"queries": 8192, "keys": 64, "called": True}, "called"),
        ("cpu", {"called": True, "soft_cap": True}, "blockwise"),
        ("cpu", {"called": True, "bias": True}, "plain"),
        ("H100", {"called": True}, "cudnn"),
    ],
)
def test_the_kernel_chosen(target, changes, kernel, monkeypatch):
    monkeypatch.setattr(attention_call, "is_known", lambda: True)
    call = dataclasses.replace(CALL, **changes)
    assert choose_kernel(call, TARGETS[target]) == kernel
    assert choose_kernel(call, TARGETS[target], "plain") == "plain"
    for wanted in ("cudnn", "splash"):
        if wanted == kernel:
            assert choose_kernel(call, TARGETS[target], wanted) == wanted
        else:
            with pytest.raises(ValueError, match=f"attention_kernel='{wanted}' .*'auto' takes"):
                choose_kernel(call, TARGETS[target], wanted)


def test_the_choice_is_that_of_the_context():
    assert choose_kernel(CALL, TARGETS["H100"]) == "cudnn"
    with attention_kernel("plain"):
        assert choose_kernel(CALL, TARGETS["H100"]) == "plain"
    assert choose_kernel(CALL, TARGETS["H100"]) == "cudnn"
    with attention_kernel("cudnn"), pytest.raises(ValueError, match="needs an NVIDIA GPU"):
        choose_kernel(CALL)
    with pytest.raises(ValueError, match="must be one of auto, plain, cudnn, splash: got 'flash'"):
        attention_kernel("flash").__enter__()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 2, 5, 7])
def test_a_mask_tells_its_rule(causal, window):
    def array(rule):
        mask = self_attention_mask(7, 7, causal=rule.causal, window=rule.window)
        return np.ones((1, 1, 7, 7), bool) if mask is None else mask

    mask = array(MaskPattern(causal, window))
    rule = MaskPattern.read(mask, 7, 7)
    assert (array(rule) == mask).all()
    # A window of one is causal, one of all tokens is none.
    assert window in (1, 7) or rule == MaskPattern(causal, window)
    # With any one bit changed it is another rule, or none.
    for place in np.ndindex(7, 7):
        other = np.array(mask)
        other[(0, 0, *place)] ^= True
        rule = MaskPattern.read(other, 7, 7)
        assert rule is None or (array(rule) == other).all()


def test_other_masks_have_no_rule():
    mask = self_attention_mask(7, 7, causal=True, window=None)
    assert MaskPattern.read(jnp.asarray(mask), 7, 7) is None
    assert MaskPattern.read(np.broadcast_to(mask, (2, 1, 7, 7)), 7, 7) is None
    assert MaskPattern.read(np.zeros((1, 1, 7, 7), bool), 7, 7) is None
    assert (
        MaskPattern.read(self_attention_mask(4, 7, causal=True, window=None, start=3), 4, 7) is None
    )
    assert MaskPattern.read(None, 4, 7) == MaskPattern(causal=False)


def test_what_is_asked_for_reaches_the_kernel(monkeypatch):
    """On a GPU that is not here: the kernel gets what the core would, or the core is left to it."""
    calls = []
    monkeypatch.setattr(CompilationTarget, "here", lambda: TARGETS["H100"])
    monkeypatch.setattr(
        fused, "fused_attention", lambda kernel, *arrays, **settings: calls.append(settings)
    )
    x = jnp.zeros((2, 64, 3, 16), jnp.bfloat16)
    arguments = {
        "mask": self_attention_mask(64, 64, causal=True, window=9), "bias": None, "scale": 0.3,
        "soft_cap": None, "dropout": Dropout(0.0), "weights": False,
    }  # fmt: skip

    def attend(x=x, **changes):
        fused.try_fused_attention(x, x, x, **{**arguments, **changes})

    attend()
    assert calls.pop() == {"pattern": MaskPattern(True, 9), "scale": 0.3, "soft_cap": None}
    attend(mask=None)
    assert calls.pop()["pattern"] == MaskPattern(causal=False)
    attend(x.astype(jnp.float32))
    others = {"soft_cap": 5.0, "dropout": Dropout(0.1), "weights": True, "bias": x}
    for name, value in others.items():
        attend(**{name: value})
    attend(mask=jnp.ones((1, 1, 64, 64), bool))
    assert calls == []


def test_here_is_a_cpu():
    assert CompilationTarget.here() == CompilationTarget("cpu")
    assert choose_kernel(CALL) == "blockwise"


# Name: pattern, queries, keys, query heads, key/value heads, soft cap.
CASES = {
    "causal": (CAUSAL, 256, 256, 3, 3, None),
    "everything, fewer queries": (MaskPattern(causal=False), 128, 384, 3, 3, None),
    "grouped": (CAUSAL, 256, 256, 6, 2, None),
    "one key/value head": (CAUSAL, 128, 128, 5, 1, None),
    "window": (MaskPattern(causal=True, window=37), 256, 256, 3, 3, None),
    "window of two": (MaskPattern(causal=True, window=2), 128, 128, 3, 3, None),
    "window on both sides": (MaskPattern(causal=False, window=37), 256, 256, 3, 3, None),
    "soft cap": (CAUSAL, 128, 128, 3, 3, 5.0),
}


def differentiate(attend):
    """What gives the output, and the gradients of its product with a fourth array."""

    def total(q, k, v, weight):
        out = attend(q, k, v)
        return jnp.sum(out * weight), out

    return jax.jit(jax.grad(total, argnums=(0, 1, 2), has_aux=True))


def results(gradient, arrays, dtype):
    """The output and the gradients, computed in ``dtype``, as float64."""
    # Splash attention divides an int32 by what would be an int64.
    with jax.enable_x64(dtype == jnp.float64):
        gradients, out = gradient(*(jnp.asarray(array, dtype) for array in arrays))
    named = {"output": out, **dict(zip(("input.q", "input.k", "input.v"), gradients, strict=True))}
    return {name: np.asarray(array, np.float64) for name, array in named.items()}


def compare(case, attend):
    """Judges a kernel in float32 beside the core in float32, both against the core in float64."""
    pattern, queries, keys, heads, kv_heads, soft_cap = CASES[case]
    batch, head_dim = 2, 16
    mask = self_attention_mask(queries, keys, causal=pattern.causal, window=pattern.window)

    def core(q, k, v):
        settings = {"mask": mask, "scale": 0.3, "soft_cap": soft_cap}
        return scaled_dot_product_attention(q, k, v, **settings)[0]

    kernel = functools.partial(attend, pattern=pattern, scale=0.3, soft_cap=soft_cap)
    kernel, core = differentiate(kernel), differentiate(core)
    draws = []
    for seed in range(3):
        random = np.random.default_rng(seed)
        shapes = [
            (batch, queries, heads, head_dim), (batch, keys, kv_heads, head_dim),
            (batch, keys, kv_heads, head_dim), (batch, queries, heads, head_dim),
        ]  # fmt: skip
        arrays = [random.standard_normal(shape).astype(np.float32) for shape in shapes]
        exact = results(core, arrays, jnp.float64)
        float32 = (results(each, arrays, jnp.float32) for each in (kernel, core))
        draws.append((*float32, exact))
    judge_rounding(draws, np.dtype(np.float32))


@pytest.mark.parametrize("case", full_after(2, [name for name in CASES if name != "soft cap"]))
def test_jax_is_asked_for_the_cores_attention(case, monkeypatch):
    """The call of cuDNN computed by XLA: the same arguments, another implementation."""
    original = jax.nn.dot_product_attention

    def by_xla(*arrays, implementation, **settings):
        assert implementation == "cudnn"
        return original(*arrays, implementation="xla", **settings)

    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)

    def attend(q, k, v, soft_cap, **settings):
        return fused.fused_attention("cudnn", q, k, v, **settings)

    compare(case, attend)


@pytest.mark.parametrize("case", full_after(1, CASES))
@pytest.mark.tier("full")
def test_splash_attention_is_the_cores(case):
    compare(case, functools.partial(fused.fused_attention, "splash", interpret=True))


@pytest.mark.tier("full")
def test_splash_attention_of_a_mesh_is_the_cores():
    """Each of four devices calls the kernel with its own text and heads: XLA cannot cut it."""
    sizes = tuple({"data": 2, "tensor": 2}.get(axis, 1) for axis in AXES)
    mesh = jax.make_mesh(
        sizes, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES), devices=jax.devices()[:4]
    )

    def attend(q, k, v, **settings):
        def part(q, k, v, *_):
            assert q.shape[0] == 1
            assert (q.shape[2], k.shape[2]) == (3, 1)
            return fused.fused_attention("splash", q, k, v, interpret=True, **settings), None

        return MeshLayout(mesh).share_heads(part, q, k, v, None, None, Dropout(0.0))[0]

    compare("grouped", attend)


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the extra tpu")
@pytest.mark.parametrize("head_dim", [64, 20])
def test_splash_attention_compiles_for_a_tpu(head_dim):
    device = describe_tpu_slice("v5e:2x2").devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    q, k = (
        jax.ShapeDtypeStruct((2, 1024, heads, head_dim), jnp.bfloat16, sharding=sharding)
        for heads in (6, 2)
    )

    def total(q, k, v):
        settings = {"pattern": MaskPattern(causal=True, window=300), "scale": 0.3}
        return jnp.sum(fused.fused_attention("splash", q, k, v, **settings).astype(jnp.float32))

    with jax.enable_x64(False), jax.default_matmul_precision("default"):
        compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(q, k, k).compile()
    # No array of scores: those of one text would take 6 · 1024² · 2 bytes.
    assert compiled.memory_analysis().temp_size_in_bytes < 6 * 1024**2 * 2


@pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)),
    reason="needs the extra cuda",
)
def test_cudnns_attention_compiles_for_an_h100():
    device = describe_gpus(Topology.parse("H100:1")).devices[0]
    assert CompilationTarget.of(device) == TARGETS["H100"]
    sharding = jax.sharding.SingleDeviceSharding(device)
    q, k = (
        jax.ShapeDtypeStruct((2, 1024, heads, 64), jnp.bfloat16, sharding=sharding)
        for heads in (6, 2)
    )

    def total(q, k, v):
        settings = {"pattern": CAUSAL, "scale": 0.3}
        return jnp.sum(fused.fused_attention("cudnn", q, k, v, **settings).astype(jnp.float32))

    with jax.enable_x64(False):
        compiled = jax.jit(jax.grad(total, argnums=(0, 1, 2))).lower(q, k, k).compile()
    for kernel in ("__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"):
        assert f'"{kernel}"' in compiled.as_text()
    # No array of scores: those of both texts would take 2 · 6 · 1024² · 2 bytes.
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * 6 * 1024**2 * 2


# GPT-2's rate of dropout on attention weights, which no fused kernel has.
DROPPING = TransformerLMConfig(
    vocab_size=65, num_layers=1, d_model=128, num_heads=2, context_length=256, attention_dropout=0.1
)


@pytest.mark.parametrize(
    ("target", "dtype", "changes", "kernel"),
    [
        ("H100", "bfloat16", {}, "cudnn"),
        ("TPU", "bfloat16", {}, "splash"),
        ("cpu", "bfloat16", {}, None),
        ("H100", "float32", {}, None),
        ("H100", "bfloat16", {"attention_dropout": 0.0}, None),
        ("H100", "bfloat16", {"positions": "alibi"}, None),
        ("H100", "bfloat16", {"positions": "relative_buckets"}, None),
        ("H100", "bfloat16", {"score_soft_cap": 30.0}, None),
        ("cpu", "bfloat16", {"context_length": 8192}, None),
    ],
)
def test_a_run_is_told_that_dropout_alone_keeps_it_from_a_kernel(target, dtype, changes, kernel):
    config = dataclasses.replace(DROPPING, **changes)
    with jax.default_matmul_precision("default"), compiled_for(TARGETS[target]):
        reason = slowed_by_dropout(config, dtype)
        with attention_kernel("plain"):
            assert slowed_by_dropout(config, dtype) is None
    if kernel is None:
        assert reason is None
    else:
        assert reason.startswith(
            f"attention_dropout=0.1 keeps attention out of the fused kernel ({kernel})"
        )


def test_the_plain_core_is_no_fused_kernel():
    x = jnp.zeros((1, 128, 1, 16))
    with pytest.raises(ValueError, match="cudnn or splash: got 'plain'"):
        fused.fused_attention("plain", x, x, x, pattern=CAUSAL, scale=1.0)
