"""Classes of transformers that classify: scores, gradients, arrays and settings, there and back."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

import jaxformer as jf
from jaxformer.cli.main import main
from jaxformer.errors import UsageError
from jaxformer.parameters import merge, split
from jaxformer.porting import export_arrays, from_torch, to_torch
from jaxformer.porting.api import export_plan
from jaxformer.porting.dialects.common.transformers_types import TRANSFORMERS_TYPES
from tests.support.hugging_face.building import build, randomize
from tests.support.hugging_face.cases import CASES
from tests.support.hugging_face.precision import in_float64
from tests.support.hugging_face.running import assert_close, bits_of
from tests.support.tiers import SLOW, full_except

TASKS = (
    "SequenceClassification", "TokenClassification", "QuestionAnswering", "MultipleChoice",
)  # fmt: skip
LENGTH, VOCAB = 23, 37
# Encoders and decoders, whose texts end with the end token.
PAIRS = ("bart", "mbart", "t5", "mt5", "umt5")
LABELS = {0: "sad", 1: "glad", 2: "mad"}
# Of three texts, so many places at the end.
PADDING = np.array([0, 5, 3])
DEFAULT = {("bert", "SequenceClassification"), ("distilbert", "QuestionAnswering")}
OTHER_LAYERS = {"albert", "bert", "deberta-v2", "distilbert", "electra", "modernbert", "mpnet",
                "roberta", "roformer"}  # fmt: skip
FOLDERS = {("roberta", "SequenceClassification"), ("llama", "QuestionAnswering")}


def first_cases():
    """A configuration of each type that reads texts and may have heads for tasks."""
    found = {}
    for case in CASES.values():
        has_tasks = len(TRANSFORMERS_TYPES[case.dialect].classes) > 1
        if has_tasks and not case.arguments and not case.ignore:
            found.setdefault(case.dialect, case)
    # The class of a config, unlike that of a model, is imported without what computes.
    has_two_stacks = {d: transformers.CONFIG_MAPPING[d]().is_encoder_decoder for d in found}
    return {d: case for d, case in found.items() if d in PAIRS or not has_two_stacks[d]}


FIRST = first_cases()
# By their names: to ask for a class imports the module of its models.
CLASSES = set(dir(transformers))
KINDS = [
    (dialect, task)
    for dialect in FIRST
    for task in TASKS
    if dialect not in PAIRS and f"{TRANSFORMERS_TYPES[dialect].classes[1][:-5]}For{task}" in CLASSES
]


def make(dialect, task, **more):
    case = FIRST[dialect]
    settings = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, **case.settings}
    settings |= {"pad_token_id": 0, "classifier_dropout": 0.25}
    if dialect in PAIRS:
        settings |= {"eos_token_id": END, "decoder_start_token_id": BEGIN}
    if task in ("SequenceClassification", "TokenClassification"):
        settings["id2label"] = LABELS
    if dialect == "modernbert":
        settings |= {"classifier_pooling": "mean", "classifier_bias": True}
    if (dialect, task) == ("roformer", "MultipleChoice"):
        # Its padding is scored: PyTorch would leave its row out of the gradient.
        settings["pad_token_id"] = None
    kind = f"{TRANSFORMERS_TYPES[dialect].classes[1].removesuffix('Model')}For{task}"
    model = build(kind, {**settings, **more}, attention=case.attention).double()
    return randomize(model, case.std, case.embeddings)


PAIR_KINDS = [(dialect, task) for dialect in PAIRS for task in TASKS[::2]]
# Tokens are classified by the encoder alone.
PAIR_KINDS += [(dialect, "TokenClassification") for dialect in PAIRS if "t5" in dialect]
KINDS += PAIR_KINDS
OTHER_LAYERS |= {"bart", "t5", "umt5"}
# Of each type with layers of another kind one task; each task is there.
IN_FULL = {
    (dialect, of_dialect[number % len(of_dialect)])
    for number, dialect in enumerate(sorted(OTHER_LAYERS))
    for of_dialect in [[task for other, task in KINDS if other == dialect]]
}
END, BEGIN = 36, 2


def inputs(task, dialect=None):
    ids, is_token = _inputs(task)
    if dialect in PAIRS:
        ids[ids == END] = END - 1
        ids[np.arange(3), LENGTH - 1 - PADDING] = END
    return ids, is_token


def _inputs(task):
    shape = (3, 4, LENGTH) if task == "MultipleChoice" else (3, LENGTH)
    ids = np.random.default_rng(3).integers(3, VOCAB, shape)
    is_token = np.arange(LENGTH) < (LENGTH - PADDING)[:, None]
    is_token = np.broadcast_to(is_token if len(shape) == 2 else is_token[:, None], shape).copy()
    return np.where(is_token, ids, 0), is_token


def source_scores(source, ids, is_token):
    result = source(torch.as_tensor(ids), attention_mask=torch.as_tensor(is_token).long())
    if "logits" in result:
        return result.logits
    return torch.stack((result.start_logits, result.end_logits), dim=-1)


def scores(model, ids, is_token, dialect=None):
    if isinstance(model, jf.EncoderDecoderClassifier):
        # mBART's texts end with their language, with which its targets begin.
        last = ids[np.arange(len(ids)), is_token.sum(axis=1) - 1][:, None]
        begin = last if dialect == "mbart" else np.full((len(ids), 1), BEGIN)
        target = np.concatenate((begin, ids[:, :-1]), axis=1)
        mask = jnp.asarray(is_token)[:, None, None, :]
        return model(jnp.asarray(ids), jnp.asarray(target), mask, None, mask)
    run = model.choose if ids.ndim == 3 else model
    return run(jnp.asarray(ids), jnp.asarray(is_token)[..., None, None, :])


@pytest.mark.parametrize(
    ("dialect", "task"),
    full_except(
        full_except(KINDS, lambda *kind: kind in IN_FULL | DEFAULT, SLOW),
        lambda dialect, task: (dialect, task) in DEFAULT,
    ),
)
def test_a_class_computes_what_transformers_computes(dialect, task, float64):
    check_equal(dialect, task)


@pytest.mark.parametrize(
    "settings",
    full_except(
        [
            {"summary_type": "first", "summary_use_proj": True, "summary_activation": "tanh"},
            {"summary_type": "mean", "summary_use_proj": True},
            {"summary_type": "cls_index", "hidden_act": "relu", "num_attention_heads": 3},
            {"summary_type": "last", "summary_use_proj": True, "summary_activation": "silu"},
        ],
        lambda settings: settings["summary_type"] == "mean",
    ),
    ids=lambda settings: settings["summary_type"],
)
@pytest.mark.parametrize("dialect", full_except(["roformer", "electra"], lambda d: d == "roformer"))
def test_choices_are_scored_by_any_summary(dialect, settings, float64):
    check_equal(dialect, "MultipleChoice", **settings, pad_token_id=None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"summary_type": "attn"}, "summary_type must be one of first, last, mean, cls_index"),
        ({"summary_activation": "tanh"}, "summary_activation must be null without summary_use_"),
        ({"summary_use_proj": True, "summary_proj_to_labels": True}, "summary_proj_to_labels must"),
    ],
)
def test_other_summaries_are_rejected(settings, words):
    source = make("roformer", "MultipleChoice")
    vars(source.config).update(settings)
    with pytest.raises(UsageError, match=words):
        from_torch(source)


def check_equal(dialect, task, **settings):
    """Scores and gradients are those of transformers, and arrays come back bit for bit."""
    ids, is_token = inputs(task, dialect)
    counts = is_token if task in ("TokenClassification", "QuestionAnswering") else slice(None)
    with in_float64():
        source = make(dialect, task, **settings)
        model = from_torch(source)
        has_decoder = dialect in PAIRS and task != "TokenClassification"
        assert type(model) is (
            jf.EncoderDecoderClassifier if has_decoder else jf.TransformerClassifier
        )
        expected = source_scores(source, ids, is_token)[counts]
        weights = np.random.default_rng(5).standard_normal(expected.shape)
        (expected * torch.as_tensor(weights)).sum().backward()
        definition, parameters = split(model)

        def total(parameters):
            found = scores(merge(definition, parameters), ids, is_token, dialect)[counts]
            return jnp.sum(found * weights), found

        gradients, found = jax.jit(jax.grad(total, has_aux=True))(parameters)
        assert found.std() > 1e-3
        assert_close(found, expected.detach(), 1e-12)
        names = export_plan(model, dialect, gradients).tensors
    trained = {n: p.grad.numpy() for n, p in source.named_parameters() if p.grad is not None}
    largest = max(np.abs(gradient).max() for gradient in trained.values())
    for name, gradient in trained.items():
        assert np.abs(names[name].read() - gradient).max() <= 1e-12 * largest, name
    assert bits_of(to_torch(model, dialect)) == bits_of(source.state_dict())
    if task in ("SequenceClassification", "TokenClassification"):
        assert model.config.classifier.labels == tuple(LABELS.values())


@pytest.mark.parametrize(
    ("dialect", "task"),
    full_except(
        # RoFormer's table of sines comes back computed anew.
        [kind for kind in KINDS if kind[0] != "roformer"],
        lambda dialect, task: (dialect, task) in FOLDERS,
        SLOW,
    ),
)
def test_a_folder_comes_back_with_its_labels_and_rates(dialect, task, tmp_path, capsys):
    source = make(dialect, task).float()
    source.save_pretrained(tmp_path / "folder")
    assert main(["port", str(tmp_path / "folder"), str(tmp_path / "run"), "--to", "jax"]) == 0
    assert main(["port", str(tmp_path / "run"), str(tmp_path / "back"), "--to", "hf"]) == 0
    capsys.readouterr()
    back, about = type(source).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(about.values())
    assert bits_of(back.state_dict()) == bits_of(source.state_dict())
    for config in (source.config, back.config):
        assert config.architectures == [type(source).__name__]
    assert back.config.id2label == source.config.id2label
    ids, is_token = inputs(task, dialect)
    # Rates too: both draw the same numbers.
    expected, found = (
        (torch.manual_seed(0), source_scores(m.train(), ids, is_token))[1] for m in (source, back)
    )
    assert_close(found.detach(), expected.detach(), 1e-5)


def test_settings_that_change_no_number_here_come_back_through_runs(tmp_path):
    """transformers takes the loss from ``problem_type``, and the ids of its tokenizer."""
    settings = {
        "problem_type": "multi_label_classification", "initializer_range": 0.5,
        "sep_token_id": 5, "task_specific_params": {"task": {"max_length": 9}},
    }  # fmt: skip
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, intermediate_size=10, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=16, num_labels=3, **settings,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "hf")
    jf.load(tmp_path / "hf").save(tmp_path / "saved", "hf")
    assert main(["port", str(tmp_path / "hf"), str(tmp_path / "run")]) == 0
    jf.load(tmp_path / "run").save(tmp_path / "again", "jax")
    assert main(["port", str(tmp_path / "again"), str(tmp_path / "back"), "--to", "hf"]) == 0
    for folder in ("saved", "back"):
        written = json.loads((tmp_path / folder / "config.json").read_text())
        assert {name: written.get(name) for name in settings} == settings


def test_a_classifier_trains_and_is_no_language_model(tmp_path, capsys):
    source = make("bert", "SequenceClassification").float()
    source.save_pretrained(tmp_path / "folder")
    model = jf.load(tmp_path / "folder")
    ids, is_token = inputs("SequenceClassification")
    labels = np.array([2, 0, 1])
    definition, parameters = split(model.module)

    def loss(parameters):
        found = scores(merge(definition, parameters), ids, is_token)
        return jf.cross_entropy(found[:, None], labels[:, None])

    value, gradients = jax.jit(jax.value_and_grad(loss))(parameters)
    expected = source(
        torch.as_tensor(ids),
        attention_mask=torch.as_tensor(is_token).long(),
        labels=torch.as_tensor(labels),
    ).loss
    assert float(value) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert all(np.isfinite(g).all() for g in gradients.values())
    with pytest.raises(UsageError, match="only a causal language model with a head writes text"):
        model.generate([1, 2, 3], 3)
    assert main(["sample", str(tmp_path / "folder"), "--prompt-ids", "1,2"]) == 2
    assert "only a causal model with a head writes text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label must have the numbers from 0 on"),
        ({"id2label": 3}, "id2label must be an object"),
        ({"id2label": {"0": "a", "1": "b"}, "num_labels": 3}, "num_labels must be 2"),
    ],
)
def test_wrong_labels_are_rejected(settings, words, tmp_path, capsys):
    make("bert", "SequenceClassification").float().save_pretrained(tmp_path / "folder")
    path = tmp_path / "folder" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    assert main(["port", str(tmp_path / "folder"), str(tmp_path / "run"), "--to", "jax"]) == 2
    assert words in capsys.readouterr().err


def test_a_classifier_goes_to_its_twin_and_back():
    model = from_torch(make("roberta", "TokenClassification").float())
    arrays = to_torch(model, "torch_ref")
    again = from_torch(arrays, dialect="torch_ref", config=model.config)
    assert bits_of(export_arrays(split(again)[1])) == bits_of(export_arrays(split(model)[1]))


@pytest.mark.tier("full")
def test_verify_compares_an_encoder_and_decoder_that_classifies(tmp_path, capsys):
    make("bart", "SequenceClassification").float().save_pretrained(tmp_path / "folder")
    folder, file = str(tmp_path / "folder"), str(tmp_path / "ported.safetensors")
    assert main(["port", folder, file]) == 0
    assert main(["verify", folder, file, "--mode", "forward", "--length", "16"]) == 0
    assert "equal (rounding)" in capsys.readouterr().out
    assert main(["sample", folder, "--prompt-ids", "1,2"]) == 2
    assert "only a causal model with a head writes text" in capsys.readouterr().err


@pytest.mark.tier("full")
def test_verify_compares_choices_and_runs_the_twin_of_a_classifier(tmp_path, capsys):
    """A text is one choice; a file with jaxformer's own record is run by torch_ref."""
    source = make("roformer", "MultipleChoice", summary_type="mean").float()
    source.save_pretrained(tmp_path / "folder")
    folder, file = str(tmp_path / "folder"), str(tmp_path / "ported.safetensors")
    assert main(["port", folder, file]) == 0
    for pair in ((folder, file), (file, folder)):
        capsys.readouterr()
        assert main(["verify", *pair, "--mode", "forward", "--length", "16"]) == 0
        assert "equal (rounding)" in capsys.readouterr().out


@pytest.mark.tier("full")
def test_verify_compares_answers_to_questions(tmp_path, capsys):
    """The reference's logits of first and last tokens are two arrays, the candidate's are one."""
    source = make("bert", "QuestionAnswering").float()
    source.save_pretrained(tmp_path / "folder")
    folder, file = str(tmp_path / "folder"), str(tmp_path / "ported.safetensors")
    assert main(["port", folder, file]) == 0
    asked = ["--mode", "forward", "--length", "16"]
    assert main(["verify", folder, file, *asked]) == 0
    assert "equal (rounding)" in capsys.readouterr().out
    source.qa_outputs.weight.data[:] = source.qa_outputs.weight.data.flip(0)
    source.save_pretrained(tmp_path / "swapped")
    assert main(["verify", str(tmp_path / "swapped"), file, *asked]) == 1
    assert "classifier.out_proj" in capsys.readouterr().out
