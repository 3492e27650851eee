"""Which dialect a module, a config or arrays are of, where nobody says it."""

import numpy as np
import pytest
import torch

import torch_ref.config
import torch_ref.transformer_lm
from jaxformer.config import TransformerLMConfig
from jaxformer.config_speech import SpeechTransformerConfig
from jaxformer.errors import CheckpointError, UsageError
from jaxformer.porting.api import from_torch, to_torch
from jaxformer.porting.dialects import detect_dialect, find_dialect
from jaxformer.porting.formats.arrays import to_stored_tensors
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.abstract_modules import abstract_model, parameter_shapes
from jaxformer.porting.mapping.plans import plan_import
from parity_tests.families import charlm, encdec, minimal, nanogpt, prepost, unified

pytestmark = pytest.mark.usefixtures("float64")

TORCH_REF = {"vocab_size": 13, "d_model": 24, "num_heads": 4, "num_layers": 2, "context_length": 17}
NANOGPT = {"vocab_size": 13, "n_embd": 24, "n_head": 4, "n_layer": 2, "block_size": 17}
CHARLM = {"embedding_dim": 24, "heads_num": 4, "context_size": 17, "dropout_rate": 0.1}
CHARLM |= {"use_bias": False, "head_size": 6, "layers_num": 2, "vocabulary_size": 13}


def _torch_ref():
    config = torch_ref.config.TransformerLMConfig(**TORCH_REF)
    return torch_ref.transformer_lm.TransformerLM(config)


KNOWN = {
    "prepost attention": (lambda: prepost.MultiHeadAttention(24, 4, 0.1), "prepost"),
    "prepost block": (lambda: prepost.PreNormTransformerBlock(24, 4, 40, 0.1), "prepost"),
    "encdec GPT": (lambda: encdec.GPT(13, 24, 4, 2, 40, 17), "encdec"),
    "encdec Transformer": (lambda: encdec.Transformer(13, 11, 24, 4, 2, 1, 40, 17), "encdec"),
    "charlm": (lambda: charlm.Block(CHARLM), "charlm"),
    "unified": (lambda: unified.Transformer(13, 24, 4, 2, 40, 0.1, 17), "unified"),
    "unified feed-forward": (lambda: unified.SwiGLUFFN(24, 40), "unified"),
    "minimal": (lambda: minimal.TransformerBlock(24, 4, 40), "minimal"),
    "torch.nn": (lambda: torch.nn.MultiheadAttention(24, 4), "torch.nn"),
    "torch_ref": (_torch_ref, "torch_ref"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_module_tells_its_dialect(name):
    make, dialect = KNOWN[name]
    module = make()
    assert detect_dialect(to_stored_tensors(module.state_dict()), module=module).name == dialect


def test_a_config_tells_its_own_class_before_those_that_it_is_derived_from():
    config = SpeechTransformerConfig(
        target_vocab_size=13, d_model=24, num_heads=4, num_encoder_layers=1, num_decoder_layers=1,
        num_features=5, encoder_length=11, context_length=17,
    )  # fmt: skip
    shapes = parameter_shapes(abstract_model(config))
    arrays = {name: StoredTensor.of(np.zeros(shape)) for name, shape in shapes.items()}
    plan = plan_import(arrays, find_dialect("jaxformer"), config=config)
    assert plan.origin.kind == "SpeechTransformer"


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: encdec.MultiHeadAttention(24, 4), "encdec, unified"),
        (lambda: minimal.FeedForward(24, 40), "encdec, minimal"),
    ],
)
def test_a_module_of_which_two_could_be_meant_is_refused(make, names):
    with pytest.raises(UsageError, match=f"may be of {names}: say which with dialect$"):
        from_torch(make())


def test_arrays_and_settings_tell_their_dialect():
    model = nanogpt.GPT(nanogpt.GPTConfig(**NANOGPT, dropout=0.0, bias=False))
    arrays = to_stored_tensors(model.state_dict())
    settings = {**NANOGPT, "dropout": 0.0, "bias": False}
    assert detect_dialect(arrays, config=settings).name == "nanogpt"
    arrays = to_stored_tensors(prepost.MultiHeadAttention(24, 4, 0.1).state_dict())
    settings = {"class": "MultiHeadAttention", "num_heads": 4}
    assert detect_dialect(arrays, config=settings).name == "prepost"
    arrays = to_stored_tensors(_torch_ref().state_dict())
    assert detect_dialect(arrays, config=TransformerLMConfig(**TORCH_REF)).name == "torch_ref"


def test_arrays_that_no_dialect_has_are_refused():
    with pytest.raises(
        UsageError, match=r"no dialect has these arrays.*'a\.b'.*There are jaxformer"
    ):
        from_torch({"a.b": torch.zeros(2, 3)})
    with pytest.raises(UsageError, match="there are none"):
        detect_dialect({})


def test_nothing_is_read_to_tell_the_dialect(monkeypatch):
    module = unified.Transformer(13, 24, 4, 2, 40, 0.1, 17)
    tensors = to_stored_tensors(module.state_dict())
    monkeypatch.setattr(
        "jaxformer.porting.formats.arrays._from_torch", lambda array: pytest.fail("read")
    )
    assert detect_dialect(tensors, module=module).name == "unified"


def test_wrapped_modules_are_unwrapped():
    module = unified.Transformer(13, 24, 4, 2, 40, 0.1, 17)
    wrapped = torch.nn.DataParallel(torch.compile(module, backend="eager"))
    assert all(name.startswith("module._orig_mod.") for name in wrapped.state_dict())
    assert from_torch(wrapped).config == from_torch(module, "unified").config


MIDDLE = "blocks.0."
WRAPPED = {
    "Lightning": lambda name: f"model.{name}",
    "FSDP": lambda name: f"_fsdp_wrapped_module.{name}".replace(
        MIDDLE, f"{MIDDLE}_fsdp_wrapped_module."
    ),
    "checkpointed": lambda name: name.replace(MIDDLE, f"{MIDDLE}_checkpoint_wrapped_module."),
    "compiled": lambda name: name.replace(MIDDLE, f"{MIDDLE}_orig_mod."),
    "averaged": lambda name: f"module._orig_mod.{name}",
    "Lightning, compiled": lambda name: f"model._orig_mod.{name}",
}


def twin_state():
    return _torch_ref().state_dict(), {"class": "TransformerLM", **TORCH_REF}


@pytest.mark.parametrize("wrapper", WRAPPED)
def test_names_lose_what_wrappers_add(wrapper):
    state, config = twin_state()
    wrapped = {WRAPPED[wrapper](name): array for name, array in state.items()}
    if wrapper == "averaged":
        wrapped["n_averaged"] = torch.tensor(3)
    found = to_torch(from_torch(wrapped, "torch_ref", config))
    assert found.keys() == state.keys()
    assert all(np.array_equal(found[name], array.numpy()) for name, array in state.items())


def test_an_attribute_around_the_model_is_named_in_one_line():
    state, config = twin_state()
    wrapped = {f"net.{name}": array for name, array in state.items()}
    with pytest.raises(CheckpointError, match=r"^all names begin with net\., .* of TransformerLM"):
        from_torch(wrapped, "torch_ref", config)


def test_what_lies_beside_the_model_is_left_out_by_its_name():
    state, config = twin_state()
    wrapped = {f"model.{name}": array for name, array in state.items()}
    wrapped["loss.weight"] = torch.ones(3)
    found = to_torch(from_torch(wrapped, "torch_ref", config, ignore=["loss.*"]))
    assert found.keys() == state.keys()
