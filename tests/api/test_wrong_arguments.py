"""Wrong arguments of the Python API: each gives one line that says what is wrong."""

from pathlib import Path

import numpy as np
import pytest
import torch
from flax import nnx

import jaxformer as jf
from jaxformer.errors import JaxformerError, UsageError

CONFIG = jf.TransformerLMConfig(
    vocab_size=11, num_layers=1, d_model=16, num_heads=2, context_length=8
)


@pytest.fixture(scope="module")
def model():
    module = jf.TransformerLM(CONFIG, rngs=nnx.Rngs(0))
    return jf.Model(module, jf.CharTokenizer("abcdefghijk"))


@pytest.fixture(scope="module")
def outsider(model):
    """A model whose tokenizer has more tokens than it."""
    return jf.Model(model.module, jf.CharTokenizer("abcdefghijklmnopqrstuvwxyz"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"foo": 1}, "foo is no option of load: there are dialect, config"),
        ({"ignored": ["x"]}, r"ignored is no option of load \(did you mean ignore\?\)"),
        ({"ignore": "foo"}, "ignore must be a list of names: got str"),
        ({"ignore": [3]}, "ignore must be a list of names: got int"),
        ({"config": [1]}, "config must be settings by name.*: got list"),
        ({"meta": 3}, "meta must be the path of a file or a folder: got int"),
        ({"base": 3}, "base must be the path of a file or a folder: got int"),
    ],
)
def test_load_says_which_option_is_wrong(tmp_path, options, message):
    with pytest.raises(UsageError, match=message):
        jf.load(tmp_path, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: jf.load(3), "path must be the path of a file or a folder: got int"),
        (lambda m: jf.Model(m.module, "abc"), "tokenizer must be a CharTokenizer or .*: got str"),
        (lambda m: m.generate("a", foo=1), "foo is no option of generate: there are temp"),
        (lambda m: m.generate([1], unknown="skip"), "unknown is no option of generate: there"),
        (lambda m: m.generate([[1, 2], [3]]), "one length: generate_many takes those of several"),
        (lambda m: m.generate("a", draft=m.module), "draft must be a Model: got TransformerLM"),
        (lambda m: m.stream([1]), "prompt must be a text: got list"),
        (lambda m: m.generate_many("abc", 3), "prompts must be a list of texts.*: got str"),
        (lambda m: m.generate_many(3, 3), "prompts must be a list of texts.*: got int"),
        (lambda m: m.generate_many(["a"], draft=m), "draft is no option of generate_many"),
        (lambda m: m.save(3), "path must be the path of a file or a folder: got int"),
        (lambda m: m.attention([1, 2]), "text must be a text: got list"),
        (lambda m: m.attention("ab", head="x"), r"head must be in \[0, 2\), mean or all: got 'x'"),
        (lambda m: m.attention("ab", layer=0.5), r"layer must be in \[0, 1\): got 0.5"),
        (lambda m: m.narrowing_cost("int8", 3), r"integer ids \(T,\): got int64 with shape \(\)"),
        (lambda m: jf.from_torch(torch.nn.Linear), "give a torch.nn.Module.*: got type"),
        (lambda m: jf.from_torch({3: np.zeros(3)}), "arrays are given by name: 3 is no name"),
        (lambda m: jf.from_torch(torch.nn.LayerNorm(3), ignore="x"), "a list of names: got str"),
        (lambda m: jf.from_torch(torch.nn.LayerNorm(3), config=3), "config must be .*: got int"),
        (
            lambda m: jf.from_torch(torch.nn.LayerNorm(3, device="meta")),
            "weight is on PyTorch's meta device",
        ),
        (
            lambda m: jf.from_torch({"weight": torch.eye(3).to_sparse()}),
            "weight is a sparse tensor: call its to_dense",
        ),
    ],
)
def test_an_argument_of_another_kind_is_named(model, call, message):
    with pytest.raises(UsageError, match=message):
        call(model)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.generate("a", temperature="x"), "temperature must be a number: got 'x'"),
        (lambda m: m.generate("a", top_p="x"), "top_p must be a number: got 'x'"),
        (lambda m: m.tokenizer.encode(3), "characters are those of a text: got int"),
        (lambda m: m.module(np.zeros((1, 0), int)), r"B, T >= 1: got shape \(1, 0\)"),
        (lambda m: m.module(np.zeros((0, 3), int)), r"B, T >= 1: got shape \(0, 3\)"),
        (lambda m: jf.make_optimizer(3), "config must be an OptimizerConfig: got int"),
        (lambda m: jf.seed_dropout(m.module, 3), r"pass key=jax.random.key\(3\)"),
        (
            lambda m: jf.cross_entropy(np.zeros((2, 3, 5)), np.zeros((2, 4), int)),
            r"logits without classes, \(2, 3\): got \(2, 4\)",
        ),
        (
            lambda m: jf.batch_at(jf.TokenIdsDataset(np.arange(9), 4), 0, 0, 0),
            "batch_size must be at least 1: got 0",
        ),
    ],
)
def test_a_value_out_of_its_range_is_named(model, call, message):
    with pytest.raises(ValueError, match=message):
        call(model)


