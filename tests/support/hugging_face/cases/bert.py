"""BERT and its kin."""

from collections.abc import Mapping
from typing import Any

from tests.support.hugging_face.case import SIZES, Case

# transformers ties the two only together with the matrix, and then uses one of them.
BIASES = {"cls.predictions.bias": "cls.predictions.decoder.bias"}
DISTILBERT = {
    "dim": 24,
    "n_heads": 4,
    "n_layers": 2,
    "hidden_dim": 44,
    "max_position_embeddings": 320,
}
ROBERTA_BIASES = {"lm_head.bias": "lm_head.decoder.bias"}
ROBERTA_NOTES = (
    "text as by its forward pass: `generate` of transformers 5 begins with another row of positions"
)


def roberta(dialect: str, start: str) -> dict[str, Case]:
    """The cases of one of the types whose positions count real tokens."""

    def case(name: str, std: float = 0.5, embeddings: float = 0.2, **settings: Any) -> Case:
        is_body = name == "Model"
        return Case(
            dialect,
            f"{start}{name}",
            {**SIZES, **settings},
            counts_tokens=True,
            positions_are_rows=True,
            pad_token=settings.get("pad_token_id", 1),
            copies={} if is_body else ROBERTA_BIASES,
            std=std,
            embeddings=embeddings,
            notes=ROBERTA_NOTES,
        )

    return {
        dialect: case("ForMaskedLM", type_vocab_size=1, layer_norm_eps=1e-5),
        f"{dialect} untied relu pad": case(
            "ForMaskedLM", tie_word_embeddings=False, hidden_act="relu", pad_token_id=0
        ),
        f"{dialect} body": case("Model", pad_token_id=2),
        f"{dialect} causal": case(
            "ForCausalLM", 0.2, 3.0, is_decoder=True, tie_word_embeddings=False
        ),
    }


def causal(dialect: str, kind: str, copies: Mapping[str, str] = BIASES, **settings: Any) -> Case:
    """The case of a class that writes text; its embeddings show through the norm behind them."""
    settings = {**SIZES, "is_decoder": True, **settings}
    return Case(dialect, kind, settings, copies=copies, std=0.3, embeddings=3.0)


CASES = {
    "bert": Case("bert", "BertModel", SIZES),
    "bert no pooler": Case(
        "bert", "BertModel", {**SIZES, "type_vocab_size": 3}, {"add_pooling_layer": False}
    ),
    "bert masked": Case(
        "bert", "BertForMaskedLM", {**SIZES, "hidden_act": "gelu_new"}, copies=BIASES
    ),
    "bert masked untied": Case(
        "bert",
        "BertForMaskedLM",
        {**SIZES, "tie_word_embeddings": False, "hidden_act": "relu"},
        copies=BIASES,
    ),
    **roberta("roberta", "Roberta"),
    **roberta("xlm-roberta", "XLMRoberta"),
    **roberta("camembert", "Camembert"),
    "bert causal": causal("bert", "BertLMHeadModel"),
    "electra": Case("electra", "ElectraForMaskedLM", {**SIZES, "embedding_size": 14}),
    "electra wide untied relu": Case(
        "electra",
        "ElectraForMaskedLM",
        {**SIZES, "embedding_size": 24, "tie_word_embeddings": False, "hidden_act": "relu"},
    ),
    "electra narrow untied": Case(
        "electra",
        "ElectraForMaskedLM",
        {**SIZES, "embedding_size": 34, "tie_word_embeddings": False},
    ),
    "electra body": Case("electra", "ElectraModel", {**SIZES, "embedding_size": 14}),
    "electra causal": causal("electra", "ElectraForCausalLM", {}, embedding_size=14),
    "megatron-bert": Case("megatron-bert", "MegatronBertForMaskedLM", SIZES, copies=BIASES),
    "megatron-bert untied": Case(
        "megatron-bert",
        "MegatronBertForMaskedLM",
        {**SIZES, "tie_word_embeddings": False, "hidden_act": "gelu_new", "type_vocab_size": 3},
        copies=BIASES,
    ),
    "megatron-bert body": Case("megatron-bert", "MegatronBertModel", SIZES),
    "megatron-bert causal": causal(
        "megatron-bert", "MegatronBertForCausalLM", tie_word_embeddings=False
    ),
    "ernie": Case("ernie", "ErnieForMaskedLM", SIZES, copies=BIASES),
    "ernie untied": Case(
        "ernie",
        "ErnieForMaskedLM",
        {**SIZES, "tie_word_embeddings": False, "hidden_act": "relu", "type_vocab_size": 4},
        copies=BIASES,
    ),
    "ernie body": Case(
        "ernie", "ErnieModel", {**SIZES, "use_task_id": True, "task_type_vocab_size": 4}
    ),
    "ernie causal": causal("ernie", "ErnieForCausalLM"),
    "distilbert": Case("distilbert", "DistilBertForMaskedLM", DISTILBERT),
    "distilbert untied relu": Case(
        "distilbert",
        "DistilBertForMaskedLM",
        {**DISTILBERT, "tie_word_embeddings": False, "activation": "relu"},
    ),
    "distilbert sinusoids body": Case(
        "distilbert",
        "DistilBertModel",
        {**DISTILBERT, "sinusoidal_pos_embds": True},
        # It says what the table of positions starts with.
        without_effect=frozenset({"sinusoidal_pos_embds"}),
    ),
}
