"""The classes of transformers that classify: a body, and a head for a task.

``*ForSequenceClassification``, ``*ForTokenClassification``, ``*ForQuestionAnswering`` and
``*ForMultipleChoice`` become a ``TransformerClassifier``, of an encoder and decoder an
``EncoderDecoderClassifier``. The kinds of heads are few: decoders score a text by its last token;
BERT's kin have a layer of their own before the scores, in the body's pooler or beside the scores.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxformer.porting.dialects.common.hugging_face_settings import ACTIVATIONS
from jaxformer.porting.dialects.common.labels import read_labels, written_labels
from jaxformer.porting.mapping.rules import Rules, names
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    Choices,
    Fixed,
    Mapped,
    Required,
    Row,
    Values,
    fixed,
    unsupported,
)
from jaxformer.porting.mapping.source_model import SourceModel

# Types whose class for questions calls its body otherwise than all their others do.
QUESTIONS_IN_TRANSFORMER = frozenset(
    {
        "arcee", "exaone4", "llama", "ministral", "nemotron", "qwen2", "qwen3", "qwen3_moe",
        "seed_oss", "smollm3",
    }
)  # fmt: skip
# Decoders whose class for tokens calls its head otherwise than the others do.
TOKENS_BY_CLASSIFIER = frozenset(
    {"biogpt", "bloom", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "mpt"}
)


@dataclass(frozen=True)
class TaskHead:
    """The head of one class.

    Attributes:
        task: how the name of the class ends.
        rules: of its arrays.
        settings: its rows, after those of the body.
        outside: how names outside of the body begin.
        prefix: what the class calls its body, with a dot, where it is not the usual one.
    """

    task: str
    rules: Rules
    settings: tuple[Row, ...]
    outside: tuple[str, ...] = ("classifier.",)
    prefix: str | None = None


@dataclass(frozen=True)
class Labels(Row):
    """The names of the labels."""

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives them in the order of their numbers."""
        count = source_model.setting("num_labels", default=2)
        if source_model.setting("id2label", default=None) is None:
            return {"labels": tuple(f"LABEL_{i}" for i in range(count))}
        return {"labels": read_labels(source_model)}

    def write(self, config: Any) -> dict[str, Any]:
        """Gives them by number, and the numbers by label."""
        return written_labels(config.classifier.labels)


