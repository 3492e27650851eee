"""The families of Flax models that transformers 4 shipped, with odd configurations."""

import re
from functools import partial

from benchmarks.wild import inputs
from benchmarks.wild.settings import Setting

VERSION = "4.55.4"
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {"vocab_size": inputs.VOCAB, **SPECIAL}
WIDTH = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
BERT = TEXT | WIDTH | {"intermediate_size": 40, "max_position_embeddings": 32}
LLAMA = BERT | {"num_attention_heads": 4, "num_key_value_heads": 4}
BART = TEXT | {
    "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 3,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 28,
    "max_position_embeddings": 32, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
T5 = TEXT | {
    "d_model": 24, "d_kv": 7, "num_heads": 3, "d_ff": 40, "num_layers": 2, "num_decoder_layers": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
VIT = WIDTH | {"intermediate_size": 40, "image_size": 16, "patch_size": 4}

# The PyTorch class, the settings of a small model, and what is odd in further ones. The
# configuration's class has the first part of the name, if no other is given.
ENCODERS = {
    "Albert": ("AlbertForMaskedLM", BERT | {"embedding_size": 12}, {
        "erf GELU, two groups": {
            "hidden_act": "gelu", "num_hidden_groups": 2, "layer_norm_eps": 1e-3,
        },
    }),
    "Bert": ("BertForMaskedLM", BERT, {
        "untied, tanh GELU, eps 1e-3": {
            "tie_word_embeddings": False, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3,
        },
        "relative keys": {"position_embedding_type": "relative_key"},
    }),
    "BigBird": ("BigBirdForMaskedLM", BERT | {"attention_type": "original_full"}, {
        "rescaled embeddings, no bias, erf GELU": {
            "rescale_embeddings": True, "use_bias": False, "hidden_act": "gelu",
            "layer_norm_eps": 1e-3,
        },
    }),
    "DistilBert": ("DistilBertForMaskedLM", TEXT | {
        "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40, "max_position_embeddings": 32,
    }, {"ReLU, sinusoidal": {"activation": "relu", "sinusoidal_pos_embds": True}}),
    "Electra": ("ElectraForMaskedLM", BERT | {"embedding_size": 12}, {
        "tanh GELU, eps 1e-3, untied": {
            "hidden_act": "gelu_new", "layer_norm_eps": 1e-3, "tie_word_embeddings": False,
        },
    }),
    "RoFormer": ("RoFormerForMaskedLM", BERT | {"embedding_size": 24}, {
        "rotated values, narrow embedding": {"rotary_value": True, "embedding_size": 12},
        "untied, eps 1e-3": {"tie_word_embeddings": False, "layer_norm_eps": 1e-3},
    }),
    "Roberta": ("RobertaForMaskedLM", BERT | {"pad_token_id": 1, "bos_token_id": 0}, {
        "untied, tanh GELU, eps 1e-3": {
            "tie_word_embeddings": False, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3,
        },
    }),
    "RobertaPreLayerNorm": (
        "RobertaPreLayerNormForMaskedLM", BERT | {"pad_token_id": 1, "bos_token_id": 0}, {
            "eps 1e-3, ReLU": {"layer_norm_eps": 1e-3, "hidden_act": "relu"},
        },
    ),
    "XLMRoberta": ("XLMRobertaForMaskedLM", BERT | {"pad_token_id": 1, "bos_token_id": 0}, {
        "eps 1e-3, tanh GELU": {"layer_norm_eps": 1e-3, "hidden_act": "gelu_new"},
    }),
}  # fmt: skip
DECODERS = {
    "Bart decoder": ("BartForCausalLM", BART, {}),
    "Bloom": ("BloomForCausalLM", TEXT | {"hidden_size": 24, "n_layer": 2, "n_head": 4}, {
        "three heads": {"n_head": 3},
        "residual after the norm": {"apply_residual_connection_post_layernorm": True},
    }),
    "GPT2": ("GPT2LMHeadModel", TEXT | {
        "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32, "n_inner": 40,
    }, {
        "scaled by layer, erf GELU, eps 1e-3": {
            "scale_attn_by_inverse_layer_idx": True, "activation_function": "gelu",
            "layer_norm_epsilon": 1e-3,
        },
        "unscaled, untied": {"scale_attn_weights": False, "tie_word_embeddings": False},
    }),
    "GPTNeo": ("GPTNeoForCausalLM", TEXT | {
        "hidden_size": 24, "num_layers": 2, "attention_types": [[["global", "local"], 1]],
        "num_heads": 3, "intermediate_size": 40, "max_position_embeddings": 32, "window_size": 4,
    }, {"ReLU, eps 1e-3": {"activation_function": "relu", "layer_norm_epsilon": 1e-3}}),
    "GPTJ": ("GPTJForCausalLM", TEXT | {
        "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32, "n_inner": 40, "rotary_dim": 4,
    }, {
        "every column rotated, erf GELU": {"rotary_dim": 8, "activation_function": "gelu"},
        "tied": {"tie_word_embeddings": True},
    }),
    "Gemma": ("GemmaForCausalLM", LLAMA | {"head_dim": 10, "num_key_value_heads": 1}, {
        "two groups, eps 1e-3": {"num_key_value_heads": 2, "rms_norm_eps": 1e-3},
        "erf GELU": {"hidden_activation": "gelu", "hidden_act": "gelu"},
    }),
    "Llama": ("LlamaForCausalLM", LLAMA, {
        "grouped queries": {"num_key_value_heads": 2, "rms_norm_eps": 1e-3},
        "heads wider than the width": {"head_dim": 10},
        "base 500,000": {"rope_theta": 500000.0},
        "scaled positions": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        "biases": {"attention_bias": True},
        "tied": {"tie_word_embeddings": True},
    }),
    "Mistral": ("MistralForCausalLM", LLAMA | {"num_key_value_heads": 2, "sliding_window": None}, {
        "window of 4": {"sliding_window": 4},
        "heads wider than the width": {"head_dim": 10},
        "base 1,000,000": {"rope_theta": 1e6},
    }),
    "OPT": ("OPTForCausalLM", TEXT | {
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "ffn_dim": 40,
        "max_position_embeddings": 32, "word_embed_proj_dim": 24,
    }, {
        "post-norm, projected embeddings": {
            "do_layer_norm_before": False, "word_embed_proj_dim": 16,
        },
        "erf GELU, no biases": {"activation_function": "gelu", "enable_bias": False},
    }),
    "XGLM": ("XGLMForCausalLM", TEXT | {
        "d_model": 24, "num_layers": 2, "attention_heads": 3, "ffn_dim": 40,
        "max_position_embeddings": 32, "pad_token_id": 1, "bos_token_id": 0,
    }, {
        "unscaled embeddings, ReLU": {"scale_embedding": False, "activation_function": "relu"},
    }),
}  # fmt: skip
BART_ODD = {"tanh GELU, scaled embeddings": {
    "activation_function": "gelu_new", "scale_embedding": True,
}}  # fmt: skip
ENCODER_DECODERS = {
    "Bart": ("BartForConditionalGeneration", BART, BART_ODD),
    "Blenderbot": ("BlenderbotForConditionalGeneration", BART, BART_ODD),
    "BlenderbotSmall": ("BlenderbotSmallForConditionalGeneration", BART, BART_ODD),
    "Marian": ("MarianMTModel", BART | {"decoder_attention_heads": 3}, {
        "SiLU, scaled embeddings": {"activation_function": "swish", "scale_embedding": True},
        "untied": {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False},
    }),
    "MBart": ("MBartForConditionalGeneration", BART, BART_ODD),
    "Pegasus": ("PegasusForConditionalGeneration", BART, BART_ODD),
    "T5": ("T5ForConditionalGeneration", T5, {
        "gated GELU, untied": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
        "gated SiLU, few buckets, eps 1e-3": {
            "feed_forward_proj": "gated-silu", "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 9, "layer_norm_epsilon": 1e-3,
        },
    }),
    "MT5": ("MT5ForConditionalGeneration", T5, {}),
    "LongT5": ("LongT5ForConditionalGeneration", T5 | {"local_radius": 3}, {
        "global blocks": {"encoder_attention_type": "transient-global", "global_block_size": 4},
    }),
}  # fmt: skip
VISION = {
    "Beit": ("BeitForImageClassification", VIT, {
        "relative positions, no masks": {
            "use_relative_position_bias": True, "use_mask_token": False,
        },
        "shared relative positions, first token": {
            "use_shared_relative_position_bias": True, "use_mean_pooling": False,
            "use_absolute_position_embeddings": True, "layer_norm_eps": 1e-3,
        },
    }),
    "ViT": ("ViTForImageClassification", VIT, {
        "tanh GELU, no biases, eps 1e-3": {
            "hidden_act": "gelu_new", "qkv_bias": False, "layer_norm_eps": 1e-3,
        },
    }),
    "ViT body": ("ViTModel", VIT, {}),
    "Dinov2": ("Dinov2ForImageClassification", VIT, {
        "gated feed-forward, eps 1e-3": {"use_swiglu_ffn": True, "layer_norm_eps": 1e-3},
        "positions of a larger image": {"image_size": 24},
    }),
    "ResNet": ("ResNetForImageClassification", {
        "embedding_size": 6, "hidden_sizes": [8, 12], "depths": [2, 1], "num_channels": 3,
    }, {
        "basic layers": {"layer_type": "basic"},
        "SiLU": {"hidden_act": "silu"},
        "downsampled at first": {"downsample_in_first_stage": True},
    }),
    "RegNet": ("RegNetForImageClassification", {
        "embedding_size": 6, "hidden_sizes": [8, 12], "depths": [2, 1], "num_channels": 3,
        "groups_width": 4,
    }, {"layers x": {"layer_type": "x"}}),
}  # fmt: skip
SPEECH = {
    "conv_dim": [8, 8, 8], "conv_kernel": [10, 3, 3], "conv_stride": [5, 2, 2],
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip


def settings():
    """Yields every setting of the Flax models of transformers."""
    for kind, families in (
        (_encoder, ENCODERS), (_decoder, DECODERS), (_encoder_decoder, ENCODER_DECODERS),
        (_image, VISION),
    ):  # fmt: skip
        for family, (name, base, odd) in families.items():
            config = _config_name(name)
            for setting, changes in {"as usual": {}, **odd}.items():
                modes = kind(name, config, tuple((base | changes).items()), base | changes)
                if changes:
                    # How a text is padded and generated is tried with the usual settings.
                    modes = {"forward": modes["forward"]}
                yield Setting("transformers", family, setting, modes)


def _config_name(name):
    return re.match("(.*?)(For[A-Z]|LMHead|MTModel|Model)", name)[1] + "Config"


def _both(name, config, overrides):
    from benchmarks.wild.flax_pairs import both

    return both(name, config, _frozen(overrides))


class _frozen(tuple):  # noqa: N801
    """Settings that can be a key, although lists are among them."""

    def __hash__(self):
        return hash(repr(self))


def _encoder(name, config, overrides, base):
    from benchmarks.wild import flax_pairs

    def pair(side):
        ids, mask = inputs.padded_tokens(side, base["pad_token_id"])
        given = {"input_ids": ids, "attention_mask": mask}
        return flax_pairs.once(*_both(name, config, overrides), given, flax_pairs.seen_in(mask))

    return {
        "forward": partial(pair, ""),
        "padding right": partial(pair, "right"),
        "padding left": partial(pair, "left"),
    }


def _decoder(name, config, overrides, base):
    from benchmarks.wild import flax_pairs

    def cached(side):
        ids, mask = inputs.padded_tokens(side, base["pad_token_id"])
        return flax_pairs.decode(*_both(name, config, overrides), ids, mask)

    return {
        **_encoder(name, config, overrides, base),
        "cache": partial(cached, ""),
        "cache, padding left": partial(cached, "left"),
    }


def _encoder_decoder(name, config, overrides, base):
    from benchmarks.wild import flax_pairs

    def given(side):
        ids, mask = inputs.padded_tokens(side, base["pad_token_id"])
        return {"input_ids": ids, "attention_mask": mask}

    decoder_ids = inputs.tokens(8, seed=3)

    def pair(side):
        both = {**given(side), "decoder_input_ids": decoder_ids}
        return flax_pairs.once(*_both(name, config, overrides), both)

    def cached(side):
        return flax_pairs.decode_with_encoder(
            *_both(name, config, overrides), decoder_ids, given(side)
        )

    return {
        "forward": partial(pair, ""),
        "padding right": partial(pair, "right"),
        "padding left": partial(pair, "left"),
        "cache": partial(cached, ""),
        "cache, padding left": partial(cached, "left"),
    }


def _image(name, config, overrides, base):
    from benchmarks.wild import flax_pairs

    def pair():
        given = {"pixel_values": inputs.images(32 if "depths" in base else 16)}
        return flax_pairs.once(*_both(name, config, overrides), given)

    return {"forward": pair}
