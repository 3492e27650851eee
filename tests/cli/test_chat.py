"""``jaxformer sample --chat``: the prompt in the chat template, as transformers makes it."""

import importlib.util
import json

import pytest
import transformers

from jaxformer.cli.main import main
from jaxformer.data.chat import render_chat
from jaxformer.errors import TextError, UsageError
from tests.cli.test_sample_ported import expected, sample, write_tokenizer
from tests.support.ported import gpt2_state, hugging_face, run_rejected

# With blocks on lines of their own, special tokens, a filter, a loop that breaks and an error.
TEMPLATE = """{{ bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'system' %}
        {{- raise_exception('no system messages') }}
    {%- endif %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
    <{{ message['role'] }}> {{ message['content'] | trim | tojson }}{{ eos_token }}
{% endfor %}
{%- if add_generation_prompt %}
the {% endif %}"""
SETTINGS = {
    "chat_template": TEMPLATE,
    "bos_token": "<end>",
    "eos_token": {"content": "<end>", "lstrip": False},
}
MESSAGES = [{"role": "user", "content": " that hät \n"}]


@pytest.fixture
def folder(tmp_path):
    path = hugging_face(tmp_path / "hf", gpt2_state())
    write_tokenizer(path / "tokenizer.json")
    (path / "tokenizer_config.json").write_text(json.dumps(SETTINGS))
    return path


def files_in(folder):
    return {path.name: path for path in folder.iterdir()}


def by_transformers(folder):
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<end>", eos_token="<end>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer, {"add_generation_prompt": True}


def test_a_conversation_is_the_text_that_transformers_makes(folder):
    tokenizer, more = by_transformers(folder)
    expected = tokenizer.apply_chat_template(MESSAGES, tokenize=False, **more)
    assert "hät" in expected
    assert render_chat(MESSAGES, files_in(folder)) == expected


@pytest.mark.parametrize("form", ["jinja", "json", "several"])
def test_the_template_is_found_in_every_form(folder, form):
    before = render_chat(MESSAGES, files_in(folder))
    settings = {name: value for name, value in SETTINGS.items() if name != "chat_template"}
    if form == "jinja":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    elif form == "json":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    else:
        several = {"tools": "no", "default": TEMPLATE}
        settings["chat_template"] = [{"name": k, "template": v} for k, v in several.items()]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert render_chat(MESSAGES, files_in(folder)) == before


def test_the_answer_continues_the_template(capsys, folder):
    tokenizer, more = by_transformers(folder)
    messages = [{"role": "user", "content": "the cat"}]
    ids = tokenizer.apply_chat_template(messages, return_dict=False, **more)
    # A text of the model would begin where the prompt's ids end.
    made = expected(folder, ids, 3)
    end = made.index(30) if 30 in made else len(made)
    flags = ["--chat", "--prompt", "the cat", "--greedy", "--tokens", 3]
    text = sample(capsys, folder, *flags)
    whole = tokenizer.decode([*ids, *made[:end]], skip_special_tokens=True)
    start = tokenizer.decode(ids, skip_special_tokens=True)
    assert text.rstrip("\n") == whole[len(start) :].rstrip("\N{REPLACEMENT CHARACTER}")


def test_what_cannot_work_is_said_in_a_line(folder, monkeypatch, capsys):
    with pytest.raises(TextError, match="rejects the prompt: no system messages"):
        render_chat([{"role": "system", "content": "x"}], files_in(folder))
    code, line = run_rejected("sample", folder, "--chat")
    assert (code, "--chat needs --prompt" in line) == (2, True)
    # A template that reaches for Python's inside is stopped by the sandbox.
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(TextError, match="chat template rejects the prompt"):
        render_chat(MESSAGES, files_in(folder))
    find = importlib.util.find_spec
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda n: None if n == "jinja2" else find(n))
        with pytest.raises(UsageError, match=r"\[hf\]'"):
            render_chat(MESSAGES, files_in(folder))
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / name).unlink()
    assert main(["sample", str(folder), "--chat", "--prompt", "the"]) == 2
    assert "the model has no chat template" in capsys.readouterr().err
