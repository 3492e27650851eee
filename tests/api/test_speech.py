"""Whisper is loaded, run, saved and compared; commands of texts reject it in a line."""

import json

import numpy as np
import pytest
import torch
import transformers

import jaxformer
from jaxformer.cli.main import main
from jaxformer.errors import UsageError
from tests.support.hugging_face.cases import CASES
from tests.support.hugging_face.running import bits_of, build_case, features, randomize

START = np.full((2, 1), 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("whisper") / "hf"
    source = randomize(build_case(CASES["whisper untied relu"]), std=0.2, embeddings=0.3).float()
    source.config.suppress_tokens = [3, 5]
    source.save_pretrained(path)
    return path


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
