"""CLIP is loaded, run and saved by name, and its settings are those of two models side by side."""

import json

import jax
import numpy as np
import pytest
import torch

import jaxformer
from jaxformer.cli.main import main
from jaxformer.config_tree import flatten, from_dict
from jaxformer.errors import UsageError
from tests.support.hugging_face.building import build_case, randomize
from tests.support.hugging_face.cases import CASES
from tests.support.hugging_face.running import bits_of, pair_images, run_source

TEXT = jaxformer.TransformerLMConfig(
    d_model=8, num_heads=2, num_layers=1, vocab_size=11, context_length=5, head="none"
)
VISION = jaxformer.VisionTransformerConfig(
    d_model=8, num_heads=4, num_layers=1, image_height=4, image_width=4, patch_height=2,
    patch_width=2, context_length=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("clip") / "hf"
    randomize(build_case(CASES["clip"])).float().save_pretrained(path)
    settings = json.loads((path / "config.json").read_text())
    settings["text_config"] |= {"bos_token_id": 2, "pad_token_id": 1}
    (path / "config.json").write_text(json.dumps(settings))
    return path


def test_a_pair_is_loaded_saved_and_writes_no_text(folder, tmp_path, capsys):
    model = jaxformer.load(folder)
    source = build_case(CASES["clip"]).float()
    arrays = jaxformer.to_torch(model.module)
    source.load_state_dict({name: torch.as_tensor(a) for name, a in arrays.items()})
    ids = np.random.default_rng(0).integers(3, 37, (2, 9))
    images = pair_images(source.config.vision_config, ids).astype(np.float32)
    logits = np.asarray(jax.jit(lambda ids, images: model.module(ids, images))(ids, images))
    assert logits.shape == (3, 2)
    expected = run_source(source, ids)[0].detach().numpy()
    # Similarities in [-1, 1] times a scale.
    scale = float(np.exp(arrays["logit_scale"]))
    assert np.abs(logits - expected).max() < 1e-5 * scale
    saved = jaxformer.load(model.save(tmp_path / "run"))
    assert saved.config == model.config
    exported = saved.save(tmp_path / "hf", "hf", dialect="clip")
    texts = json.loads((exported / "config.json").read_text())["text_config"]
    assert (texts["bos_token_id"], texts["pad_token_id"]) == (2, 1)
    assert bits_of(jaxformer.to_torch(saved.module, "clip")) == bits_of(source.state_dict())
    with pytest.raises(UsageError, match="this DualEncoder reads images, and writes no text"):
        model.generate("text")
    with pytest.raises(UsageError, match="this DualEncoder reads images: call the module"):
        model.attention("text")
    assert main(["sample", str(folder), "--prompt", "a"]) == 2
    assert main(["verify", str(folder), str(folder), "--mode", "generate"]) == 2
    assert "holds a model of texts and images" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("text_config", {"wrong": 3}, "clip_text_model in text_config does not know what the"),
        ("vision_config", {"hidden_act": "mish"}, "hidden_act must"),
        ("vision_config", {"model_type": "vit"}, "model_type must be 'clip_vision_model'"),
        ("text_config", None, "the text_config must be an object: got 3"),
    ],
)
def test_a_wrong_setting_of_either_model_is_named(folder, tmp_path, capsys, part, change, words):
    settings = json.loads((folder / "config.json").read_text())
    settings[part] = 3 if change is None else {**settings[part], **change}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert main(["port", str(tmp_path), str(tmp_path / "run"), "--to", "jax"]) == 2
    assert words in capsys.readouterr().err


def test_the_older_objects_of_settings_come_first(folder, tmp_path):
    settings = json.loads((folder / "config.json").read_text())
    settings["text_config_dict"] = {**settings["text_config"], "layer_norm_eps": 1e-3}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    assert jaxformer.load(tmp_path).config.text.norm.norm_eps == 1e-3


def test_settings_of_two_models_are_one_tree():
    config = jaxformer.DualEncoderConfig(text=TEXT, vision=VISION, end_token=3)
    settings = flatten(config)
    assert (settings["text.num_heads"], settings["vision.num_heads"]) == (2, 4)
    assert from_dict(type(config), json.loads(json.dumps(settings))) == config
    nested = {"text": flatten(TEXT), "vision": flatten(VISION), "end_token": 3}
    assert from_dict(type(config), nested) == config
    assert config.replace(**{"text.d_ff": 7}).text == TEXT.replace(d_ff=7)
    assert config.replace(text=TEXT.replace(d_ff=7)).text.feed_forward.d_ff == 7
    names = {name: getattr(jaxformer, name) for name in dir(jaxformer) if name.endswith("Config")}
    assert eval(repr(config), names) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"end_token": 11}, r"needs an end_token in \[0, vocab_size\)"),
        ({"end_token": None}, "text_vector='end_token' needs an end_token"),
        ({"text_vector": "pooler"}, "text_vector='pooler' needs text.pooler=True"),
        ({"vision.num_labels": 3}, "have neither head nor classes"),
        ({"vision.d_model": 16}, "become vectors of one width: got 8 and 16"),
        ({"text.wrong": 3}, "unknown DualEncoderConfig settings: text.wrong"),
    ],
)
def test_settings_that_do_not_fit_are_rejected(change, words):
    config = jaxformer.DualEncoderConfig(text=TEXT, vision=VISION, end_token=3)
    with pytest.raises(ValueError, match=words):
        config.replace(**change)
