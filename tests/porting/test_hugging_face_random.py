"""The dialects of Hugging Face: random arrays of random models come back bit for bit."""

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.porting.api import from_torch, to_torch
from jaxformer.porting.dialects import HUGGING_FACE
from tests.support.hugging_face.building import ported_buffers
from tests.support.hugging_face.cases import CASES
from tests.support.hugging_face.running import bits_of
from tests.support.tiers import SLOW, first_of_each, full_except

pytestmark = pytest.mark.usefixtures("float64")

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16, np.float64)


@st.composite
def _settings(draw, dialect):
    """Settings of a small model of a dialect."""
    heads = draw(st.sampled_from([1, 2, 3, 6]))
    groups = draw(st.sampled_from([n for n in (1, 2, 3, 6) if heads % n == 0]))
    head_dim = draw(st.sampled_from([2, 4, 8]))
    flag = st.booleans()
    layers = draw(st.integers(1, 3))
    sizes = {
        "vocab_size": draw(st.integers(3, 11)),
        "tie_word_embeddings": draw(flag),
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "max_position_embeddings": draw(st.integers(1, 9)),
        "pad_token_id": None,
    }
    width = draw(st.integers(1, 9))
    stack = {
        **sizes,
        "intermediate_size": width,
        "num_key_value_heads": groups,
        "attention_bias": draw(flag),
        "rope_scaling": draw(st.sampled_from([None, {"rope_type": "linear", "factor": 2.5}])),
    }
    wider = {**stack, "head_dim": draw(st.sampled_from([2, 6, 10]))}
    kinds = draw(
        st.lists(
            st.sampled_from(["full_attention", "sliding_attention"]),
            min_size=layers,
            max_size=layers,
        )
    )
    window = {"sliding_window": draw(st.integers(1, 9)), "layer_types": kinds}
    plain = {**sizes, "intermediate_size": width, "type_vocab_size": draw(st.integers(1, 3))}
    plain_turned = {**sizes, "intermediate_size": width, "partial_rotary_factor": 1.0}
    gpt2 = {**sizes, "n_inner": draw(st.sampled_from([None, 7]))}
    windows = {"attention_types": [[["local"], layers]], "window_size": 5}
    # The table of positions has rows for the padding's id and those below it.
    roberta = {**plain, "max_position_embeddings": draw(st.integers(3, 9)), "pad_token_id": 1}
    # What all kin of LLaMA have.
    llama = {**sizes, "intermediate_size": width, "num_key_value_heads": groups}
    known = {
        "gpt2": gpt2,
        "gpt_bigcode": {**gpt2, "multi_query": draw(flag)},
        "gpt_neo": {**sizes, **windows, "intermediate_size": width},
        "gptj": {**gpt2, "rotary_dim": head_dim},
        "codegen": {
            **gpt2,
            "hidden_size": 4 * heads * head_dim,
            "num_attention_heads": 4 * heads,
            "rotary_dim": head_dim,
        },
        "falcon": draw(
            st.sampled_from(
                [
                    {**sizes, "bias": True},
                    {**sizes, "multi_query": False, "parallel_attn": False, "alibi": True},
                    {**sizes, "new_decoder_architecture": True, "num_kv_heads": groups},
                ]
            )
        ),
        "mpt": {k: v for k, v in sizes.items() if k != "max_position_embeddings"},
        "persimmon": {**plain_turned, "qk_layernorm": draw(flag)},
        "starcoder2": {
            **{k: v for k, v in wider.items() if k != "attention_bias"},
            "use_bias": draw(flag),
        },
        "stablelm": {
            **plain_turned,
            "num_key_value_heads": groups,
            # Its norms have an array a head, which must share a dtype.
            "qk_layernorm": False,
            "use_parallel_residual": draw(flag),
        },
        "nemotron": {**wider, "partial_rotary_factor": 1.0, "mlp_bias": draw(flag)},
        "llama": {**wider, "mlp_bias": draw(flag)},
        "mistral": {**wider, "sliding_window": draw(st.sampled_from([None, 5]))},
        "qwen2": {**stack, **window, "use_sliding_window": draw(flag)},
        "qwen3": {**wider, **window, "use_sliding_window": draw(flag)},
        "gemma": wider,
        "gemma2": {**wider, **window, "query_pre_attn_scalar": draw(st.integers(1, 300))},
        "gpt_neox": {
            **{k: v for k, v in stack.items() if k != "num_key_value_heads"},
            "rotary_pct": 1.0,
            "use_parallel_residual": draw(flag),
        },
        "bloom": {k: v for k, v in sizes.items() if k != "max_position_embeddings"},
        **dict.fromkeys(("bert", "megatron-bert", "ernie"), plain),
        **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), roberta),
        "electra": {**plain, "embedding_size": draw(st.sampled_from([5, heads * head_dim]))},
        "distilbert": {**sizes, "hidden_dim": width},
        "openai-gpt": sizes,
        "biogpt": {**sizes, "intermediate_size": width, "scale_embedding": draw(flag)},
        "xglm": {**sizes, "hidden_size": 4 * heads, "ffn_dim": width},
        "phi": {**stack, "partial_rotary_factor": 1.0, "qk_layernorm": draw(flag)},
        "opt": {
            **sizes,
            "ffn_dim": width,
            "word_embed_proj_dim": draw(st.sampled_from([5, heads * head_dim])),
            "enable_bias": draw(flag),
            "do_layer_norm_before": draw(flag),
        },
    }
    # GLM turns half a head. The test knows no constants, which xIELU has as arrays.
    known["glm"] = known["glm4"] = {**llama, "head_dim": 2 * head_dim}
    t5 = {
        **{k: v for k, v in sizes.items() if k != "max_position_embeddings"},
        "d_kv": draw(st.sampled_from([2, 5])),
        "d_ff": width,
        "num_decoder_layers": draw(st.sampled_from([None, 1, 2])),
        "feed_forward_proj": draw(st.sampled_from(["relu", "gated-gelu"])),
        "relative_attention_num_buckets": draw(st.integers(4, 9)),
        "relative_attention_max_distance": draw(st.integers(5, 9)),
    }
    known |= dict.fromkeys(("t5", "mt5", "umt5"), t5)
    bart = {
        **{k: sizes[k] for k in ("vocab_size", "max_position_embeddings")},
        "d_model": heads * 4,
        "encoder_layers": layers,
        "decoder_layers": draw(st.integers(1, 2)),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": draw(st.sampled_from([1, heads])),
        "encoder_ffn_dim": width,
        "decoder_ffn_dim": draw(st.integers(1, 9)),
        "pad_token_id": 1,
    }
    known |= dict.fromkeys(("bart", "mbart", "blenderbot", "m2m_100"), bart)
    known["albert"] = {
        **plain,
        "embedding_size": draw(st.sampled_from([5, heads * head_dim])),
        "num_hidden_groups": draw(st.integers(1, layers)),
        "inner_group_num": draw(st.integers(1, 2)),
    }
    known["mpnet"] = {k: v for k, v in roberta.items() if k != "type_vocab_size"}
    known["modernbert"] = {
        **sizes,
        **dict.fromkeys(("cls_token_id", "sep_token_id")),
        "intermediate_size": width,
        **{f"{part}_bias": draw(flag) for part in ("attention", "mlp", "norm", "classifier")},
    }
    images = {
        **{k: sizes[k] for k in ("hidden_size", "num_attention_heads", "num_hidden_layers")},
        "image_size": draw(st.integers(4, 9)),
        "patch_size": [draw(st.integers(1, 4)), draw(st.integers(1, 4))],
        "num_channels": draw(st.integers(1, 3)),
        "num_labels": draw(st.integers(1, 5)),
        "qkv_bias": draw(flag),
    }
    known["vit"] = known["deit"] = {**images, "intermediate_size": width}
    known["dinov2"] = {
        **images,
        "mlp_ratio": draw(st.integers(1, 3)),
        "use_swiglu_ffn": draw(flag),
    }
    known["deberta-v2"] = {
        **plain,
        "type_vocab_size": draw(st.integers(0, 2)),
        "relative_attention": True,
        "pos_att_type": draw(st.sampled_from([["c2p"], ["p2c", "c2p"]])),
        "share_att_key": draw(flag),
        "norm_rel_ebd": draw(st.sampled_from(["none", "layer_norm"])),
        "position_biased_input": draw(flag),
        "max_relative_positions": draw(st.integers(1, 9)),
    }
    known["clip_vision_model"] = {
        **{k: v for k, v in images.items() if k not in ("num_labels", "qkv_bias")},
        "patch_size": draw(st.integers(1, 4)),
        "intermediate_size": width,
        "projection_dim": draw(st.integers(1, 5)),
    }
    known["siglip_vision_model"] = {
        **{k: v for k, v in known["clip_vision_model"].items() if k != "projection_dim"},
        "vision_use_head": draw(flag),
    }
    known["clip_text_model"] = known["siglip_text_model"] = {**sizes, "intermediate_size": width}
    text = {**sizes, "intermediate_size": width, "eos_token_id": 2}
    del text["tie_word_embeddings"]
    pair = {"text_config": text, "vision_config": known["clip_vision_model"]}
    known["clip"] = {**pair, "projection_dim": draw(st.integers(1, 5))}
    seeing = {**known["siglip_vision_model"], "vision_use_head": True}
    seeing["hidden_size"] = sizes["hidden_size"]
    known["siglip"] = {**pair, "vision_config": seeing}
    known["whisper"] = {
        **{k: v for k, v in bart.items() if k != "max_position_embeddings"},
        "max_source_positions": draw(st.integers(1, 9)),
        "max_target_positions": draw(st.integers(1, 9)),
        "num_mel_bins": draw(st.integers(1, 9)),
        "tie_word_embeddings": draw(flag),
    }
    known["apertus"] = {**llama, "hidden_act": "gelu"}
    known["deepseek_v3"] = {
        **sizes,
        "num_key_value_heads": heads,
        "intermediate_size": width,
        "kv_lora_rank": draw(st.integers(1, 5)),
        "q_lora_rank": draw(st.sampled_from([None, 3])),
        "qk_nope_head_dim": draw(st.integers(1, 5)),
        "qk_rope_head_dim": head_dim,
        "v_head_dim": draw(st.integers(1, 5)),
        "n_routed_experts": 6,
        "num_experts_per_tok": draw(st.integers(1, 2)),
        "n_group": draw(st.sampled_from([1, 2, 3])),
        "topk_group": 1,
        "n_shared_experts": draw(st.integers(1, 2)),
        "moe_intermediate_size": draw(st.integers(1, 5)),
        "first_k_dense_replace": draw(st.integers(0, layers)),
        "attention_bias": draw(flag),
    }
    return known.get(dialect, {**llama, "head_dim": head_dim})


