"""Settings of a config.json with values of the wrong type: the error names both."""

import pytest

from jaxformer.errors import UsageError
from jaxformer.porting.dialects import find_dialect
from jaxformer.porting.mapping.source_model import SourceModel

LLAMA = {
    "hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3, "num_hidden_layers": 2,
    "intermediate_size": 40, "max_position_embeddings": 64, "vocab_size": 37,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
WRONG = {
    "num_attention_heads": ["6", 6.0, 0, True],
    "num_key_value_heads": ["3", 0],
    "rms_norm_eps": ["1e-6"],
    "max_position_embeddings": ["64"],
    "head_dim": [4.5],
    "hidden_size": ["24"],
    "rope_theta": ["a", [1], "10000", True],
    "sliding_window": ["16"],
    "vocab_size": [True],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_the_error_names_the_setting_and_the_value(name, value):
    kind, settings = "llama", LLAMA
    if name == "sliding_window":
        kind = "gemma3_text"
        settings = {**LLAMA, "head_dim": 4, "hidden_activation": "gelu_pytorch_tanh"}
        del settings["hidden_act"]
    mapping = find_dialect(kind).module_mappings[0]
    build = mapping.build
    read = build.read
    read(SourceModel({}, kind=mapping.source[0], config=settings))
    with pytest.raises(UsageError, match=f"{name} must .*: got ") as caught:
        read(SourceModel({}, kind=mapping.source[0], config={**settings, name: value}))
    assert repr(value) in str(caught.value)
