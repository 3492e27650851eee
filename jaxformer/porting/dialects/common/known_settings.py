"""Settings that any config.json of Hugging Face may hold, and that are no part of a model's maths.

A family's table names the settings that its class reads. Whatever is neither there nor here is
rejected, because it might change what the model computes.
"""

from collections.abc import Mapping
from typing import Any

from jaxformer.porting.mapping.settings import Required, Row
from jaxformer.porting.mapping.unread_settings import Inert

# Who wrote the file, and how the class is chosen.
_FILE = (
    "class", "model_type", "architectures", "transformers_version", "_name_or_path", "name_or_path",
    "_commit_hash", "auto_map", "torch_dtype", "dtype", "finetuning_task", "tokenizer_class",
    "unsloth_version", "unsloth_fixed",
)  # fmt: skip
# How weights are drawn, and how a program runs.
_RUNNING = (
    "initializer_range", "initializer_factor", "init_std", "use_cache", "gradient_checkpointing",
    "output_attentions", "output_hidden_states", "output_past", "return_dict", "use_return_dict",
    "torchscript", "use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward",
    "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
    "_attn_implementation_autoset", "_experts_implementation", "_experts_implementation_internal",
    "_flash_attn_2_enabled", "cache_implementation",
)  # fmt: skip
# Ids of special tokens. Where padding is masked by the caller, an id changes no number.
_TOKENS = (
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "unk_token_id",
    "mask_token_id", "decoder_start_token_id",
)  # fmt: skip
# Of heads for tasks, whose tables read them.
_TASKS = (
    "id2label", "label2id", "num_labels", "_num_labels", "problem_type", "classifier_dropout",
    "task_specific_params", "prefix",
)  # fmt: skip
# Of generation; today they stand in generation_config.json.
_GENERATION = (
    "max_length", "min_length", "max_new_tokens", "do_sample", "early_stopping", "num_beams",
    "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p", "typical_p",
    "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "bad_words_ids",
    "encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "num_return_sequences",
    "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
    "begin_suppress_tokens", "epsilon_cutoff", "eta_cutoff", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
    "target_lookbehind",
)  # fmt: skip
# What changes no number here and that transformers goes by when it trains or writes; a run keeps it
# for the way back, and the ids of special tokens besides.
KEPT = (
    "initializer_range", "initializer_factor", "init_std", "tokenizer_class", "finetuning_task",
    "id2label", "label2id", "problem_type", "classifier_dropout", "task_specific_params", "prefix",
    "use_cache", "logit_scale_init_value", *_GENERATION,
)  # fmt: skip
# Where a model of two halves has the settings of each.
PARTS = ("text_config", "vision_config")
# Without effect at these values, which every config of transformers 4 may hold.
DEFAULTS: dict[str, Any] = {
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "pruned_heads": {},
    "tie_encoder_decoder": False,
}


SHARED: tuple[Row, ...] = (
    Inert((*_FILE, *_RUNNING, *_TOKENS, *_TASKS, *_GENERATION)),
    # transformers makes any decoder bidirectional where this is false or null.
    Required("is_causal", lambda values: values.get("causal", True), is_nullable=True),
)


def kept_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those settings of a config.json that a run keeps, also those of its two halves."""
    parts = {name: _kept(config[name]) for name in PARTS if isinstance(config.get(name), Mapping)}
    return _kept(config) | {name: kept for name, kept in parts.items() if kept}


def with_kept_parts(settings: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings whose halves have what is kept of the same ones in a source."""
    kept = kept_settings(source)
    halves = {name: value for name, value in settings.items() if name in PARTS}
    return {**settings, **{name: {**kept.get(name, {}), **own} for name, own in halves.items()}}


def _kept(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name in KEPT}