def test_many_prompts_may_come_one_by_one(model):
    texts = dict(model.generate_many((text for text in ("ab", "c")), 3, greedy=True))
    assert texts == {
        0: model.generate("ab", 3, greedy=True),
        1: model.generate("c", 3, greedy=True),
    }


@pytest.mark.parametrize(
    "call",
    [
        lambda m, text: m.attention(text),
        lambda m, text: m.narrowing_cost("int8", text, tokens=1),
        lambda m, text: m.narrowing_cost("int8", [0, 25], tokens=1),
    ],
)
def test_ids_outside_the_vocabulary_are_not_inspected(outsider, call):
    with pytest.raises(
        UsageError, match="has id 25, which is outside the model's vocabulary of 11"
    ):
        call(outsider, "az")
    with pytest.raises(UsageError, match="has id -1, which is outside"):
        outsider.narrowing_cost("int8", [0, -1])


@pytest.mark.parametrize("name", ["model", "model.pt"])
def test_an_unknown_format_is_not_another_one(model, tmp_path, name):
    with pytest.raises(
        UsageError, match=r"format must be one of torch, jax, .*: got 'safetensors'"
    ):
        model.save(tmp_path / name, "safetensors")
    assert not (tmp_path / name).exists()


def test_saving_below_a_file_says_so(model, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(jf.errors.ResourceError, match=r"could not write .*: Not a directory"):
        model.save(tmp_path / "file" / "model.pt")


@pytest.mark.parametrize("config", [CONFIG, {"d_model": 16}, 3])
def test_training_takes_no_settings_of_another_kind(tmp_path, config):
    with pytest.raises(UsageError, match=r"config must be a TrainConfig, the name of a preset or"):
        jf.train(config, tmp_path / "run")
    with pytest.raises(UsageError, match=r"config=.*no.toml: No such file"):
        jf.train(tmp_path / "no.toml", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"out": 3}, "out must be the path of a file or a folder: got int"),
        ({"trackers": 3}, "trackers must be a list of names: got int"),
        ({"init_from": 3}, "init_from must be the path of a file or a folder: got int"),
        ({"init_from": "x", "ignore": "y"}, "ignore must be a list of names: got str"),
        ({"config": jf.TrainConfig, "resume": True}, "config must be a TrainConfig, the name"),
        ({"config": jf.presets.nano(), "resume": True}, "from the run's folder: leave out config"),
        ({"config": Path("x.toml"), "resume": True}, "from the run's folder: leave out config"),
        ({"config": "x.toml", "resume": True}, "from the run's folder: leave out config"),
        ({"config": "nano", "out": "x", "resume": True}, "the run's folder: leave out config"),
        ({"config": "nano", "resume": True}, "runs/nano holds no run"),
        ({"config": "x.toml"}, "^config=x.toml: No such file"),
        ({"config": "runs/x"}, "config=runs/x is unknown: .*, or name a .toml file of settings"),
        ({"out": ""}, "out must name a folder: got ''"),
        ({"out": "x\udcff"}, r"out must be a name in UTF-8: got b'x\\xff'"),
        ({"cast": True}, "cast goes with init_from or resume: a new run has no arrays"),
        ({"meta": "x"}, "meta goes with init_from: a new run has tokenizer"),
        ({"ignore": ["x"]}, "ignore goes with init_from$"),
        ({"lora_alpha": 4.0}, "lora_alpha has no effect without lora_rank$"),
        ({"decay_share": 0.5}, "decay_share has no effect but with schedule=wsd$"),
        ({"encoding": "latin99"}, "encoding has no effect but on a text file$"),
        ({"data": ""}, "data must name a corpus, a text file or a folder of tokens: got ''"),
        ({"data": "no-such"}, "^data=no-such: does not exist; known names are"),
        ({"devices": 9}, "^devices=9: this process has 8"),
        ({"lerning_rate": 0.1}, r"settings: lerning_rate \(did you mean learning_rate\?\)$"),
    ],
)
def test_training_says_which_argument_is_wrong(options, message):
    with pytest.raises(JaxformerError, match=message):
        jf.train(**options)


@pytest.mark.tier("full")
def test_a_run_begins_with_the_settings_of_a_file(tmp_path):
    (tmp_path / "text").write_text("the cat sat on the mat. " * 40)
    sizes = {"num_layers": 1, "d_model": 16, "num_heads": 2, "block_size": 8}
    common = {"data": str(tmp_path / "text"), "steps": 2, "batch_size": 8, "eval_interval": 2}
    first = jf.train("nano", tmp_path / "first", **sizes, **common)
    again = jf.train(str(tmp_path / "first" / "config.toml"), tmp_path / "again")
    assert again.config == first.config
    assert again.train_loss == first.train_loss
    with pytest.raises(UsageError, match=r"run: continue it with resume, or give another out$"):
        jf.train("nano", tmp_path / "again", **sizes, **common)
    with pytest.raises(UsageError, match=r"trackers must be of tensorboard.*: got 'x'"):
        jf.train("nano", tmp_path / "third", trackers=["x"], **sizes, **common)
