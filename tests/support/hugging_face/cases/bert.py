"""BERT."""

from tests.support.hugging_face.case import SIZES, Case

# transformers ties the two only together with the matrix, and then uses one of them.
BIASES = {"cls.predictions.bias": "cls.predictions.decoder.bias"}
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
}
