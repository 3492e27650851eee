"""Settings of generation that nobody follows are named where a model is loaded to write."""

import json
import warnings

import pytest
from transformers import BartConfig, BartForConditionalGeneration

from jaxformer import load
from jaxformer.cli.main import main
from jaxformer.porting.train_states import read_warm_start
from tests.support.tokens import tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bart") / "hf"
    config = BartConfig(
        vocab_size=11, d_model=8, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=8,
        decoder_ffn_dim=8, encoder_attention_heads=2, decoder_attention_heads=2,
        max_position_embeddings=16, pad_token_id=1, bos_token_id=0, eos_token_id=2,
        decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    BartForConditionalGeneration(config).save_pretrained(folder)
    return folder


@pytest.fixture
def write(folder):
    """Gives the folder these settings of generation, or none."""

    def give(settings, name="generation_config.json"):
        (folder / "generation_config.json").unlink(missing_ok=True)
        known = json.loads((folder / name).read_text()) if name == "config.json" else {}
        (folder / name).write_text(json.dumps(known | settings))

    return give


SETTINGS = {"no_repeat_ngram_size": 2, "repetition_penalty": 1.0, "num_beams": 1, "min_length": 3}


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_those_with_an_effect_are_named_in_one_line(folder, write, name, tmp_path, capsys):
    write(SETTINGS, name)
    words = f"{name} sets min_length=3, no_repeat_ngram_size=2, which jaxformer does not follow"
    with pytest.warns(UserWarning, match=words):
        load(folder)
    assert main(["sample", str(folder), "--prompt-ids", "3,4", "--tokens", "2"]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [words in line for line in lines].count(True) == 1


def test_a_run_that_starts_from_a_model_names_them_and_its_plan_does_not(folder, write, tmp_path):
    write(SETTINGS)
    (tmp_path / "meta.json").write_text(tokenizer().to_str())
    words = "sets min_length=3, no_repeat_ngram_size=2, which jaxformer does not follow"
    with pytest.warns(UserWarning, match=words):
        read_warm_start(folder, fresh=True, meta=tmp_path / "meta.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_warm_start(folder, fresh=True, meta=tmp_path / "meta.json", with_arrays=False)


@pytest.mark.parametrize("settings", [{}, {"max_length": 9, "do_sample": True, "top_k": 5}])
def test_others_are_not(folder, write, settings):
    write({"suppress_tokens": [], "repetition_penalty": 1, "bad_words_ids": None, **settings})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(folder)
