"""Compares settings and global flags, before anything is run."""

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from jaxformer.parity.findings import Node, SettingDifference
from jaxformer.porting.mapping.abstract_modules import architecture_of

# A pattern of the setting's name in a module, and the likely effect of a difference.
EFFECTS = (
    (r"eps$", "norms differ most where their input is small"),
    (
        r"activation$",
        "exact and tanh GELU are up to 5e-4 apart; other activations differ everywhere",
    ),
    (
        r"interleaved$",
        "queries and keys are rotated by other angles: wrong from the second token on",
    ),
    (r"\.(base|width|scaling)$", "rotary angles differ, the more the later the token"),
    (r"(^|\.)scale$", "attention is sharper or flatter: every token's output differs"),
    (r"score_soft_cap$|logit_soft_cap$", "large scores or logits are bounded on one side only"),
    (r"num_(kv_)?heads$|head_dim$", "features are split into other heads"),
    (
        r"sliding_window$|full_attention_layers$",
        "one side attends to tokens that are further back than the window",
    ),
    (r"causal$", "one side attends to later tokens"),
    (r"embedding_scale$", "what enters the first block is larger or smaller"),
    (r"offset$", "tokens get the rows of other positions"),
    (r"tie_embeddings$", "the output head has its own weights on one side"),
    (
        r"the class$|norm$|block",
        "the order of norms and sums, or the kind of norm, differs",
    ),
)
INDEX = re.compile(r"(?<=[.])[0-9]+(?=[.])")


def compare_settings(candidate: Any, expected: Any) -> list[SettingDifference]:
    """Returns how the candidate's settings differ from those of another JAX module.

    A setting that differs in the same way in every layer is listed once, with ``*`` for the index:
    ``blocks.*.attention_norm.eps``.

    Args:
        candidate: the candidate.
        expected: the module that the reference's settings make; only its settings are read.
    """
    actual, wanted = architecture_of(candidate), architecture_of(expected)
    known = actual.keys() | wanted.keys()
    layers = Counter(INDEX.sub("*", name) for name in known)
    found: dict[SettingDifference, list[str]] = {}
    for name in sorted(name for name in known if actual.get(name) != wanted.get(name)):
        folded = INDEX.sub("*", name)
        values = _show(actual.get(name)), _show(wanted.get(name))
        found.setdefault(SettingDifference(folded, *values, _effect(name)), []).append(name)
    return [
        dataclasses.replace(setting, name=name)
        for setting, names in found.items()
        for name in ([setting.name] if len(names) == layers[setting.name] else names)
    ]


def name_causes(nodes: Sequence[Node], settings: Sequence[SettingDifference]) -> list[Node]:
    """Returns the nodes, with the differing settings of a module added to its bug's message."""
    root_causes = [node for node in nodes if node.is_root_cause]
    messages: dict[str, list[str]] = {}
    for setting in settings:
        # Of nested modules the innermost has the setting.
        owners = [node.path for node in root_causes if _name_within(setting.name, node.path)]
        for path in owners:
            others = [other for other in owners if other != path]
            if not any(other.startswith(f"{path}.") or not path for other in others):
                name = _name_within(setting.name, path)
                message = f"its {name} is {setting.candidate} (reference: {setting.reference})"
                messages.setdefault(path, []).append(message)
    return [
        dataclasses.replace(node, message="; ".join([node.message, *messages[node.path]]))
        if node.path in messages
        else node
        for node in nodes
    ]


def precision_flags() -> list[SettingDifference]:
    """Returns global flags that lower the precision of matrix products on one side."""
    import torch

    found = []
    precision = getattr(jax.config, "jax_default_matmul_precision", None)
    if jax.default_backend() != "cpu" and precision not in ("highest", "float32"):
        found.append(
            SettingDifference(
                "matrix products in float32", f"jax_default_matmul_precision={precision}",
                torch.get_float32_matmul_precision(),
                "on this accelerator JAX multiplies float32 in fewer bits by default",
            )
        )  # fmt: skip
    if torch.get_float32_matmul_precision() != "highest":
        found.append(
            SettingDifference(
                "matrix products in float32", "float32",
                f"torch.set_float32_matmul_precision({torch.get_float32_matmul_precision()!r})",
                "PyTorch keeps 10 bits (TF32) or 7 where the hardware can",
            )
        )  # fmt: skip
    return found


def _name_within(name: str, path: str) -> str:
    """Returns a setting's name within the module at a path, "" if it is not a setting of it."""
    parts, around = name.split("."), path.split(".") if path else []
    alike = all(a in (b, "*") for a, b in zip(parts, around, strict=False))
    # A flag has spaces in its name and belongs to the whole model only.
    return ".".join(parts[len(around) :]) if alike and (" " not in name or not around) else ""


def _effect(name: str) -> str:
    return next((effect for pattern, effect in EFFECTS if re.search(pattern, name)), "")


def _show(value: Any) -> str:
    return "absent" if value is None else str(value)
