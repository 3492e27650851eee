"""The dialects of Hugging Face: names and bits, imported and exported, and what is rejected."""

import pytest
import torch

from jaxformer.errors import CheckpointError, UsageError
from jaxformer.porting.api import export_plan, from_torch, to_torch
from jaxformer.porting.dialects import HUGGING_FACE, detect_dialect
from jaxformer.porting.formats.arrays import to_stored_tensors
from tests.support.hugging_face.building import build, build_case, randomize
from tests.support.hugging_face.cases import CASES
from tests.support.hugging_face.running import bits_of, run_source, tokens
from tests.support.tiers import SLOW, first_of_each, full_after

pytestmark = pytest.mark.usefixtures("float64")

# Of each type one case, the others in the slow tier.
SOME_CASES = first_of_each(CASES, lambda name: CASES[name].dialect, SLOW)
DTYPES = [[torch.bfloat16], [torch.float32, torch.float16, torch.float64]]


@pytest.mark.parametrize("name", SOME_CASES)
@pytest.mark.parametrize("dtypes", full_after(1, DTYPES))
def test_every_bit_comes_back(name, dtypes):
    case = CASES[name]
    source = randomize(build_case(case), copies=case.copies)
    for dtype in dtypes:
        source = source.to(dtype)
        back = to_torch(from_torch(source, case.dialect))
        assert all(array.flags.c_contiguous for array in back.values())
        assert bits_of(back) == bits_of(source.state_dict())


@pytest.mark.parametrize(
    "name",
    first_of_each(
        first_of_each(CASES, lambda name: CASES[name].dialect, SLOW),
        lambda name: HUGGING_FACE[CASES[name].dialect],
    ),
)
def test_transformers_builds_the_same_from_what_comes_back(name):
    case = CASES[name]
    source = randomize(build_case(case), copies=case.copies).float()
    target = from_torch(source)
    settings = export_plan(target).module_mapping.settings(target)
    again = build(case.kind, settings, attention=case.attention, **case.arguments)
    again.load_state_dict({k: torch.as_tensor(a) for k, a in to_torch(target).items()}, strict=True)
    assert torch.equal(run_source(again, tokens())[0], run_source(source, tokens())[0])


def _arrays(name):
    source = build_case(CASES[name])
    return dict(source.state_dict()), source.config.to_dict()


def _unsupported(setting, value):
    return f"unsupported: {setting} must .*: got {value}"


# Unsupported settings: a case, what is changed, what the error must say (a regular expression).
UNSUPPORTED = [
    (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True},
        _unsupported("scale_attn_by_inverse_layer_idx", "True"),
    ),
    ("gpt2", {"scale_attn_weights": False}, _unsupported("scale_attn_weights", "False")),
    ("gpt2", {"add_cross_attention": True}, _unsupported("add_cross_attention", "True")),
    (
        "gpt2",
        {"activation_function": "quick_gelu"},
        _unsupported("activation_function", "'quick_gelu'"),
    ),
    ("llama", {"hidden_act": "mish"}, _unsupported("hidden_act", "'mish'")),
    (
        "llama",
        {"rope_parameters": {"rope_type": "axial", "factor": 2.0}},
        _unsupported("rope_type", "'axial'"),
    ),
    (
        "llama",
        {"rope_scaling": {"type": "su", "factor": 2.0}},
        _unsupported("rope_type", "'su'"),
    ),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters has no factor"),
    (
        "llama",
        {"rope_parameters": {"full_attention": {}}},
        _unsupported("rope_parameters", "[{]'full_attention': {}}"),
    ),
    (
        "llama",
        {"rope_parameters": None, "partial_rotary_factor": 0.5},
        _unsupported("partial_rotary_factor", "0.5"),
    ),
    (
        "qwen2",
        {"rope_parameters": {"rope_type": "longrope"}},
        "rope_parameters has no short_factor",
    ),
    (
        "gemma",
        {"use_bidirectional_attention": True},
        _unsupported("use_bidirectional_attention", "True"),
    ),
    (
        "gemma2",
        {"hidden_activation": "quick_gelu"},
        _unsupported("hidden_activation", "'quick_gelu'"),
    ),
    ("gpt_neox", {"hidden_act": "tanh"}, _unsupported("hidden_act", "'tanh'")),
    ("gpt_neox", {"head_dim": 10}, _unsupported("head_dim", "10")),
    (
        "bloom",
        {"apply_residual_connection_post_layernorm": True},
        _unsupported("apply_residual_connection_post_layernorm", "True"),
    ),
    ("bert", {"add_cross_attention": True}, _unsupported("add_cross_attention", "True")),
    (
        "bert",
        {"position_embedding_type": "relative_key"},
        _unsupported("position_embedding_type", "'relative_key'"),
    ),
    ("phi", {"head_dim": 10}, _unsupported("head_dim", "10")),
    ("phi", {"num_attention_heads": 5}, "hidden_size must be divisible by num_attention_heads"),
    ("opt", {"layerdrop": 0.1}, _unsupported("layerdrop", "0.1")),
    (
        "opt",
        {"layer_norm_elementwise_affine": False},
        _unsupported("layer_norm_elementwise_affine", "False"),
    ),
    ("opt", {"num_attention_heads": 0}, "num_attention_heads must be positive: got 0"),
    ("opt", {"hidden_size": "wide"}, "hidden_size must be an integer: got 'wide'"),
]


