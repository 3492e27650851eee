"""Models that see are loaded, run, saved and compared; commands of texts reject them in a line."""

import numpy as np
import pytest
import torch

import jaxformer
from jaxformer.cli.main import main
from jaxformer.errors import UsageError
from tests.support.hugging_face.building import build_case, randomize
from tests.support.hugging_face.cases import CASES

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("vit") / "hf"
    randomize(build_case(CASES["vit"])).float().save_pretrained(path)
    return path


def test_a_model_that_sees_is_loaded_and_saved(folder, tmp_path):
    model = jaxformer.load(folder)
    images = np.random.default_rng(0).standard_normal((2, 5, 15, 22)).astype(np.float32)
    logits = np.asarray(model.module(images))
    with torch.no_grad():
        expected = build_case(CASES["vit"]).float()
        expected.load_state_dict(
            {n: torch.as_tensor(a) for n, a in jaxformer.to_torch(model.module).items()}
        )
        expected = expected(torch.as_tensor(images)).logits.numpy()
    assert np.abs(logits - expected).max() < 1e-5 * np.abs(expected).max()
    saved = jaxformer.load(model.save(tmp_path / "model.safetensors"))
    assert np.array_equal(saved.module(images), logits)
    assert model.tokenizer is None


def test_a_model_that_sees_writes_no_text(folder):
    model = jaxformer.load(folder)
    with pytest.raises(UsageError, match="writes no text"):
        model.generate([1, 2])
    with pytest.raises(UsageError, match="reads images, and writes no text"):
        model.generate("text")


def test_images_of_another_size_are_rejected(folder):
    model = jaxformer.load(folder)
    with pytest.raises(ValueError, match=r"images must be \(B, 5, 15, 22\): got shape"):
        model.module(np.zeros((2, 5, 16, 22), np.float32))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["sample", "FOLDER", "--prompt", "a"], "is no language model"),
        (["verify", "FOLDER", "FOLDER", "--mode", "generate"], "holds a model that sees"),
        (["inspect", "masks", "FOLDER", "--out", "OUT"], "is no language model"),
        (["plan", "--init-from", "FOLDER"], "is no language model: train it in Python"),
    ],
)
def test_commands_of_texts_reject_it_in_a_line(folder, tmp_path, capsys, command, words):
    places = {"FOLDER": str(folder), "OUT": str(tmp_path / "out.json")}
    assert main([places.get(word, word) for word in command]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert len(error.splitlines()) == 1