@dataclass(frozen=True)
class Rate(Row):
    """A rate of dropout: of several settings the first that is there.

    Attributes:
        source: their names; the first is written.
        default: where there is none.
        target: the fields that get it; the first is written.
    """

    source: tuple[str, ...]
    default: float
    target: tuple[str, ...] = ("classifier_dropout",)

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the rate to every field."""
        found = [source_model.setting(name, default=None) for name in self.source]
        rate = next((rate for rate in found if rate is not None), self.default)
        return dict.fromkeys(self.target, float(rate))

    def write(self, config: Any) -> dict[str, Any]:
        """Gives the first setting."""
        return {self.source[0]: config.settings()[self.target[0]]}


SUMMARY = Choices({**ACTIVATIONS.table, "tanh": "tanh"})
OUT = names({"classifier.out_proj": "classifier"})
TOKENS = (Labels(), Fixed("classified", "tokens"))
CHOICE = Fixed("labels", ("choice",))
BOTH_RATES = ("classifier_dropout", "classifier_input_dropout")
BERT_RATE = Rate(("classifier_dropout", "hidden_dropout_prob"), 0.1)


def _questions(rate: Row | None = None, **head: Any) -> TaskHead:
    rows = (
        *fixed(labels=("start", "end"), classified="tokens"),
        *([] if rate is None else [rate]),
    )
    rules = names({"classifier.out_proj": "qa_outputs"})
    return TaskHead("QuestionAnswering", rules, rows, ("qa_outputs.",), **head)


def _tokens(rate: Row, name: str = "classifier") -> TaskHead:
    rules = names({"classifier.out_proj": name})
    return TaskHead("TokenClassification", rules, (*TOKENS, rate), (f"{name}.",))


def _decoder(dialect: str) -> tuple[TaskHead, ...]:
    """The heads of a decoder."""
    text = (Labels(), *fixed(classified="last", classifier_bias=False))
    rate = Rate(("classifier_dropout", "hidden_dropout", "hidden_dropout_prob"), 0.1)
    score = names({"classifier.out_proj": "score"})
    prefix = "transformer." if dialect in QUESTIONS_IN_TRANSFORMER else None
    return (
        TaskHead("SequenceClassification", score, text, ("score.",)),
        _tokens(rate, "classifier" if dialect in TOKENS_BY_CLASSIFIER else "score"),
        _questions(prefix=prefix),
    )


def _bert(
    pooler: str, rate: Row = BERT_RATE, *more: Row, token_rate: Row | None = None
) -> tuple[TaskHead, ...]:
    """The heads of a type that has a layer before the scores of a text.

    Args:
        pooler: the name of that layer.
        rate: of texts.
        more: other settings of the layer.
        token_rate: of tokens; default the same.
    """
    outside = ("classifier.", *([] if "." not in pooler else [f"{pooler.split('.')[0]}."]))
    rules = (*names({"classifier.proj": pooler}), *OUT)
    layer = (Fixed("classifier_transform", True), rate, *more)
    return (
        TaskHead("SequenceClassification", rules, (Labels(), *layer), outside),
        _tokens(rate if token_rate is None else token_rate),
        _questions(),
        TaskHead("MultipleChoice", rules, (CHOICE, *layer), outside),
    )


def _beside(*rows: Row, activation: Row, rate: Row = BERT_RATE) -> TaskHead:
    """The head of a text whose layer stands beside the scores, with dropout before both."""
    rules = names(
        {"classifier.proj": "classifier.dense", "classifier.out_proj": "classifier.out_proj"}
    )
    settings = (Labels(), Fixed("classifier_transform", True), activation, rate, *rows)
    return TaskHead("SequenceClassification", rules, settings)


def _roberta(prefix: str, rate: Rate = BERT_RATE) -> tuple[TaskHead, ...]:
    text = _beside(
        activation=Fixed("classifier_activation", "tanh"),
        rate=Rate(rate.source, rate.default, BOTH_RATES),
    )
    choice_rate = Rate(("hidden_dropout_prob",), 0.1)
    return (text, *_bert(f"{prefix}pooler.dense", choice_rate, token_rate=rate)[1:])


def _electra() -> tuple[TaskHead, ...]:
    gelu = Fixed("classifier_activation", "gelu")
    text = _beside(activation=gelu, rate=Rate(BERT_RATE.source, 0.1, BOTH_RATES))
    choice = _summary("first", transform=True, activation="gelu", rate=0.1)
    return (text, _tokens(BERT_RATE), _questions(), choice)


@dataclass(frozen=True)
class SummaryActivation(Row):
    """What follows the layer of a summary, or null.

    Attributes:
        default: where there is no setting.
    """

    default: str | None

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the activation.

        Raises:
            UsageError: there is one and no layer, or it is unknown.
        """
        name = source_model.nullable("summary_activation", self.default) or None
        if name is None:
            return {"classifier_activation": "none" if values["classifier_transform"] else "tanh"}
        if not values["classifier_transform"]:
            raise unsupported("summary_activation", "be null without summary_use_proj", name)
        return {"classifier_activation": SUMMARY.to_target("summary_activation", name, values)}

    def write(self, config: Any) -> dict[str, Any]:
        """Gives the name."""
        part = config.classifier
        if not part.classifier_transform or part.classifier_activation == "none":
            return {"summary_activation": None}
        return {"summary_activation": SUMMARY.to_source(part.classifier_activation, config)}


def _summary(kind: str, *, transform: bool, activation: str | None, rate: float) -> TaskHead:
    """The head of choices whose vector is a summary of all places, padding or not.

    Args:
        kind: what is taken where ``summary_type`` does not say.
        transform: whether a layer follows, where ``summary_use_proj`` does not say.
        activation: of that layer.
        rate: of the dropout behind it.
    """
    rules = names({"classifier.proj": "sequence_summary.summary"})
    places = {"first": "first", "last": "last_place", "mean": "mean_of_places"}
    rows = (
        CHOICE,
        # Without a place of its own, which the class never gives, the last one is taken.
        Mapped("summary_type", "classified", kind, Choices({**places, "cls_index": "last_place"})),
        Mapped("summary_use_proj", "classifier_transform", transform, BOOLEAN),
        SummaryActivation(activation),
        # The layer would have another width than the scores are made of.
        Required("summary_proj_to_labels", False),
        Rate(("summary_first_dropout",), 0.0, ("classifier_input_dropout",)),
        Rate(("summary_last_dropout",), rate),
    )
    outside = ("classifier.", "sequence_summary.")
    return TaskHead("MultipleChoice", (*rules, *OUT), rows, outside)


def _roformer() -> tuple[TaskHead, ...]:
    same = Fixed("classifier_activation", lambda source_model, values: values["activation"])
    text = _beside(activation=same, rate=Rate(BERT_RATE.source, 0.1, BOTH_RATES))
    choice = _summary("last", transform=False, activation=None, rate=0.0)
    return (text, _tokens(BERT_RATE), _questions(), choice)


