"""Made-up reports of a Llama, with bugs at the places that a test chooses."""

import dataclasses
import io

import numpy as np
from rich.console import Console

from jaxformer.parity.findings import (
    AttentionMaps,
    Difference,
    Histogram,
    Node,
    SettingDifference,
    Step,
)
from jaxformer.parity.report.report import Report
from jaxformer.parity.report.terminal import print_report

# A name that tries to end the block that a report is written in.
HOSTILE = "</script><img src=x onerror=alert(1)> \"' & {{data}} [red]\x1b[31m\u2028é"
MESSAGE = (
    "rotary layout: the candidate turns neighbouring features, the reference the two halves; "
    "port with the layout of the checkpoint"
)
PARTS = (
    ("attention_norm", "input_layernorm", "RMSNorm", "LlamaRMSNorm", 2),
    ("attention", "self_attn", "MultiHeadAttention", "LlamaAttention", 2),
    ("attention.q_proj", "self_attn.q_proj", "Linear", "Linear", 3),
    ("attention.k_proj", "self_attn.k_proj", "Linear", "Linear", 3),
    ("attention.v_proj", "self_attn.v_proj", "Linear", "Linear", 3),
    ("attention.o_proj", "self_attn.o_proj", "Linear", "Linear", 3),
    ("feed_forward_norm", "post_attention_layernorm", "RMSNorm", "LlamaRMSNorm", 2),
    ("feed_forward", "mlp", "GatedFeedForward", "LlamaMLP", 2),
    ("feed_forward.gate_proj + feed_forward.up_proj", "mlp.gate_up_proj", "Linear", "Linear", 3),
    ("feed_forward.down_proj", "mlp.down_proj", "Linear", "Linear", 3),
)


def difference(rng, bug=False, exact=False):
    scale = float(np.exp(rng.normal()))
    if exact:
        return Difference(0.0, scale, 2e-12 * scale, 0.0, 0.0, 0.0)
    # Always drawn, so that a report with a bug has the other numbers of one without.
    tiny = 3e-16 * float(np.exp(rng.normal()))
    error = (0.13 if bug else tiny) * scale
    candidate, reference = 1e-7 * np.exp(0.3 * rng.normal(size=2))
    return Difference(
        error, scale, 2.6e-12 * scale, 0.11 if bug else float(candidate), float(reference),
        9e5 if bug else float(candidate) / 3e-8,
    )  # fmt: skip


def histogram(rng, bug=False):
    values = rng.normal(size=4000)
    edges = np.linspace(-4, 4, 41)
    candidate = np.histogram(values * (0.6 if bug else 1), edges)[0]
    reference = np.histogram(values, edges)[0]
    return Histogram(tuple(edges.tolist()), tuple(candidate.tolist()), tuple(reference.tolist()))


def maps(rng, bug=False, heads=4, length=24):
    """Returns causal softmax of random scores; with a bug, two heads attend elsewhere."""
    place = np.arange(length)
    scores = rng.normal(size=(heads, length, length))
    scores -= 0.3 * np.abs(place[:, None] - place - np.arange(1, heads + 1)[:, None, None])
    other = scores.copy()
    if bug:
        other[:2] = scores[:2] + 0.5 * place
    both = []
    for s in (other, scores):
        s = np.where(place[:, None] >= place, s, -np.inf)
        weights = np.exp(s - s.max(-1, keepdims=True))
        both.append((weights / weights.sum(-1, keepdims=True)).tolist())
    return AttentionMaps(*both)


