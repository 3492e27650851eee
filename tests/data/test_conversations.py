"""Records of prompts and answers: the ids that a model is asked with, and answers that count."""

import gzip
import itertools
import json
import re

import numpy as np
import pytest
import transformers
from tokenizers import processors

from jaxformer.cli.main import main
from jaxformer.data.shards import SplitWriter
from jaxformer.token_data import IGNORED, TokenFolder
from tests.support.tiny import records, train
from tests.support.tokens import tokenizer

END = "<|endoftext|>"
# The answer of the assistant is marked for transformers, which has a tag for it.
CHAT = """{%- for message in messages -%}
<{{ message['role'] }}>
{% if message['role'] == 'assistant' %}BEGIN{{ message['content'] }}{{ eos_token }}
END{% else %}{{ message['content'] }}{{ eos_token }}
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<assistant>
{% endif %}"""
# Thoughts are left out of all answers but the last, as newer models' templates do.
THINKING = CHAT.replace("BEGIN", "BEGIN{% if loop.last %}thought {% endif %}")
TALK = [
    {"role": "user", "content": "What is a module?"},
    {"role": "assistant", "content": "A file of code."},
    {"role": "user", "content": "And a package?"},
    {"role": "assistant", "content": "A folder of modules."},
]
PAIRS = [{"prompt": f"What is {n}?\n", "answer": f"{n} is the number {n}."} for n in range(40)]