def _random_array(rng, shape):
    """Random bits in a random dtype and layout, as numpy's or torch's."""
    dtype = np.dtype(DTYPES[rng.integers(4)])
    transposed, strided, torchs = rng.integers(2, size=3)
    stored = shape[::-1] if transposed else shape
    strided = strided and bool(shape)
    stored = (*stored[:-1], 2 * stored[-1]) if strided else stored
    bits = rng.integers(0, 256, (*stored, dtype.itemsize), np.uint8)
    if torchs:
        kind = getattr(torch, dtype.name)
        array = torch.from_numpy(bits).view(kind).squeeze(-1)
    else:
        array = bits.view(dtype).squeeze(-1)
    array = array[..., ::2] if strided else array
    if not transposed:
        return array
    axes = tuple(range(array.ndim))[::-1]
    return array.permute(axes) if torchs else array.transpose(axes)


def _kinds(dialect):
    return sorted({case.kind for case in CASES.values() if case.dialect == dialect})


# Tables of sinusoids are among the parameters of these, and may not be any arrays.
WITH_TABLES = ("marian", "pegasus", "roformer", "whisper")


@pytest.mark.parametrize(
    "dialect",
    first_of_each(
        full_except(
            [name for name in HUGGING_FACE if name not in WITH_TABLES],
            lambda dialect: dialect in ("gpt2", "llama"),
        ),
        HUGGING_FACE.get,
        SLOW,
    ),
)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_any_arrays_come_back_bit_for_bit(dialect, data):
    kind = getattr(transformers, data.draw(st.sampled_from(_kinds(dialect))))
    drawn = data.draw(_settings(dialect))
    tokens = {} if "image_size" in drawn else {"bos_token_id": None, "eos_token_id": None}
    config = kind.config_class(**drawn, **tokens)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    with torch.device("meta"):
        model = kind(config)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    parameters |= {name: model.get_buffer(name) for name in ported_buffers(model)}
    assert parameters.keys() == model.state_dict().keys()
    by_parameter = {}
    for parameter in parameters.values():
        by_parameter.setdefault(parameter, _random_array(rng, tuple(parameter.shape)))
    arrays = {name: by_parameter[parameter] for name, parameter in parameters.items()}
    for start in ("cls.predictions", "lm_head", "predictions"):
        if f"{start}.decoder.bias" in arrays:
            arrays[f"{start}.bias"] = arrays[f"{start}.decoder.bias"]
    settings = {**config.to_dict(), "class": kind.__name__}
    back = to_torch(from_torch(arrays, config=settings))
    assert bits_of(back) == bits_of(arrays)