@pytest.mark.parametrize(("name", "changed", "words"), UNSUPPORTED)
def test_unsupported_settings_are_rejected(name, changed, words):
    arrays, config = _arrays(name)
    with pytest.raises(UsageError, match=words):
        from_torch(arrays, CASES[name].dialect, {**config, **changed})


def test_a_pooler_of_causal_tokens_is_rejected():
    source = build_case(CASES["bert"])
    source.config.is_decoder = True
    with pytest.raises(UsageError, match="pooler needs causal=False"):
        from_torch(source)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gpt_neox", "bloom", "bert", "opt"])
def test_all_that_is_wrong_with_the_arrays_is_listed(name):
    arrays, config = _arrays(name)
    gone, renamed, misshapen, *_ = (k for k, a in arrays.items() if a.ndim == 2 and ".1." in k)
    del arrays[gone]
    arrays[renamed.replace("weight", "wait")] = arrays.pop(renamed)
    arrays[misshapen] = arrays[misshapen][:-1]
    arrays["score.weight"] = torch.zeros(2, 3)
    with pytest.raises(CheckpointError) as caught:
        from_torch(arrays, CASES[name].dialect, config)
    message = str(caught.value)
    assert f"missing {gone}" in message
    assert f"missing {renamed}" in message
    assert f"(is it {renamed.replace('weight', 'wait')}?)" in message
    assert f"unexpected {renamed.replace('weight', 'wait')}" in message
    assert f"{misshapen} has shape {tuple(arrays[misshapen].shape)}, not " in message
    assert "unexpected score.weight" in message


def test_sizes_that_are_not_those_of_the_arrays_are_listed():
    arrays, config = _arrays("llama")
    with pytest.raises(CheckpointError) as caught:
        from_torch(arrays, "llama", {**config, "num_key_value_heads": 4, "vocab_size": 38})
    assert "model.embed_tokens.weight has shape (37, 24), not (38, 24)" in str(caught.value)
    assert "model.layers.1.self_attn.k_proj.weight has shape (12, 24)" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "alias", "other"),
    [
        ("gpt2", "lm_head.weight", "transformer.wte.weight"),
        ("opt", "lm_head.weight", "model.decoder.embed_tokens.weight"),
        ("bert masked", "cls.predictions.bias", "cls.predictions.decoder.bias"),
        ("bert masked untied", "cls.predictions.bias", "cls.predictions.decoder.bias"),
    ],
)
def test_tied_arrays_agree_or_are_refused(name, alias, other):
    arrays, config = _arrays(name)
    for missing in (alias, other):
        fewer = {k: a for k, a in arrays.items() if k != missing}
        assert bits_of(to_torch(from_torch(fewer, CASES[name].dialect, config))) == bits_of(arrays)
    arrays[alias] = arrays[alias] + 1
    with pytest.raises(CheckpointError, match=f"{alias} must equal {other}"):
        from_torch(arrays, CASES[name].dialect, config)