def _distilbert() -> tuple[TaskHead, ...]:
    text, _, _, choice = _bert(
        "pre_classifier",
        Rate(("seq_classif_dropout",), 0.2),
        Fixed("classifier_activation", "relu"),
    )
    outside = ("pre_classifier.", "classifier.")
    heads = [TaskHead(h.task, h.rules, h.settings, outside) for h in (text, choice)]
    tokens = _tokens(Rate(("dropout",), 0.1))
    return (*heads, tokens, _questions(Rate(("qa_dropout",), 0.1, ("classifier_input_dropout",))))


def _deberta() -> tuple[TaskHead, ...]:
    return _bert(
        "pooler.dense",
        Rate(("cls_dropout", "hidden_dropout_prob"), 0.1),
        Rate(("pooler_dropout",), 0.0, ("classifier_input_dropout",)),
        Mapped("pooler_hidden_act", "classifier_activation", "gelu", ACTIVATIONS),
        token_rate=Rate(("hidden_dropout_prob",), 0.1),
    )


def _modernbert() -> tuple[TaskHead, ...]:
    rules = (
        *names({"classifier.proj": "head.dense", "classifier.norm": "head.norm"}),
        *OUT,
    )
    layer = (
        *fixed(classifier_transform=True, classifier_norm=True),
        Mapped("classifier_activation", "classifier_activation", "gelu", ACTIVATIONS),
        Mapped("classifier_bias", "classifier_transform_bias", False, BOOLEAN),
        Rate(("classifier_dropout",), 0.0),
    )
    text = Mapped(
        "classifier_pooling", "classified", "cls", Choices({"cls": "first", "mean": "mean"})
    )
    questions = fixed(labels=("start", "end"), classified="tokens")
    outside = ("head.", "classifier.")
    return tuple(
        TaskHead(task, rules, (*rows, *layer), outside)
        for task, rows in {
            "SequenceClassification": (Labels(), text),
            "TokenClassification": TOKENS,
            "QuestionAnswering": questions,
            "MultipleChoice": (CHOICE, text),
        }.items()
    )


_HIDDEN = Rate(("hidden_dropout_prob",), 0.1)
_HEADS: Mapping[str, tuple[TaskHead, ...]] = {
    "bert": _bert("bert.pooler.dense"),
    "megatron-bert": _bert("bert.pooler.dense", _HIDDEN),
    "ernie": _bert("ernie.pooler.dense"),
    "albert": _bert("albert.pooler", Rate(("classifier_dropout_prob",), 0.1)),
    "roberta": _roberta("roberta."),
    "xlm-roberta": _roberta("roberta."),
    "camembert": _roberta("roberta."),
    "mpnet": _roberta("mpnet.", _HIDDEN),
    "electra": _electra(),
    "roformer": _roformer(),
    "distilbert": _distilbert(),
    "deberta-v2": _deberta(),
    "modernbert": _modernbert(),
}


# Of the tokens of an encoder that is part of a pair.
TOKENS_OF_ENCODER = TaskHead(
    "TokenClassification",
    OUT,
    (*TOKENS, Rate(("classifier_dropout",), 0.0)),
    prefix="transformer.",
)


def _pair(start: str) -> tuple[TaskHead, ...]:
    """The heads of an encoder and decoder.

    Args:
        start: what the class for texts calls its body, with a dot.
    """
    layer = names(
        {
            "classifier.proj": "classification_head.dense",
            "classifier.out_proj": "classification_head.out_proj",
        }
    )
    text = (
        Labels(),
        *fixed(classified="last", classifier_transform=True),
        Rate(("classifier_dropout",), 0.0, BOTH_RATES),
    )
    outside = ("classification_head.",)
    return (
        TaskHead("SequenceClassification", layer, text, outside, prefix=start),
        _questions(),
    )


# transformers has these classes of no other encoder and decoder.
_PAIR_HEADS: Mapping[str, tuple[TaskHead, ...]] = {
    **dict.fromkeys(("bart", "mbart"), _pair("model.")),
    **dict.fromkeys(("t5", "mt5", "umt5"), _pair("transformer.")),
}


def pair_task_heads(dialect: str) -> tuple[TaskHead, ...]:
    """Returns the heads of the classes of an encoder and decoder, of labels last."""
    return tuple(reversed(_PAIR_HEADS.get(dialect, ())))


def task_heads(dialect: str) -> tuple[TaskHead, ...]:
    """Returns the heads of a type's classes; transformers does not have all of them.

    Those whose labels say what they are for come first: an export takes the first that fits.
    """
    heads = _HEADS[dialect] if dialect in _HEADS else _decoder(dialect)
    return tuple(sorted(heads, key=lambda head: any(isinstance(r, Labels) for r in head.settings)))
