"""DeepSeek-V3's folders as they were published, and settings that are rejected."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from jaxformer.errors import CheckpointError, UsageError
from jaxformer.porting.checkpoint import open_checkpoint
from tests.support.hugging_face.folders import save_folder
from tests.support.ported import port

# What the config.json of the first release has beside the settings of transformers' class.
PUBLISHED = {
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "topk_method": "noaux_tc",
    "rope_theta": 10000,
    "rope_parameters": ...,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 4,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 80,
        "type": "yarn",
    },
}


def test_a_published_folder_is_ported_without_the_layer_behind_the_last(tmp_path):
    folder = save_folder(tmp_path / "hf", "deepseek_v3", **PUBLISHED)
    arrays = load_file(folder / "model.safetensors")
    further = {"model.layers.61.enorm.weight": torch.randn(24)}
    save_file({**arrays, **further}, folder / "model.safetensors", {"format": "pt"})
    config = open_checkpoint(folder).plan().module.config
    # 0.1 ln 4 + 1, squared, beside 1 / sqrt(H); the tables are not stretched.
    assert config.attention.attention_scale == pytest.approx(1.138629436**2 / 10**0.5)
    assert config.position.rotary.scaling.rotary_attention_factor == 1.0
    assert "model.layers.61.enorm.weight" in port(folder, tmp_path / "back", "--to", "hf")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert after.keys() == arrays.keys()
    assert all(torch.equal(after[name], array) for name, array in arrays.items())
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["rope_parameters"]["mscale_all_dim"] == 1.0
    assert open_checkpoint(tmp_path / "back").plan().module.config == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"scoring_func": "softmax"}, "scoring_func must be 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method must be 'noaux_tc'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq must be 1"),
        ({"n_shared_experts": 0}, "n_shared_experts must be a whole number above 0"),
        ({"first_k_dense_replace": -1}, "first_k_dense_replace must be a whole number from 0"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must be 4"),
        ({"head_dim": 8}, "head_dim must be 4"),
        ({"n_group": 5}, "expert_groups must divide num_experts"),
    ],
)
def test_an_unsupported_setting_is_rejected_by_name(changes, words, tmp_path):
    folder = save_folder(tmp_path / "hf", "deepseek_v3", **changes)
    with pytest.raises((CheckpointError, UsageError), match=words) as caught:
        open_checkpoint(folder).plan()
    assert "\n" not in str(caught.value)
