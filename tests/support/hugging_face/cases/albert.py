"""ALBERT, MPNet, RoFormer and ModernBERT."""

from tests.support.hugging_face.case import SIZES, Case
from tests.support.hugging_face.cases.bert import BIASES, ROBERTA_BIASES, causal

ALBERT = {**SIZES, "embedding_size": 14, "num_hidden_layers": 3}
ALBERT_BIASES = {"predictions.bias": "predictions.decoder.bias"}
GROUPS = {
    **ALBERT,
    "num_hidden_layers": 3,
    "num_hidden_groups": 2,
    "inner_group_num": 2,
    "tie_word_embeddings": False,
    "hidden_act": "relu",
    "type_vocab_size": 3,
    "layer_norm_eps": 1e-5,
}
MODERN = {
    **SIZES,
    "num_hidden_layers": 4,
    "local_attention": 22,
    **dict.fromkeys(("pad_token_id", "cls_token_id", "sep_token_id")),
}
MODERN_BIASES = {
    **MODERN,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "local_attention": 8,
    "norm_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "classifier_bias": True,
    "decoder_bias": False,
    "hidden_activation": "silu",
    "classifier_activation": "relu",
    "tie_word_embeddings": False,
    "norm_eps": 1e-3,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 700.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
    },
}

CASES = {
    "albert": Case("albert", "AlbertForMaskedLM", ALBERT, copies=ALBERT_BIASES),
    "albert groups untied relu": Case("albert", "AlbertForMaskedLM", GROUPS, copies=ALBERT_BIASES),
    "albert body wide": Case(
        "albert", "AlbertModel", {**ALBERT, "embedding_size": 24, "num_hidden_groups": 3}
    ),
    "mpnet": Case(
        "mpnet",
        "MPNetForMaskedLM",
        SIZES,
        counts_tokens=True,
        pad_token=1,
        copies=ROBERTA_BIASES,
    ),
    "mpnet untied relu": Case(
        "mpnet",
        "MPNetForMaskedLM",
        {**SIZES, "tie_word_embeddings": False, "hidden_act": "relu", "layer_norm_eps": 1e-5},
        counts_tokens=True,
        pad_token=1,
        copies=ROBERTA_BIASES,
    ),
    "mpnet body": Case("mpnet", "MPNetModel", SIZES, counts_tokens=True, pad_token=1),
    "roformer": Case("roformer", "RoFormerForMaskedLM", SIZES, copies=BIASES),
    "roformer narrow untied relu": Case(
        "roformer",
        "RoFormerForMaskedLM",
        {
            **SIZES,
            "embedding_size": 14,
            "tie_word_embeddings": False,
            "hidden_act": "relu",
            "type_vocab_size": 3,
        },
        copies=BIASES,
    ),
    "roformer body": Case("roformer", "RoFormerModel", SIZES),
    "roformer causal": causal("roformer", "RoFormerForCausalLM", pad_token_id=0),
    "modernbert": Case("modernbert", "ModernBertForMaskedLM", MODERN),
    "modernbert biases untied scaled": Case("modernbert", "ModernBertForMaskedLM", MODERN_BIASES),
    "modernbert body": Case(
        "modernbert",
        "ModernBertModel",
        {**MODERN, "num_attention_heads": 3},
        without_effect=frozenset({"decoder_bias"}),
    ),
}