@pytest.mark.parametrize("name", ["gpt2", "bloom", "bert masked", "opt"])
def test_names_without_their_prefix_and_with_wrappers_are_read(name):
    arrays, config = _arrays(name)
    dialect = CASES[name].dialect
    prefix = {"bert": "bert.", "opt": "model."}.get(dialect, "transformer.")
    bare = {k.removeprefix(prefix): a for k, a in arrays.items()}
    wrapped = {f"module._orig_mod.{k}": a for k, a in arrays.items()}
    for other in (bare, wrapped):
        assert bits_of(to_torch(from_torch(other, dialect, config))) == bits_of(arrays)


def test_a_body_is_read_from_a_whole_model_on_request():
    arrays, config = _arrays("bert masked")
    body = from_torch(arrays, "bert", {**config, "class": "BertModel"}, ignore=["cls.*"])
    assert body.config.head.head == "none"
    assert not body.config.head.pooler
    named = {k.removeprefix("bert."): a for k, a in arrays.items() if k.startswith("bert.")}
    assert bits_of(to_torch(body)) == bits_of(named)


def test_old_names_are_read():
    arrays, config = _arrays("bert")
    old = {
        k.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): a
        for k, a in arrays.items()
    }
    assert old.keys() != arrays.keys()
    assert bits_of(to_torch(from_torch(old, "bert", config))) == bits_of(arrays)
    arrays, config = _arrays("gpt_neox")
    old = {k.replace("lm_head", "embed_out"): a for k, a in arrays.items()}
    assert bits_of(to_torch(from_torch(old, "gpt_neox", config))) == bits_of(arrays)


def _old_buffers(name):
    length = 320
    mask = torch.ones(length, length, dtype=torch.uint8).tril()[None, None]

    def frequencies(base, width):
        return 1.0 / (base ** (torch.arange(0, width, 2).float() / width))

    return {
        "gpt2": {"transformer.h.#.attn.bias": mask, "transformer.h.#.attn.masked_bias": -1e4},
        "gpt_neox": {
            "gpt_neox.layers.#.attention.bias": mask.bool(),
            "gpt_neox.layers.#.attention.masked_bias": -1e9,
            "gpt_neox.layers.#.attention.rotary_emb.inv_freq": frequencies(1e4, 4),
        },
        "llama linear": {
            "model.layers.#.self_attn.rotary_emb.inv_freq": frequencies(1e4, 6),
        },
        "bert": {"embeddings.position_ids": torch.arange(length)[None]},
    }[name]


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama linear", "bert"])
@pytest.mark.parametrize("dtype", full_after(1, [torch.float32, torch.float16, torch.bfloat16]))
def test_buffers_of_old_files_are_checked(name, dtype):
    arrays, config = _arrays(name)
    dialect = CASES[name].dialect
    buffers = {
        pattern.replace("#", str(layer)): torch.as_tensor(value)
        for pattern, value in _old_buffers(name).items()
        for layer in range(2)
    }
    buffers = {k: b.to(dtype) if b.is_floating_point() else b for k, b in buffers.items()}
    assert bits_of(to_torch(from_torch({**arrays, **buffers}, dialect, config))) == bits_of(
        {**arrays, **buffers}
    )
    for key, buffer in buffers.items():
        wrong = buffer.clone()
        wrong.view(-1)[-1] = 0 if wrong.view(-1)[-1] != 0 else 1
        with pytest.raises(CheckpointError, match=f"the buffer {key}"):
            from_torch({**arrays, **buffers, key: wrong}, dialect, config)


@pytest.mark.parametrize("name", SOME_CASES)
def test_the_dialect_is_told_by_the_config_or_the_module(name):
    source = build_case(CASES[name])
    tensors = to_stored_tensors(source.state_dict())
    dialect = CASES[name].dialect
    assert detect_dialect(tensors, config=source.config.to_dict()).name == dialect
    assert detect_dialect(tensors, module=source).name == dialect


def test_unknown_models_and_remote_code_are_refused():
    with pytest.raises(UsageError, match=r".mamba. is not known; known are gpt2, .*llama"):
        detect_dialect({}, config={"model_type": "mamba"})
    code = {"model_type": "phi", "auto_map": {"AutoModel": "modeling_phi.PhiModel"}}
    with pytest.raises(UsageError, match=r"auto_map.*no such feature"):
        detect_dialect({}, config=code)