def report(layers=6, bugs=(), mode="grad", first_divergence=None, heads=4, length=24, amplified=()):
    """Returns a report of a Llama of so many layers, with a bug in the attention of some."""
    rng = np.random.default_rng(7)
    nodes: list[Node] = []

    def add(path, reference, kind, reference_kind, depth, **more):
        bug = more.get("verdict") == "bug"
        root_cause = more.get("is_root_cause", False)
        exact = kind in ("Embedding", "Rotary")
        more.setdefault("verdict", "exact" if exact else "rounding")
        parameters = {} if kind not in ("Linear", "RMSNorm", "Embedding") else {"weight": None}
        backward = {"input 0": None, **parameters} if mode in ("grad", "train") else {}
        nodes.append(
            Node(
                *(path, reference, kind, reference_kind, depth, len(nodes)),
                forward=difference(rng, root_cause, exact),
                in_context=difference(rng, bug, exact),
                backward={name: difference(rng, root_cause) for name in backward},
                parameters={name: difference(rng, exact=True) for name in parameters},
                histogram=histogram(rng, root_cause),
                maps=maps(rng, root_cause, heads, length) if kind == "MultiHeadAttention" else None,
                **more,
            )
        )

    worst = "bug" if bugs else "amplified" if amplified else "rounding"
    add("", "", "TransformerLM", "LlamaForCausalLM", 0, verdict=worst)
    add("token_embedding", "model.embed_tokens", "Embedding", "Embedding", 1)
    for layer in range(layers):
        verdict = "bug" if layer in bugs else "rounding"
        candidate, reference = f"blocks.{layer}", f"model.layers.{layer}"
        add(candidate, reference, "PreNormBlock", "LlamaDecoderLayer", 1, verdict=verdict)
        for part, reference_part, kind, reference_kind, depth in PARTS:
            more = {}
            if layer in bugs and part == "attention":
                more = {"verdict": "bug", "is_root_cause": True, "stage": "forward"}
                more |= {"message": MESSAGE, "condition": 1.0}
            if layer in amplified and part == "attention":
                more = {"verdict": "amplified", "condition": 1234.5}
            path = " + ".join(f"{candidate}.{one}" for one in part.split(" + "))
            add(path, f"{reference}.{reference_part}", kind, reference_kind, depth, **more)
    add("final_norm", "model.norm", "RMSNorm", "LlamaRMSNorm", 1)
    add("lm_head", "lm_head", "Linear", "Linear", 1)
    settings = (
        SettingDifference(
            "rotary layout", "interleaved", "half", "attention looks at the wrong places"
        ),
        SettingDifference(
            "norm_eps", "1e-05", "1e-06", "small inputs are scaled by up to 1 % less"
        ),
    )
    return Report(
        mode, "float32", tuple(nodes), settings if bugs else (), steps(rng, mode, first_divergence),
        {"candidate": "runs/nano", "reference": "model.safetensors", "jax": "0.10.2",
         "torch": "2.13.0",
         "inputs": "int32 (2, 24)", "seconds": 3.2},
    )  # fmt: skip


def steps(rng, mode, first_divergence):
    if mode not in ("train", "generate"):
        return ()
    made = []
    for number in range(40):
        bug = first_divergence is not None and number >= first_divergence
        error = (1e-3 * (number - first_divergence + 1) if bug else 1e-16 * (number + 1)) * 4
        close = Difference(error, 4.0, 4e-13, 1e-7, 1.1e-7, 2.0)
        reference = 4 * float(np.exp(-number / 25)) if mode == "train" else float(number * 37 % 101)
        candidate = reference + (error if mode == "train" else 5.0 * bug)
        note = "tie" if mode == "generate" and number == 3 else ""
        made.append(
            Step(number, candidate, reference, close, note, "blocks.2.attention.q_proj.kernel")
        )
    return tuple(made)


def printed(what, width=80, encoding="utf-8"):
    """Returns the lines of the terminal report without trailing spaces."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_report(what, Console(file=stream, width=width))
    stream.flush()
    return [line.rstrip() for line in stream.buffer.getvalue().decode(encoding).splitlines()]


def with_node(what, path, **changes):
    """Returns the report with some fields of one node changed."""
    nodes = [dataclasses.replace(n, **changes) if n.path == path else n for n in what.nodes]
    return dataclasses.replace(what, nodes=tuple(nodes))
