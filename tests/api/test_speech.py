"""Whisper is loaded, run, saved and compared; commands of texts reject it in a line."""

import json

import jax
import numpy as np
import pytest
import torch
import transformers

import jaxformer
from jaxformer.cli.main import main
from jaxformer.errors import UsageError
from jaxformer.parameters import merge, split
from tests.support.hugging_face.building import build_case, randomize
from tests.support.hugging_face.cases import CASES
from tests.support.hugging_face.running import bits_of, features

START = np.full((2, 1), 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("whisper") / "hf"
    source = randomize(build_case(CASES["whisper untied relu"]), std=0.2, embeddings=0.3).float()
    source.config.suppress_tokens = [3, 5]
    source.save_pretrained(path)
    return path


@pytest.mark.tier("full")
def test_a_model_that_hears_is_loaded_and_saved_and_writes(folder, tmp_path):
    model = jaxformer.load(folder)
    source = transformers.WhisperForConditionalGeneration.from_pretrained(folder)
    sound = features(7, 166, START).astype(np.float32)
    free = jaxformer.generate_target(model.module, sound, 5, start_BT=START, greedy=True)
    suppressed = {"suppress_tokens": [int(free[0, 1])], "begin_suppress_tokens": [int(free[1, 0])]}
    written = jaxformer.generate_target(
        model.module, sound, 5, start_BT=START, greedy=True, **suppressed
    )
    assert not np.array_equal(written, free)
    # Whisper's own ``generate`` would read times.
    expected = transformers.GenerationMixin.generate(
        source, torch.as_tensor(sound), max_new_tokens=5, do_sample=False,
        decoder_start_token_id=2, **suppressed,
    )  # fmt: skip
    assert np.array_equal(written, expected[:, 1:])
    back = model.save(tmp_path / "back", "hf")
    again = transformers.WhisperForConditionalGeneration.from_pretrained(back)
    # A model in memory has no table of sinusoids: they are computed, but for their last bits.
    name = "model.encoder.embed_positions.weight"
    found, first = (bits_of({**m.state_dict(), name: torch.zeros(1)}) for m in (again, source))
    assert found == first
    assert torch.allclose(again.get_parameter(name), source.get_parameter(name), atol=2e-6)
    settings = json.loads((back / "config.json").read_text())
    generation = back / "generation_config.json"
    kept = {**settings, **(json.loads(generation.read_text()) if generation.exists() else {})}
    assert kept["suppress_tokens"] == [3, 5]


def test_a_model_that_hears_reads_no_tokens(folder, tmp_path, capsys):
    model = jaxformer.load(folder)
    for call in (lambda: model.generate("text"), lambda: model.generate([1, 2]),
                 lambda: model.attention("text")):  # fmt: skip
        with pytest.raises(UsageError, match="reads features and no text"):
            call()
    with pytest.raises(ValueError, match=r"features must be \(B, 7, 166\): got shape"):
        jaxformer.generate_target(
            model.module, np.zeros((2, 7, 160), np.float32), 5, start_BT=START, greedy=True
        )
    capsys.readouterr()
    for command in (
        ["sample", str(folder), "--prompt-ids", "1,2"],
        ["inspect", "attention", str(folder), "--out", str(tmp_path / "out.json")],
        ["plan", "--init-from", str(folder)],
        ["train", "--init-from", str(folder), "--out", str(tmp_path / "run")],
    ):
        assert main(command) == 2
        error = capsys.readouterr().err
        assert "reads features and no tokens" in error
        assert len(error.splitlines()) == 1


@pytest.mark.tier("full")
def test_a_model_that_sorts_sound_is_loaded_trained_and_saved(tmp_path, capsys):
    case = CASES["whisper classes of all layers"]
    source = randomize(build_case(case), std=0.1).float()
    source.save_pretrained(tmp_path / "folder")
    model = jaxformer.load(tmp_path / "folder")
    assert model.config.classifier.labels == ("yes", "no", "stop", "go", "up")
    sound = features(5, 620, START).astype(np.float32)
    labels = np.array([3, 1])
    definition, parameters = split(model.module)

    def loss(parameters):
        scores = merge(definition, parameters)(sound)
        return jaxformer.cross_entropy(scores[:, None], labels[:, None])

    value, gradients = jax.jit(jax.value_and_grad(loss))(parameters)
    expected = source(torch.as_tensor(sound), labels=torch.as_tensor(labels)).loss
    assert float(value) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert all(np.isfinite(g).all() and g.any() for g in gradients.values())
    back = model.save(tmp_path / "back", "hf")
    again = type(source).from_pretrained(back)
    name = "encoder.embed_positions.weight"
    found, first = (bits_of({**m.state_dict(), name: torch.zeros(1)}) for m in (again, source))
    assert found == first
    for call in (lambda: model.generate("text"), lambda: model.generate([1, 2]),
                 lambda: model.attention("text")):  # fmt: skip
        with pytest.raises(UsageError, match="reads features and no text"):
            call()
    assert main(["sample", str(tmp_path / "folder"), "--prompt-ids", "1,2"]) == 2
    assert "is no language model" in capsys.readouterr().err


@pytest.mark.tier("full")
def test_verify_compares_what_sorts_sound(tmp_path, capsys):
    source = randomize(build_case(CASES["whisper classes of all layers"]), std=0.1).float()
    source.save_pretrained(tmp_path / "folder")
    folder, file = str(tmp_path / "folder"), str(tmp_path / "ported.safetensors")
    assert main(["port", folder, file]) == 0
    for pair in ((folder, file), (file, folder)):
        capsys.readouterr()
        assert main(["verify", *pair]) == 0
        assert "equal (rounding)" in capsys.readouterr().out
    source.layer_weights.data[1] += 1
    source.save_pretrained(tmp_path / "other")
    assert main(["verify", str(tmp_path / "other"), file]) == 1
    assert "layer_sum" in capsys.readouterr().out
    assert main(["verify", folder, file, "--mode", "train"]) == 2
    assert "a model that hears: use --mode forward or grad" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"context_length": 8}, "context_length must be encoder_length: got 8 and 9"),
        ({"positions": "rotary"}, "positions of sound must be rows"),
        ({"d_model": 2, "num_heads": 1}, "sinusoids need an even d_model above 2"),
        ({"sliding_window": 3}, "sound has no sliding window"),
        ({"classifier_transform": False, "classifier_width": 3}, "needs classifier_transform=True"),
    ],
)
def test_settings_of_what_sorts_sound_are_checked(change, words):
    settings = {"d_model": 8, "num_heads": 2, "num_layers": 1, "context_length": 9}
    with pytest.raises(ValueError, match=words):
        jaxformer.SpeechClassifierConfig(**{**settings, "encoder_length": 9, **change})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"source_vocab_size": 3}, "source_vocab_size must be 0 where the source is features"),
        ({"embedding_norm": True}, "features have no embedding"),
        ({"d_model": 2, "num_heads": 1}, "sinusoids need an even d_model above 2"),
        ({"positions": "rotary"}, "positions must be rows"),
        ({"num_features": 0}, "num_features must be positive"),
    ],
)
def test_settings_that_do_not_fit_are_rejected(change, words):
    settings = {"d_model": 8, "num_heads": 2, "context_length": 5, "target_vocab_size": 7}
    with pytest.raises(ValueError, match=words):
        jaxformer.SpeechTransformerConfig(**{**settings, **change})
