"""What differs before anything is run: settings, dtypes, flags, in plain words."""

import re
from typing import Any

import jax

from jaxformer.parity.report import Setting
from jaxformer.porting.plans import facts

# What a setting is called in a module, and what it does where it is not the same.
EFFECTS = (
    (r"eps$", "norms differ most where their input is small"),
    (r"activation$", "exact and tanh GELU are up to 5e-4 apart; other activations differ everywhere"),
    (r"interleaved$", "queries and keys are turned by other angles: wrong from the second token on"),
    (r"\.(base|width|scaling)$", "rotary angles differ, the more the later the token"),
    (r"(^|\.)scale$", "attention is sharper or flatter: every token's output differs"),
    (r"score_soft_cap$|logit_soft_cap$", "large scores or logits are bounded on one side only"),
    (r"num_(kv_)?heads$|head_dim$", "features are split into other heads"),
    (r"sliding_window$|full_attention_layers$", "tokens further back than the window are seen by one"),
    (r"causal$", "one side sees later tokens"),
    (r"embedding_scale$", "what enters the first block is larger or smaller"),
    (r"offset$", "tokens get other positions' rows"),
    (r"tie_embeddings$", "the output head has weights of its own on one side"),
    (r"the class$|norm$|block", "the order of norms and sums, or the kind of norm, is not the same"),
)


def compare_settings(ours: Any, expected: Any) -> list[Setting]:
    """How a module of ours differs from the one that their settings make."""
    here, there = facts(ours), facts(expected)
    return [
        Setting(name, _shown(here.get(name)), _shown(there.get(name)), _effect(name))
        for name in sorted(here.keys() | there.keys())
        if here.get(name) != there.get(name)
    ]


def flags() -> list[Setting]:
    """Global switches that lower the precision of matrix products on one side."""
    import torch

    found = []
    precision = jax.config.jax_default_matmul_precision
    if jax.default_backend() != "cpu" and precision not in ("highest", "float32"):
        found.append(
            Setting(
                "matrix products in float32", f"jax_default_matmul_precision={precision}",
                torch.get_float32_matmul_precision(),
                "on this accelerator JAX multiplies float32 in fewer bits unless told otherwise",
            )
        )  # fmt: skip
    if torch.get_float32_matmul_precision() != "highest":
        found.append(
            Setting(
                "matrix products in float32", "float32",
                f"torch.set_float32_matmul_precision({torch.get_float32_matmul_precision()!r})",
                "theirs keep 10 bits (TF32) or 7 where the hardware can",
            )
        )  # fmt: skip
    return found


def _effect(name: str) -> str:
    return next((effect for pattern, effect in EFFECTS if re.search(pattern, name)), "")


def _shown(value: Any) -> str:
    return "absent" if value is None else str(value)
