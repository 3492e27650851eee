"""What is said of a model type that is not known: which part is missing, and what is nearest."""

import contextlib
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from jaxformer.errors import UsageError
from jaxformer.porting.dialects.common.known_settings import SHARED
from jaxformer.porting.mapping.settings import read_settings
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import listed

# Parts that no ported type has, and the settings that show them. A setting of a size counts where
# it is above 0, a switch where it is true.
PARTS = {
    "a state space": (
        "state_size", "ssm_state_size", "ssm_cfg", "mamba_d_state", "mamba_n_heads",
        "time_step_rank", "d_state",
    ),
    "linear attention or a recurrence": (
        "linear_num_key_heads", "linear_num_value_heads", "lru_width", "attention_hidden_size",
        "conv_L_cache", "linear_attn_config",
    ),
    "latent attention": ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim"),
    "vision": ("vision_config", "image_size", "patch_size", "num_channels"),
    "audio": ("audio_config", "num_mel_bins", "feat_extract_norm", "conv_stride"),
    "cross-attention": ("add_cross_attention", "cross_attention_layers"),
    "attention to blocks of the text": ("attention_window", "block_size", "num_random_blocks"),
    "embeddings of every layer": ("hidden_size_per_layer_input", "vocab_size_per_layer_input"),
}  # fmt: skip


def describe_unknown(
    model_type: str,
    settings: Mapping[str, Any],
    known: Iterable[str],
    overlooked: Mapping[str, dict[str, Any]],
) -> str:
    """Returns what is missing for an unknown model type, and which known one is nearest.

    Args:
        model_type: its name.
        settings: its config.
        known: all known model types.
        overlooked: by known model type, the settings that it does not read; those that reject one
            are left out.
    """
    near = _describe_nearest(model_type, settings, overlooked)
    close = difflib.get_close_matches(model_type, known, 1, 0.7)
    return _describe_missing(settings) + (
        near or (f"; the nearest name is {close[0]}" if close else "")
    )


def _describe_missing(settings: Mapping[str, Any]) -> str:
    inner = (part for part in settings.values() if isinstance(part, Mapping))
    known = {name: value for part in (*inner, settings) for name, value in part.items()}
    found = []
    for part, names in PARTS.items():
        # null, 0, false and an empty list say that there is none.
        shown = {name: known[name] for name in names if known.get(name)}
        if shown:
            values = (n if isinstance(v, Mapping) else f"{n}={v!r}" for n, v in shown.items())
            found.append(f"{part} ({', '.join(values)})")
    return f", and needs what jaxformer does not have: {', '.join(found)}" if found else ""


def _describe_nearest(
    model_type: str, settings: Mapping[str, Any], overlooked: Mapping[str, dict[str, Any]]
) -> str:
    """Returns which known type is nearest, and what it does not know.

    That is the one whose table reads the most of the config, of several the one with the most
    similar name.
    """
    shared = SourceModel({}, config=settings)
    with contextlib.suppress(UsageError):
        read_settings(SHARED, shared)
    own = len(shared.unread())
    similar = difflib.get_close_matches(model_type, overlooked, len(overlooked), 0.0)
    nearest = min(similar, key=lambda name: len(overlooked[name]), default=None)
    if nearest is not None and own and 2 * len(overlooked[nearest]) < own:
        left = overlooked[nearest]
        unknown = f", which does not know what {listed(left)} does" if left else ""
        return f"; the nearest is {nearest}{unknown}"
    return ""
