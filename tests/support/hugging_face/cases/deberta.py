"""DeBERTa V2 and V3."""

from tests.support.hugging_face.case import SIZES, Case
from tests.support.hugging_face.cases.bert import BIASES

V3 = {
    **SIZES,
    "relative_attention": True,
    "position_buckets": 16,
    "max_relative_positions": 90,
    "pos_att_type": "p2c|c2p",
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
# Its own projections of distances, each of which has a row, and learned positions beside them.
V2 = {
    **SIZES,
    "relative_attention": True,
    "max_relative_positions": 37,
    "pos_att_type": ["p2c", "c2p"],
    "tie_word_embeddings": False,
    "hidden_act": "relu",
    "type_vocab_size": 3,
    "layer_norm_eps": 1e-3,
}

CASES = {
    "deberta-v2": Case("deberta-v2", "DebertaV2ForMaskedLM", V3, copies=BIASES),
    "deberta-v2 own projections untied": Case(
        "deberta-v2", "DebertaV2ForMaskedLM", V2, copies=BIASES
    ),
    "deberta-v2 body keys alone": Case(
        "deberta-v2",
        "DebertaV2Model",
        {**V2, "pos_att_type": ["p2c"], "position_buckets": 10, "num_attention_heads": 3},
    ),
    "deberta-v2 no distances": Case(
        "deberta-v2", "DebertaV2ForMaskedLM", {**SIZES, "hidden_act": "gelu_new"}, copies=BIASES
    ),
}
