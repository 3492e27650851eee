"""What differs before anything is run: settings, dtypes, flags, in plain words."""

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax

from jaxformer.parity.report.model import Node, SettingDifference
from jaxformer.porting.mapping.skeletons import facts

# What a setting is called in a module, and what it does where it is not the same.
EFFECTS = (
    (r"eps$", "norms differ most where their input is small"),
    (
        r"activation$",
        "exact and tanh GELU are up to 5e-4 apart; other activations differ everywhere",
    ),
    (
        r"interleaved$",
        "queries and keys are turned by other angles: wrong from the second token on",
    ),
    (r"\.(base|width|scaling)$", "rotary angles differ, the more the later the token"),
    (r"(^|\.)scale$", "attention is sharper or flatter: every token's output differs"),
    (r"score_soft_cap$|logit_soft_cap$", "large scores or logits are bounded on one side only"),
    (r"num_(kv_)?heads$|head_dim$", "features are split into other heads"),
    (
        r"sliding_window$|full_attention_layers$",
        "tokens further back than the window are seen by one",
    ),
    (r"causal$", "one side sees later tokens"),
    (r"embedding_scale$", "what enters the first block is larger or smaller"),
    (r"offset$", "tokens get other positions' rows"),
    (r"tie_embeddings$", "the output head has weights of its own on one side"),
    (
        r"the class$|norm$|block",
        "the order of norms and sums, or the kind of norm, is not the same",
    ),
)
INDEX = re.compile(r"(?<=[.])[0-9]+(?=[.])")


def compare_settings(candidate: Any, expected: Any) -> list[SettingDifference]:
    """How a module of ours differs from the one that their settings make.

    What differs alike in every layer is told once: ``blocks.*.attention_norm.eps``.
    """
    here, there = facts(candidate), facts(expected)
    known = here.keys() | there.keys()
    layers = Counter(INDEX.sub("*", name) for name in known)
    found: dict[SettingDifference, list[str]] = {}
    for name in sorted(name for name in known if here.get(name) != there.get(name)):
        folded = INDEX.sub("*", name)
        values = _shown(here.get(name)), _shown(there.get(name))
        found.setdefault(SettingDifference(folded, *values, _effect(name)), []).append(name)
    return [
        dataclasses.replace(setting, name=name)
        for setting, names in found.items()
        for name in ([setting.name] if len(names) == layers[setting.name] else names)
    ]


def name_causes(nodes: Sequence[Node], settings: Sequence[SettingDifference]) -> list[Node]:
    """The nodes, those with a bug saying which of their own settings are not the same."""
    root_causes = [node for node in nodes if node.is_root_cause]
    caused: dict[str, list[str]] = {}
    for setting in settings:
        # Of modules around one another it is the innermost's.
        held = [node.path for node in root_causes if _inside(setting.name, node.path)]
        for path in held:
            if not any(other.startswith(f"{path}.") or not path for other in held if other != path):
                own = _inside(setting.name, path)
                told = f"its {own} is {setting.candidate}, theirs {setting.reference}"
                caused.setdefault(path, []).append(told)
    return [
        dataclasses.replace(node, message="; ".join([node.message, *caused[node.path]]))
        if node.path in caused
        else node
        for node in nodes
    ]


def flags() -> list[SettingDifference]:
    """Global switches that lower the precision of matrix products on one side."""
    import torch

    found = []
    precision = getattr(jax.config, "jax_default_matmul_precision", None)
    if jax.default_backend() != "cpu" and precision not in ("highest", "float32"):
        found.append(
            SettingDifference(
                "matrix products in float32", f"jax_default_matmul_precision={precision}",
                torch.get_float32_matmul_precision(),
                "on this accelerator JAX multiplies float32 in fewer bits unless told otherwise",
            )
        )  # fmt: skip
    if torch.get_float32_matmul_precision() != "highest":
        found.append(
            SettingDifference(
                "matrix products in float32", "float32",
                f"torch.set_float32_matmul_precision({torch.get_float32_matmul_precision()!r})",
                "theirs keep 10 bits (TF32) or 7 where the hardware can",
            )
        )  # fmt: skip
    return found


def _inside(name: str, path: str) -> str:
    """What is left of a setting's name within the module at a path; "" where it is not in it."""
    parts, around = name.split("."), path.split(".") if path else []
    alike = all(a in (b, "*") for a, b in zip(parts, around, strict=False))
    # Flags have names in words: they are no module's.
    return ".".join(parts[len(around) :]) if alike and (" " not in name or not around) else ""


def _effect(name: str) -> str:
    return next((effect for pattern, effect in EFFECTS if re.search(pattern, name)), "")


def _shown(value: Any) -> str:
    return "absent" if value is None else str(value)
