"""Adapters: trained alone, merged, and the same numbers as those of the package ``peft``."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx
from safetensors.numpy import load_file

import torch_ref.adapters
import torch_ref.config
import torch_ref.train_step
import torch_ref.transformer_lm
from jaxformer.adapters import add_adapters, is_adapter, merge_adapters, trained_parameters
from jaxformer.api.model import Model
from jaxformer.cli.main import main
from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.feed_forward import FeedForward
from jaxformer.parameters import get_parameters, merge, set_parameters, split
from jaxformer.porting import export_arrays
from jaxformer.porting.api import build
from jaxformer.porting.checkpoint import open_checkpoint
from jaxformer.porting.peft import has_adapters, merge_plan
from jaxformer.train_step import TrainState, language_model_loss, train_step
from jaxformer.training.state_arrays import moments_of
from jaxformer.transformer_lm import TransformerLM
from parity_tests.harness import perturbed
from parity_tests.twins import copy_to_torch
from tests.support.tiers import FULL

peft = pytest.importorskip("peft")
# PEFT asks transformers by a name that is going away.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

CONFIG = TransformerLMConfig(
    vocab_size=29, context_length=13, d_model=24, num_layers=2, num_heads=3, d_ff=40, lora_rank=5,
    lora_alpha=7.0, lora_targets="q_proj,v_proj,down_proj",
)  # fmt: skip
OPTIMIZER = OptimizerConfig(warmup_steps=5, decay_steps=50, learning_rate=1e-2, clip_norm=0.5)
MERGED = CONFIG.replace(lora_rank=None)


def windows(number, vocabulary=29, length=13):
    ids = np.random.default_rng(number).integers(0, vocabulary, (1, 4, length + 1))
    return ids[..., :-1], ids[..., 1:]


@pytest.fixture
def pair():
    module = TransformerLM(CONFIG, rngs=nnx.Rngs(0))
    set_parameters(module, perturbed(module))
    twin = torch_ref.transformer_lm.TransformerLM(
        torch_ref.config.TransformerLMConfig(**CONFIG.settings())
    )
    copy_to_torch(module, twin)
    return module, twin


def test_fifty_steps_change_the_same_adapters_alone(pair):
    module, twin = pair
    definition, parameters = split(module)
    config = torch_ref.config.OptimizerConfig(**dataclasses.asdict(OPTIMIZER))
    state = TrainState.create(parameters, OPTIMIZER)
    torch_state = torch_ref.train_step.TrainState.create(twin, config)
    step = jax.jit(functools.partial(train_step, definition=definition, optimizer=OPTIMIZER))
    for number in range(50):
        batch = windows(number)
        state, metrics = step(state, batch, None)
        torch_state, expected = torch_ref.train_step.train_step(
            torch_state, tuple(map(torch.from_numpy, batch)), optimizer=config
        )
        for name, value in expected.items():
            np.testing.assert_allclose(metrics[name], value, rtol=0, atol=1e-11, err_msg=name)
    names = {name for name in parameters if is_adapter(name)}
    assert len(names) == 2 * 2 * 3
    for kept in moments_of(state.optimizer_state).values():
        assert set(kept) == names
    found = {name: p.detach().numpy() for name, p in twin.named_parameters()}
    for name, value in state.parameters.items():
        if name in names:
            assert np.abs(value - parameters[name]).max() > 1e-4
        else:
            np.testing.assert_array_equal(value, parameters[name])
    for name, value in export_arrays(state.parameters).items():
        np.testing.assert_allclose(value, found[name], rtol=0, atol=1e-11, err_msg=name)


def test_merged_equals_unmerged(pair):
    module, twin = pair
    inputs, _ = windows(3)
    module.eval()
    scale = CONFIG.lora.lora_alpha / CONFIG.lora.lora_rank
    logits = module(inputs[0])
    merged = TransformerLM(MERGED, rngs=nnx.Rngs(0))
    set_parameters(merged, merge_adapters(get_parameters(module), scale))
    np.testing.assert_allclose(merged(inputs[0]), logits, rtol=0, atol=1e-12)
    torch_merged = torch_ref.transformer_lm.TransformerLM(
        torch_ref.config.TransformerLMConfig(**MERGED.settings())
    ).double()
    weights = torch_ref.adapters.merge_adapters(dict(twin.named_parameters()), scale)
    torch_merged.load_state_dict(weights)
    with torch.no_grad():
        expected = torch_merged(torch.from_numpy(inputs[0]))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-12)


def test_new_adapters_change_nothing():
    plain = FeedForward(7, 11, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 7)))
    before, parameters = plain(x), get_parameters(plain)
    add_adapters(plain, ["up_proj"], rank=3, alpha=5.0, dropout=0.0, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(plain(x), before)
    after = get_parameters(plain)
    assert after.keys() - parameters.keys() == {
        "up_proj.lora_a.kernel", "up_proj.lora_b.kernel"
    }  # fmt: skip
    assert set(trained_parameters(after)) == after.keys() - parameters.keys()
    assert trained_parameters(parameters) is parameters


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora_targets": "q_proj,nothing"}, "lora_targets must be some of q_proj, k_proj"),
        ({"lora_targets": "q_proj,q_proj"}, "lora_targets must be some of"),
        ({"lora_targets": "gate_proj"}, "a feed-forward that is not gated"),
        ({"lora_rank": 0}, "lora_rank must be positive"),
        ({"lora_alpha": 0.0}, "lora_alpha must be positive"),
    ],
)
def test_settings_that_make_no_adapter(settings, words):
    with pytest.raises(ValueError, match=words):
        CONFIG.replace(**settings)


@pytest.fixture(scope="module")
def peft_model(tmp_path_factory):
    """An OPT in float64 with an adapter that is not at its beginning, and the two folders."""
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=29, hidden_size=24, ffn_dim=40, num_hidden_layers=2, num_attention_heads=3,
        max_position_embeddings=20, word_embed_proj_dim=24, dropout=0.0, attention_dropout=0.0,
        attn_implementation="sdpa", bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("peft")
    base = transformers.OPTForCausalLM(config).double()
    base.save_pretrained(folder / "base")
    lora = peft.LoraConfig(
        r=5, lora_alpha=7, target_modules=["q_proj", "v_proj", "fc1"], task_type="CAUSAL_LM"
    )
    # PEFT keeps adapters in float32 unless it is told not to.
    model = peft.get_peft_model(base, lora, autocast_adapter_dtype=False).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    model.peft_config["default"].base_model_name_or_path = str(folder / "base")
    model.save_pretrained(folder / "adapter")
    return model, folder


def peft_name(name):
    """The name that PEFT has for a parameter of an adapter here."""
    owner, matrix, _ = name.rsplit(".", 2)
    _, layer, _, module = owner.split(".")
    module = {"up_proj": "fc1"}.get(module, f"self_attn.{module}")
    prefix = f"base_model.model.model.decoder.layers.{layer}"
    return f"{prefix}.{module}.lora_{matrix[-1].upper()}.default.weight"


@pytest.mark.tier("full")
def test_forward_gradients_and_fifty_steps_are_pefts(peft_model):
    model, folder = peft_model
    module = build(open_checkpoint(folder / "adapter").plan())
    assert module.config.lora.lora_targets == "q_proj,v_proj,up_proj"
    definition, parameters = split(module)
    assert {str(p.dtype) for p in parameters.values()} == {"float64"}
    inputs, targets = windows(1)
    module.eval()
    with torch.no_grad():
        expected = model(torch.from_numpy(inputs[0])).logits.numpy()
    scale = np.abs(expected).max()
    np.testing.assert_allclose(module(inputs[0]), expected, rtol=0, atol=1e-12 * scale)

    def loss(trained):
        weights = {**parameters, **trained}
        return language_model_loss(definition, weights, inputs[0], targets[0], None)

    def torch_loss(inputs, targets):
        logits = model(torch.from_numpy(inputs[0])).logits
        wanted = torch.from_numpy(targets[0]).flatten()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted)

    adapters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    value, gradients = jax.value_and_grad(loss)(trained_parameters(parameters))
    torch_value = torch_loss(inputs, targets)
    torch_value.backward()
    assert {peft_name(name) for name in gradients} == adapters.keys()
    np.testing.assert_allclose(value, torch_value.detach(), rtol=0, atol=1e-12)
    for name, gradient in gradients.items():
        found = adapters[peft_name(name)].grad.numpy().T
        np.testing.assert_allclose(gradient, found, rtol=0, atol=1e-12, err_msg=name)

    config = OptimizerConfig(
        learning_rate=1e-3, warmup_steps=0, schedule="constant", clip_norm=None, weight_decay=0.1
    )
    optimizer = torch.optim.AdamW(
        adapters.values(), lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1
    )
    state = TrainState.create(parameters, config)
    step = jax.jit(functools.partial(train_step, definition=definition, optimizer=config))
    model.train()
    for number in range(50):
        batch = windows(number)
        state, metrics = step(state, batch, None)
        optimizer.zero_grad()
        torch_value = torch_loss(*batch)
        torch_value.backward()
        optimizer.step()
        np.testing.assert_allclose(metrics["train_loss"], torch_value.detach(), rtol=0, atol=1e-12)
    for name, value in trained_parameters(state.parameters).items():
        found = adapters[peft_name(name)].detach().numpy().T
        np.testing.assert_allclose(value, found, rtol=0, atol=1e-12, err_msg=name)
        assert np.abs(value - parameters[name]).max() > 1e-3
    merged = model.merge_and_unload()
    own = merge_adapters(state.parameters, CONFIG.lora.lora_alpha / 5)
    plain = TransformerLM(module.config.replace(lora_rank=None), rngs=nnx.Rngs(0))
    set_parameters(plain, own)
    plain.eval()
    with torch.no_grad():
        expected = merged(torch.from_numpy(inputs[0])).logits.numpy()
    np.testing.assert_allclose(plain(inputs[0]), expected, rtol=0, atol=1e-12 * scale)
    unmerged = merge(definition, state.parameters)
    unmerged.eval()
    np.testing.assert_allclose(unmerged(inputs[0]), expected, rtol=0, atol=1e-12 * scale)


SIZES = {"vocab_size": 29, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
BASES = {
    # Its linear layers are (in, out), and three of them one after the other.
    "gpt2": (
        transformers.GPT2Config(
            vocab_size=29, n_positions=20, n_embd=24, n_layer=2, n_head=3, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=2,
        ),
        ["c_attn", "c_proj"],
    ),
    # Three layers head by head.
    "neox": (
        transformers.GPTNeoXConfig(
            **SIZES, intermediate_size=40, max_position_embeddings=20, bos_token_id=1,
            eos_token_id=2, hidden_dropout=0.0, attention_dropout=0.0,
        ),
        ["query_key_value", "dense_4h_to_h"],
    ),
}  # fmt: skip


def weights_of(folder):
    """The weights of a model, with its adapters merged."""
    plan = open_checkpoint(folder).plan()
    plan = merge_plan(plan) if has_adapters(plan) else plan
    return {name: tensor.read() for name, tensor in plan.tensors.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-12, err_msg=name)


def merge_with_peft(model, folder):
    """Saves what PEFT makes of a model and its adapters; returns its weights."""
    model.merge_and_unload().save_pretrained(folder)
    return weights_of(folder)


@pytest.fixture(params=["gpt2", pytest.param("neox", marks=FULL)])
def fused(request, tmp_path):
    """A model that holds several layers in one array, with an adapter, and their folder."""
    torch.manual_seed(0)
    config, targets = BASES[request.param]
    base = transformers.AutoModelForCausalLM.from_config(config).double()
    base.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(
        r=5, lora_alpha=7, target_modules=targets, task_type="CAUSAL_LM", use_rslora=True,
        fan_in_fan_out=request.param == "gpt2",
    )  # fmt: skip
    model = peft.get_peft_model(base, lora, autocast_adapter_dtype=False).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    return model, tmp_path


def test_an_adapter_of_several_layers_in_one_is_carried(fused):
    model, folder = fused
    merged = merge_with_peft(model, folder / "merged")
    assert_same(weights_of(folder / "adapter"), merged)
    # As it came, every bit of it.
    run, back = folder / "run", folder / "back"
    assert main(["port", str(folder / "adapter"), str(run)]) == 0
    assert main(["port", str(run), str(back), "--to", "peft"]) == 0
    one, two = (load_file(p / "adapter_model.safetensors") for p in (folder / "adapter", back))
    assert one.keys() == two.keys()
    assert all(np.array_equal(value, two[name]) for name, value in one.items())
    assert_same(weights_of(back), merged)


def test_adapters_of_some_layers_in_one_are_written_as_one(fused):
    """PEFT computes with them what the model here does, and they can be read again."""
    _, folder = fused
    plain = build(open_checkpoint(folder / "base").plan())
    config = plain.config.replace(lora_rank=3, lora_alpha=4.0, lora_targets="v_proj,q_proj,up_proj")
    module = TransformerLM(config, rngs=nnx.Rngs(0))
    drawn = np.random.default_rng(0)
    parameters = {
        name: drawn.standard_normal(value.shape) if is_adapter(name) else value
        for name, value in (get_parameters(module) | get_parameters(plain)).items()
    }
    set_parameters(module, parameters)
    expected = {name: np.asarray(v) for name, v in merge_adapters(parameters, 4.0 / 3).items()}
    file, out = folder / "module.safetensors", folder / "out"
    Model(module).save(file)
    assert main(["port", str(file), str(out), "--to", "peft"]) == 0
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
    model = peft.PeftModel.from_pretrained(base, out, autocast_adapter_dtype=False)
    assert_same(merge_with_peft(model, folder / "merged"), expected)
    settings = json.loads((out / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (6, 8.0)
    (out / "adapter_config.json").write_text(
        json.dumps(settings | {"base_model_name_or_path": str(folder / "base")})
    )
    assert_same(weights_of(out), expected)
