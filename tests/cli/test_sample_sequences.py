"""Texts of an encoder and decoder: the prompt is the source, and its target is what is written."""

import numpy as np
import pytest
import torch

import jaxformer as jf
from jaxformer.cli.main import main
from tests.support.tokens import write_t5

PROMPT = "the value of a name"


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "t5"
    return folder, *write_t5(folder)


@pytest.fixture(scope="module")
def expected(t5):
    """What transformers writes."""
    _, model, tokenizer = t5
    ids = torch.as_tensor([tokenizer(PROMPT)["input_ids"]])
    made = model.generate(ids, do_sample=False, num_beams=1, max_new_tokens=12)
    return tokenizer.decode(made[0], skip_special_tokens=True)


def test_the_prompt_is_the_source_and_the_target_is_written(capsys, t5, expected):
    folder, _, tokenizer = t5
    flags = ["--greedy", "--tokens", "12"]
    assert main(["sample", str(folder), "--prompt", PROMPT, *flags]) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    ids = ",".join(map(str, tokenizer(PROMPT)["input_ids"]))
    assert main(["sample", str(folder), "--prompt-ids", ids, *flags]) == 0
    assert capsys.readouterr().out == f"{expected}\n"


def test_a_model_in_python_writes_the_same(t5, expected):
    folder, _, tokenizer = t5
    model = jf.load(folder)
    assert model.generate(PROMPT, 12, greedy=True) == expected
    ids = np.array(tokenizer(PROMPT)["input_ids"])
    made = model.generate(ids, 12, greedy=True)
    assert tokenizer.decode(made, skip_special_tokens=True) == expected
    assert len(list(model.stream(PROMPT, 12, seed=3))) == 1


def test_a_source_is_needed(refuse, t5):
    refuse(["sample", t5[0]], 2, "writes the target of a source", "--prompt TEXT")


def test_an_id_outside_the_vocabulary_is_rejected(refuse, t5):
    refuse(["sample", t5[0], "--prompt-ids", "3,999"], 3, "id 999 of the prompt")
