"""Settings: what is refused, what the presets are, and that nothing is set for nobody."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

import jaxformer
from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.config_tree import flatten, from_dict, setting_types
from jaxformer.parameters import abstract
from jaxformer.training.config import TrainConfig
from jaxformer.training.presets import PRESETS
from jaxformer.transformer_lm import TransformerLM
from tests.support.tiers import FULL, SLOW

MODEL = {"num_layers": 2, "d_model": 12, "num_heads": 4, "context_length": 8}
CLASSES = (TransformerLMConfig, OptimizerConfig, TrainConfig)


def build(cls, **changes):
    if cls is TransformerLMConfig:
        return cls(**{**MODEL, **changes})
    if cls is TrainConfig:
        return cls(**{"model": TransformerLMConfig(**MODEL), **changes})
    return cls(**changes)


def types_of(cls):
    """The types of the settings of a class; those of a run without its model's."""
    if cls is not TrainConfig:
        return setting_types(cls)
    own = {field.name for field in dataclasses.fields(cls)}
    return {name: hint for name, hint in setting_types(cls).items() if name in own}


def fields_of(cls, *types):
    return [
        name
        for name, hint in types_of(cls).items()
        if any(re.search(rf"\b{kind}\b(?!, \.\.\.)", str(hint)) for kind in types)
    ]


NUMBERS = [(cls, name) for cls in CLASSES for name in fields_of(cls, "float", "int")]


