"""The text part of models that see: ``gemma3``, ``llava`` and ``mistral3``.

Their config.json has that of a language model as ``text_config``, and their arrays its arrays under
other names, those of transformers 5 or 4. ``text_part`` gives both as the language model's own
folder would have them. What sees is not ported: it is left out only by name.
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from jaxformer.errors import Setting, UsageError

# Model types, and those of the language models that they have where the config does not say.
MULTIMODAL = {"gemma3": "gemma3_text", "llava": "llama", "mistral3": "mistral"}
# What a language model's names begin with in transformers 5 and 4, and its own beginning.
NAMES = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
    r"^language_model\.": "",
}
# What sees, in transformers 5 and 4.
SIGHT = re.compile(r"^((?:model\.)?(?:vision_tower|multi_modal_projector))\.")
# Settings of what sees, and where its results go among the tokens.
SETTINGS_OF_SIGHT = {
    "text_config", "vision_config", "vision_feature_layer", "vision_feature_select_strategy",
    "image_token_index", "image_token_id", "image_seq_length", "projector_hidden_act",
    "multimodal_projector_bias", "spatial_merge_size", "mm_tokens_per_image", "boi_token_index",
    "boi_token_id", "eoi_token_index", "eoi_token_id",
}  # fmt: skip


def text_part(
    tensors: Mapping[str, Any], config: Any, ignore: Sequence[str] = ()
) -> tuple[dict[str, Any], Any]:
    """Returns the arrays and the config of a language model, also of one that is part of a model.

    Args:
        tensors: arrays by name.
        config: as ``from_torch`` takes it.
        ignore: patterns of names to leave out.

    Raises:
        UsageError: there are arrays of what sees, and they are not left out; or the config has no
            settings of a language model.
    """
    if not isinstance(config, Mapping) or config.get("model_type") not in MULTIMODAL:
        return dict(tensors), config
    model_type = config["model_type"]
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise UsageError(f"the text_config of {model_type} must be an object: got {text!r}")
    seeing = {
        f"{found.group(1)}.*": None
        for name in tensors
        if (found := SIGHT.match(name)) and not any(fnmatchcase(name, p) for p in ignore)
    }
    if seeing:
        raise UsageError(
            f"of {model_type} only the language model is ported: leave out what sees "
            f"({', '.join(seeing)}) with ",
            Setting("ignore"),
        )
    settings = {"model_type": MULTIMODAL[model_type], **_without(config), **text}
    settings["tie_word_embeddings"] = _is_tied(config, text)
    return {_renamed(name): tensor for name, tensor in tensors.items()}, settings


def _without(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of the whole that are not of what sees."""
    left = SETTINGS_OF_SIGHT | {"model_type", "architectures", "class"}
    return {name: value for name, value in config.items() if name not in left}


def _is_tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> Any:
    """Returns whether the head is tied, which the whole decides; LLaVA's text may say so too."""
    if config["model_type"] == "llava":
        return config.get("tie_word_embeddings") or text.get("tie_word_embeddings")
    found = config.get("tie_word_embeddings")
    return True if found is None else found


def _renamed(name: str) -> str:
    for pattern, start in NAMES.items():
        name, count = re.subn(pattern, start, name)
        if count:
            break
    return name