@pytest.fixture
def made(tmp_path):
    """The folder of a tokenizer that puts a token before every text, with a chat template."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    known = type(tokenizer()).from_str(tokenizer().to_str())
    known.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, known.token_to_id(END))]
    )
    known.save(str(folder / "tokenizer.json"))
    template = CHAT.replace("BEGIN", "").replace("END", "")
    settings = {"eos_token": END, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write(path, lines):
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def tokenize(source, made, out, *more, workers=1):
    words = ["tokenize", source, "--tokenizer", made, "--out", out, "--workers", workers, *more]
    return main(list(map(str, words)))


def ids_and_targets(split):
    return split.read(0, len(split)).tolist(), split.read_targets(0, len(split)).tolist()


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.jsonl.gz"])
def test_prompts_and_answers(made, tmp_path, capsys, name):
    """Each is encoded by itself: the prompt as ``sample`` encodes it, the answer with its end."""
    source = write(tmp_path / name, PAIRS)
    assert tokenize(source, made, tmp_path / "out", "--val-fraction", 0.25) == 0
    end = tokenizer().token_to_id(END)
    folder = TokenFolder(tmp_path / "out")
    for split, chosen in ((folder.val, PAIRS[::4]), (folder.train, None)):
        ids, targets, starts = [], [], []
        for pair in chosen or [p for n, p in enumerate(PAIRS) if n % 4]:
            starts.append(len(ids))
            prompt, answer = (tokenizer().encode(pair[k]).ids for k in ("prompt", "answer"))
            ids += [end, *prompt, *answer, end]
            targets += [IGNORED] * (1 + len(prompt)) + [*answer, end]
        assert ids_and_targets(split) == (ids, targets)
        assert split.document_starts().tolist() == starts
    assert "tokens of answers count" in capsys.readouterr().out
    assert main(["tokenize", "--check", "--out", str(tmp_path / "out")]) == 0
    (tmp_path / "out" / "train-00000.answers").write_bytes(b"\1" * len(folder.train))
    assert main(["tokenize", "--check", "--out", str(tmp_path / "out")]) == 3


def test_shards_and_workers_change_nothing(made, tmp_path):
    source = write(tmp_path / "pairs.jsonl", PAIRS * 10)
    flags = ["--val-fraction", 0.25]
    assert tokenize(source, made, tmp_path / "one", *flags) == 0
    assert tokenize(source, made, tmp_path / "two", *flags, "--shard-tokens", 77, workers=2) == 0
    one, two = (TokenFolder(tmp_path / name) for name in ("one", "two"))
    assert len(two.train.paths) > 3
    assert ids_and_targets(one.train) == ids_and_targets(two.train)


def test_what_was_written_after_the_last_commit_is_cut_off(tmp_path):
    """Of all three files of a shard, as of a process that was killed."""
    ids = np.arange(500).astype(np.uint16)
    counts = np.random.default_rng(0).random(500) < 0.5
    begins = np.arange(0, 500, 9)

    def write(folder, *cuts, state=None, finish=True):
        folder.mkdir(exist_ok=True)
        writer = SplitWriter(folder, "train", np.dtype(np.uint16), 77, state, has_answers=True)
        for begin, end in itertools.pairwise(cuts):
            inside = begins[(begins >= begin) & (begins < end)] - begin
            writer.add(ids[begin:end], inside, 0, counts[begin:end])
            writer.sync()
            state = writer.state if end == 200 else state
        writer.finish() if finish else writer.sync()
        writer.commit()
        return state, writer

    state, _ = write(tmp_path / "cut", 0, 100, 200, 230, finish=False)
    _, again = write(tmp_path / "cut", 200, 350, 500, state=json.loads(json.dumps(state)))
    _, whole = write(tmp_path / "whole", 0, 200, 500)
    assert again.state == whole.state
    assert again.answers == counts.sum()
    assert {path.name: path.read_bytes() for path in (tmp_path / "cut").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()
    }


def marked(template):
    return template.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")


@pytest.mark.parametrize("kind", ["plain", "marked", "thinking"])
def test_messages_are_those_of_transformers(made, tmp_path, kind):
    """Answers are what the template marks; where it marks nothing, what it adds to the prompt."""
    template = THINKING if kind == "thinking" else CHAT
    if kind != "plain":
        (made / "chat_template.jinja").write_text(marked(template))
    write(tmp_path / "talks.jsonl", [{"messages": TALK}] * 4)
    flags = ["--val-fraction", 0.5]
    assert tokenize(tmp_path / "talks.jsonl", made, tmp_path / "out", *flags) == 0
    reference = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(made / "tokenizer.json"), eos_token=END
    )
    reference.chat_template = marked(template)
    expected = reference.apply_chat_template(
        TALK, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, targets = ids_and_targets(TokenFolder(tmp_path / "out").val)
    assert ids == expected["input_ids"] * 2
    counts = np.array(expected["assistant_masks"] * 2, bool)
    assert 0 < counts.sum() < len(counts)
    np.testing.assert_array_equal(np.array(targets) >= 0, counts)
    if kind == "thinking":
        answers = tokenizer().decode(np.array(ids)[counts], skip_special_tokens=False)
        assert answers == 2 * f"A file of code.{END}\nthought A folder of modules.{END}\n"


def test_a_template_that_changes_its_marks_is_rejected(made, tmp_path, capsys):
    template = "{% set all %}" + marked(CHAT) + "{% endset %}{{ all[-140:] }}"
    (made / "chat_template.jinja").write_text(template)
    source = write(tmp_path / "talks.jsonl", [{"messages": TALK}])
    assert tokenize(source, made, tmp_path / "out") == 3
    error = capsys.readouterr().err
    assert "line 1 of" in error
    assert "changes what it marks" in error


@pytest.mark.tier("full")
def test_a_run_trains_on_answers(made, tmp_path, capsys):
    write(tmp_path / "pairs.jsonl", PAIRS)
    assert tokenize(tmp_path / "pairs.jsonl", made, tmp_path / "out", "--val-fraction", 0.2) == 0
    packed = ["--sampling", "epoch", "--packing"]
    assert train(tmp_path / "out", tmp_path / "run", "--steps", 20, *packed) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the tokens of answers alone count" in shown
    found = [r["val_loss"] for r in records(tmp_path / "run") if "val_loss" in r]
    assert found[-1] < found[0]


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([*PAIRS, {"prompt": "a"}], "line 41 of .* has neither a prompt and an answer"),
        ([{"prompt": "a", "answer": ""}], "line 1 of .* has no texts in 'prompt' and 'answer'"),
        ([{"messages": TALK[:1]}], "has no message of the role 'assistant'"),
        ([{"messages": [{"role": "user"}]}], "without the texts 'role' and 'content'"),
        ([{"messages": "hello"}], "has no list in 'messages'"),
    ],
)
def test_damaged_records_are_rejected(made, tmp_path, capsys, lines, reason):
    source = write(tmp_path / "pairs.jsonl", lines)
    assert tokenize(source, made, tmp_path / "out") == 3
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(reason, error)


def test_messages_need_a_template_that_keeps_answers(made, tmp_path, capsys):
    source = write(tmp_path / "talks.jsonl", [{"messages": TALK}])
    settings = json.loads((made / "tokenizer_config.json").read_text())
    # An answer that is no longer the last is left out, as templates of thinking models do.
    settings["chat_template"] = "{{ messages[-1]['content'] }}"
    (made / "tokenizer_config.json").write_text(json.dumps(settings))
    assert tokenize(source, made, tmp_path / "out") == 3
    assert "does not write where it asks for them" in capsys.readouterr().err
    (made / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    assert tokenize(source, made, tmp_path / "out") == 3
    assert "there is no chat template" in capsys.readouterr().err