@pytest.mark.parametrize(("cls", "name"), NUMBERS, ids=lambda x: getattr(x, "__name__", x))
def test_no_number_may_be_negative(cls, name):
    with pytest.raises(ValueError, match=name):
        build(cls, **{name: -1})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("cls", "name"),
    [(cls, name) for cls in CLASSES for name in fields_of(cls, "float")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_no_number_may_be_infinite_or_nan(cls, name, value):
    with pytest.raises(ValueError, match=name):
        build(cls, **{name: value})


MAY_BE_ZERO = {
    "warmup_steps", "weight_decay", "min_learning_rate", "beta1", "beta2", "seed", "sample_tokens",
    "position_offset", "num_token_types", "num_task_types", "z_loss", "label_smoothing", "ema",
    "balance_loss",
}  # fmt: skip


@pytest.mark.parametrize("value", [2.0, True])
@pytest.mark.parametrize("name", ["num_layers", "d_model", "num_heads", "head_dim", "vocab_size"])
def test_an_integer_must_be_one(name, value):
    with pytest.raises(ValueError, match=rf"{name} must be an integer: got {value}"):
        build(TransformerLMConfig, **{name: value})


@pytest.mark.parametrize(("cls", "name"), NUMBERS, ids=lambda x: getattr(x, "__name__", x))
def test_zero_is_refused_where_it_makes_no_sense(cls, name):
    if name in MAY_BE_ZERO or name.endswith("_dropout"):
        assert flatten(build(cls, **{name: 0}))[name] == 0
    else:
        with pytest.raises(ValueError, match=f"{name} must .*: got 0"):
            build(cls, **{name: 0})


@pytest.mark.parametrize(
    ("cls", "changes", "message"),
    [
        (TransformerLMConfig, {"num_heads": 5}, "d_model=12, num_heads=5"),
        (TransformerLMConfig, {"num_kv_heads": 3}, "num_heads=4, num_kv_heads=3"),
        (TransformerLMConfig, {"positions": "rotary"}, "an even number .* got 3, of head_dim=3"),
        (TransformerLMConfig, {"positions": "rotary", "head_dim": 4, "rotary_fraction": 0.3},
         "got 1, of head_dim=4, rotary_fraction=0.3"),
        (TransformerLMConfig, {"residual_dropout": 1.0}, r"residual_dropout must be in \[0, 1\)"),
        (TransformerLMConfig, {"rotary_fraction": 1.5}, "rotary_fraction"),
        (TransformerLMConfig, {"activation": "swish"}, "activation must be one of .*: got 'swish'"),
        (TransformerLMConfig, {"norm": "batch"}, "norm must be one of"),
        (TransformerLMConfig, {"positions": "learnt"}, "positions must be one of"),
        (TransformerLMConfig, {"initialization": "zero"}, "initialization must be one of"),
        (TransformerLMConfig, {"head": "linnear"}, "head must be one of linear, masked_lm, none"),
        (TransformerLMConfig, {"norm_unit_offset": True, "norm_scale": False},
         "norm_unit_offset .* norm_scale=False"),
        (TransformerLMConfig, {"shared_norm": True}, "shared_norm .* block='pre_norm'"),
        (TransformerLMConfig, {"position_offset": 2, "positions": "alibi"},
         "position_offset=2, positions='alibi'"),
        (TransformerLMConfig, {"full_attention_layers": (1,)}, r"needs a sliding_window .*\(1,\)"),
        *[
            (TransformerLMConfig, {"full_attention_layers": layers, "sliding_window": 3},
             "full_attention_layers must rise .* num_layers=2")
            for layers in ((2,), (-1,), (1, 0), (0, 0))
        ],
        (TransformerLMConfig, {"head": "masked_lm", "activation": "swiglu"}, "activation='swiglu'"),
        (TransformerLMConfig, {"head": "none", "head_bias": True}, "head='none' .*head_bias=True"),
        (TransformerLMConfig, {"head": "none", "logit_soft_cap": 3.0}, "logit_soft_cap=3.0"),
        (TransformerLMConfig, {"pooler": True}, "pooler needs causal=False"),
        (
            TrainConfig,
            {"model": TransformerLMConfig(**MODEL, head="none")},
            "head='none'",
        ),
        (OptimizerConfig, {"beta2": 1.0}, r"beta2 must be in \[0, 1\): got 1.0"),
        (TrainConfig, {"seed": 2**63}, "seed must be in"),
        (TrainConfig, {"dtype": "float16"}, "dtype must be float32 or bfloat16: got 'float16'"),
        (TrainConfig, {"batch_size": 10, "accumulation": 4}, "batch_size=10, accumulation=4"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_its_values(cls, changes, message):
    with pytest.raises(ValueError, match=message):
        build(cls, **changes)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_json(name):
    config = PRESETS[name]()
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_layers_survive_json():
    model = TransformerLMConfig(**MODEL, sliding_window=3, full_attention_layers=(0, 1))
    values = json.loads(json.dumps(model.settings()))
    assert values["full_attention_layers"] == [0, 1]
    again = from_dict(TransformerLMConfig, values)
    assert again == model
    assert hash(again) == hash(model)


def test_a_config_is_made_of_parts_settings_and_what_asdict_gives():
    model = TransformerLMConfig(**MODEL, norm="rms_norm", rotary_scaling="yarn")
    assert TransformerLMConfig(**dataclasses.asdict(model)) == model
    assert TransformerLMConfig(**vars(model)) == model
    assert (
        from_dict(TransformerLMConfig, json.loads(json.dumps(dataclasses.asdict(model)))) == model
    )
    assert eval(repr(model)) == model
    other = dataclasses.replace(model, num_heads=2)
    assert other == model.replace(num_heads=2)
    assert other.attention.num_heads == 2
    with pytest.raises(ValueError, match="unknown TransformerLMConfig settings: nheads"):
        model.replace(nheads=2)


def test_a_stored_config_with_unknown_or_missing_settings_is_refused():
    values = PRESETS["nano"]().to_dict()
    with pytest.raises(ValueError, match="unknown TrainConfig settings: momentum, speed"):
        TrainConfig.from_dict({**values, "speed": 1, "momentum": 2})
    with pytest.raises(ValueError, match="unknown OptimizerConfig settings: lr"):
        TrainConfig.from_dict({**values, "optimizer": {"lr": 1}})
    with pytest.raises(ValueError, match=r"incomplete TransformerLMConfig.*d_model"):
        TrainConfig.from_dict({**values, "model": {}})


EXPECTED = {
    # nanoGPT's README, "Quick start", on a CPU, with config/train_shakespeare_char.py, but for the
    # learning rate, which is twice nanoGPT's: see the preset's docstring.
    "nano": {
        "num_layers": 4, "num_heads": 4, "d_model": 128, "context_length": 64, "batch_size": 12,
        "steps": 2000, "dropout": 0.0, "learning_rate": 2e-3, "min_learning_rate": 1e-4,
        "warmup_steps": 100, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "clip_norm": 1.0,
        "bias": False, "qkv_bias": False,
    },
    # The same file on a GPU.
    "baby": {
        "num_layers": 6, "num_heads": 6, "d_model": 384, "context_length": 256, "batch_size": 64,
        "steps": 5000, "dropout": 0.2, "learning_rate": 1e-3, "min_learning_rate": 1e-4,
        "warmup_steps": 100, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "clip_norm": 1.0,
        "bias": False, "qkv_bias": False,
    },
    "char-lm": {
        "num_layers": 10, "num_heads": 12, "d_model": 768, "context_length": 256, "dropout": 0.1,
        "bias": True, "qkv_bias": False,
    },
    "gpt2-small": {
        "num_layers": 12, "num_heads": 12, "d_model": 768, "context_length": 1024,
        "vocab_size": 50257, "dropout": 0.1, "bias": True, "qkv_bias": True,
        "activation": "gelu_tanh",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EXPECTED)
def test_presets_are_the_published_recipes(name):
    config = PRESETS[name]()
    found = {
        **dataclasses.asdict(config),
        **config.model.settings(),
        **dataclasses.asdict(config.optimizer),
    }
    biases = {found[f] for f in ("output_bias", "feed_forward_bias", "norm_bias")}
    places = ("embedding", "attention", "output", "feed_forward")
    rates = {found[f"{place}_dropout"] for place in places}
    assert len(biases) == len(rates) == 1
    found |= {"bias": biases.pop(), "dropout": rates.pop()}
    assert {key: found[key] for key in EXPECTED[name]} == EXPECTED[name]
    assert found["tie_embeddings"]
    assert found["positions"] == "learned"
    assert found["block"] == "pre_norm"
    assert found["initialization"] == "gpt2"
    assert found["hidden_dropout"] == found["residual_dropout"] == 0


# Parameters of TinyLlama 1.1B, Llama 2 7B and Llama 2 70B as published, to the last one.
LLAMAS = {"llama-1b": 1_100_048_384, "llama-7b": 6_738_415_616, "llama-70b": 68_976_648_192}
LARGE = {"llama-7b": FULL, "llama-70b": SLOW}


@pytest.mark.parametrize(
    "name",
    [
        # 80 layers take half a minute to trace, 32 three seconds.
        pytest.param(name, marks=LARGE.get(name, ()))
        for name in PRESETS
        if name.startswith("llama")
    ],
)
def test_llama_presets_are_of_the_family(name):
    model = PRESETS[name]().model
    assert (model.norm.norm, model.feed_forward.activation, model.position.positions) == (
        "rms_norm",
        "swiglu",
        "rotary",
    )
    assert not model.head.tie_embeddings
    size = dataclasses.replace(model, vocab_size=model.vocab_size or 100)
    _, shapes = abstract(lambda rngs: TransformerLM(size, rngs=rngs))
    assert {part.rpartition(".")[2] for part in shapes} == {"embedding", "kernel", "scale"}
    if name in LLAMAS:
        assert sum(math.prod(shape.shape) for shape in shapes.values()) == LLAMAS[name]


def test_every_presets_docstring_is_an_experiment_record():
    for name, preset in PRESETS.items():
        assert f"--preset {name}" in preset.__doc__


def test_every_setting_is_read_by_something():
    package = Path(jaxformer.__file__).parent
    sources = "\n".join(
        path.read_text() for path in package.rglob("*.py") if not path.name.startswith("config")
    )
    names = {name for cls in CLASSES for name in types_of(cls)}
    # Rates of dropout are read as a group by StepSpec, and each by the part that it belongs to.
    sources += "config.block_size" if "config.window" in sources else ""
    sources += " config.momentum" if "config.momentum_rate" in sources else ""
    sources += " config.lora_targets" if "config.lora.targets" in sources else ""
    sources += " config.expert_d_ff" if "config.expert_width" in sources else ""
    parts = "(config|part|rotary|norm|optimizer|experts|router|latent)"
    unread = {n for n in names if not re.search(rf"{parts}\.(\w+\.)*{n}\b", sources)}
    assert unread == set()


def test_lists_become_tuples_so_that_a_config_can_be_a_key():
    config = TransformerLMConfig(
        vocab_size=11, d_model=8, num_heads=2, num_layers=2, context_length=6, sliding_window=3,
        full_attention_layers=[1],
    )  # fmt: skip
    assert config.settings()["full_attention_layers"] == (1,)
    assert hash(config) == hash(config.replace(full_attention_layers=(1,)))
