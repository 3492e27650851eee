"""``jaxformer sample``: text from a finished run."""

import re
import shutil

import numpy as np
import pytest

from jaxformer.cli.main import main
from jaxformer.data.text_generation import GenerationSpeed
from tests.support.tiny import manifest, snapshot, start, train


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("nowhere", 4, ["nowhere does not exist"]),
        (".", 4, [". is not a checkpoint: it holds nothing"]),
        ("--temperature 0", 2, ["--temperature must be at least", "--greedy"]),
        ("--temperature inf", 2, ["--temperature must be finite: got inf"]),
        ("--temperature 1e39", 2, ["--temperature must be finite in float32: got 1e+39"]),
        ("--top-k 0", 2, ["--top-k must be at least 1: got 0"]),
        ("--top-p 1.5", 2, ["--top-p must be in (0, 1]: got 1.5"]),
        ("--tokens 0", 2, ["--tokens must be at least 1: got 0"]),
        ("--draft-tokens 0", 2, ["--draft-tokens must be at least 1: got 0"]),
        ("--draft nowhere", 4, ["nowhere does not exist"]),
        ("--rows 0", 2, ["--rows must be at least 1: got 0"]),
        ("--prompts nowhere", 2, ["--prompts nowhere cannot be read", "No such file"]),
        ("--weights-dtype int4", 2, ["--weights-dtype", "int4", "int8"]),
        ("--weights-check a", 2, ["--weights-check needs --weights-dtype"]),
        (
            "--weights-dtype int8 --weights-check nowhere",
            2,
            ["--weights-check nowhere cannot be read", "No such file"],
        ),
        ("--rows 2", 2, ["--rows has no effect without --prompts"]),
        ("--draft-tokens=2", 2, ["--draft-tokens has no effect without --draft"]),
        ("--greedy --top-k 5", 2, ["--top-k has no effect with --greedy"]),
        ("--temperature 2 --greedy", 2, ["--temperature has no effect with --greedy"]),
        ("--prompts a --prompt b", 2, ["--prompts and --prompt exclude each other"]),
        ("--prompts a --samples 2", 2, ["--prompts and --samples exclude each other"]),
        ("--samples -1", 2, ["--samples must be at least 1: got -1"]),
        ("--seed -1", 2, ["--seed must be in [0, 2^63)"]),
        ("--step 10 --best", 2, ["--step and --best exclude each other"]),
        ("--step 11", 4, ["has no step 11: it has 10, 20, 30"]),
        ("--prompt xyz", 3, ["character 'x' (U+0078) at position 0", "--unknown skip|replace"]),
        ("--unknown ignore", 2, ["--unknown", "ignore", "replace"]),
        ("--temprature 1", 2, ["did you mean --temperature?"]),
    ],
)
def test_what_cannot_work_is_refused(refuse, whole, flags, code, words):
    path = [] if flags in ("nowhere", ".") else [whole]
    refuse(["sample", *path, *flags.split()], code, *words)


def test_files_of_another_encoding_are_named(refuse, whole, tmp_path, capsys):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"\xf6")
    flags = ["--weights-dtype", "int8", "--weights-check"]
    for words in (["--prompts"], flags):
        refuse(["sample", whole, *words, path], 3, "is not UTF-8: 'utf-8' codec can't decode")
    path.write_text("the\n", encoding="utf-8-sig")
    assert main(["sample", str(whole), "--prompts", str(path), "--tokens", "2"]) == 0
    assert "\nthe" in capsys.readouterr().out


def test_the_folder_is_required(refuse):
    refuse(["sample"], 2, "PATH")


def test_a_text_is_not_a_checkpoint(refuse, text):
    refuse(["sample", text], 4, "text.txt is not a checkpoint", "name a run folder")


def sample(capsys, whole, *flags):
    assert main(["sample", str(whole), *map(str, flags)]) == 0
    captured = capsys.readouterr()
    assert SPEED.fullmatch(captured.err)
    return captured.out


SPEED = re.compile(
    r"first token after [\d.e+-]+ s(, compilation included(; first token after [\d.e+-]+ s)?)?"
    r"(; [\d,]+ tokens/s after it)?\n"
)


def test_the_same_seed_writes_the_same_text_and_another_another(capsys, whole):
    first = sample(capsys, whole, "--tokens", 60, "--seed", 3)
    assert len(first) == 61
    assert first[-1] == "\n"
    assert set(first) <= set(manifest(whole, 30)["vocabulary"])
    assert sample(capsys, whole, "--tokens", 60, "--seed", 3) == first
    assert sample(capsys, whole, "--tokens", 60, "--seed", 4) != first


def test_greedy_text_needs_no_seed_and_begins_with_the_prompt(capsys, whole):
    texts = {
        sample(capsys, whole, "--prompt", "the cat", "--tokens", 20, "--greedy", "--seed", s)
        for s in (0, 1)
    }
    assert len(texts) == 1
    assert len(text := texts.pop()) == 7 + 20 + 1
    assert text.startswith("the cat")
    nearly = sample(capsys, whole, "--prompt", "the cat", "--tokens", 20, "--temperature", 1e-6)
    assert nearly == text


def test_a_draft_changes_no_greedy_text(capsys, whole):
    flags = ("--prompt", "the cat", "--tokens", 30, "--greedy")
    alone = sample(capsys, whole, *flags)
    assert sample(capsys, whole, *flags, "--draft", whole, "--draft-tokens", 2) == alone


@pytest.mark.tier("full")
def test_a_draft_has_the_models_characters(refuse, whole, tmp_path_factory, capsys):
    folder = tmp_path_factory.mktemp("draft")
    (folder / "text.txt").write_text("another alphabet: xyz? " * 300)
    assert train(folder / "text.txt", folder / "run", "--steps", 1, "--eval-tokens", 100) == 0
    capsys.readouterr()
    refuse(["sample", whole, "--draft", folder / "run"], 2, "has other characters than the model")


@pytest.mark.tier("full")
def test_narrow_weights_write_and_say_what_they_cost(capsys, whole, text):
    flags = ["--weights-dtype", "int8", "--weights-check", str(text), "--tokens", "20", "--greedy"]
    assert main(["sample", str(whole), *flags]) == 0
    captured = capsys.readouterr()
    cost, speed = captured.err.strip().split("\n")
    assert re.fullmatch(
        r"int8 weights: (the same|other) choices on this text: the most probable token is another "
        r"at [\d,]+ of [\d,]+ places, and .* tokens( are the same)?; perplexity [\d.e+]+ becomes "
        r"[\d.e+]+ \([+-][\d.]+%\); logits differ by at most [\d.e-]+ nats; parameters take "
        r"[\d.]+ MiB in place of [\d.]+",
        cost,
    )
    assert SPEED.fullmatch(speed + "\n")
    assert len(captured.out.strip("\n")) > 0


def test_a_file_of_prompts_gets_the_text_of_each(capsys, refuse, whole, tmp_path):
    file = tmp_path / "prompts.txt"
    lines = ["the", "", "the cat sat", "a"]
    file.write_text("\n".join(lines) + "\n")
    flags = ["--tokens", "9", "--rows", "2", "--seed", "5"]
    assert main(["sample", str(whole), "--prompts", str(file), *flags]) == 0
    captured = capsys.readouterr()
    assert re.fullmatch(r"36 tokens of 4 texts in [\d.]+ s, .* included\n", captured.err)
    texts = {}
    for part in ("\n\n" + captured.out.removesuffix("\n")).split("\n\n--- ")[1:]:
        title, text = part.split(" ---\n", 1)
        texts[title] = text
    for number, line in enumerate(lines):
        alone = sample(capsys, whole, "--prompt", line, "--tokens", 9, "--seed", 5 + number)
        assert texts[f"{number + 1} of 4"] == alone.removesuffix("\n")
    file.write_text("the\nxyz\n")
    refuse(
        ["sample", whole, "--prompts", file], 3, "line 2 of", "(U+0078)", "--unknown skip|replace"
    )
    file.write_text("")
    refuse(["sample", whole, "--prompts", file], 2, "holds no line")


def test_several_samples_are_numbered_and_differ(capsys, whole):
    text = sample(capsys, whole, "--tokens", 30, "--samples", 2, "--prompt", "a")
    first, second = text.split("--- 2 of 2 ---\n")
    assert first.startswith("--- 1 of 2 ---\na")
    assert second.startswith("a")
    assert first.split("---\n")[1].strip() != second.strip()
    alone = sample(capsys, whole, "--tokens", 30, "--seed", 1, "--prompt", "a")
    assert alone == second


def test_unknown_characters_of_the_prompt_are_skipped_or_replaced(capsys, whole):
    flags = ["--tokens", 20, "--greedy", "--prompt"]
    for unknown, prompt in (("skip", "the"), ("replace", "the  ")):
        text = sample(capsys, whole, *flags, "theXX", "--unknown", unknown)
        same = sample(capsys, whole, *flags, prompt)
        assert text.removeprefix("theXX") == same.removeprefix(prompt)


def test_an_older_and_the_best_step_can_be_asked_for(capsys, whole):
    losses = {step: manifest(whole, step)["val_loss"] for step in (10, 20, 30)}
    texts = {step: sample(capsys, whole, "--tokens", 60, "--step", step) for step in (10, 20, 30)}
    assert len(set(texts.values())) == 3
    best = sample(capsys, whole, "--tokens", 60, "--best")
    assert best == texts[min(losses, key=lambda step: losses[step])]
    assert sample(capsys, whole, "--tokens", 60) == texts[30]


def test_a_damaged_checkpoint_is_refused_by_number_and_passed_over_otherwise(
    refuse, capsys, whole, empty_folder
):
    shutil.copytree(whole, empty_folder / "run")
    (empty_folder / "run" / "checkpoints" / "30" / "arrays" / "_METADATA").unlink()
    refuse(["sample", "run", "--step", 30], 4, "30 is damaged", "missing _METADATA")
    before = snapshot(empty_folder)
    assert main(["sample", "run", "--greedy", "--tokens", "5"]) == 0
    captured = capsys.readouterr()
    damage, speed = captured.err.splitlines()
    assert "30 is damaged" in damage
    assert SPEED.fullmatch(speed + "\n")
    expected = sample(capsys, whole, "--greedy", "--tokens", 5, "--step", 20)
    assert captured.out == expected
    assert snapshot(empty_folder) == before


@pytest.mark.tier("full")
def test_a_reader_that_leaves_early_is_no_error(whole):
    process = start("sample", whole, "--tokens", 100_000)
    assert process.stdout.read(5)
    process.stdout.close()
    assert process.wait(timeout=120) == 141
    assert process.stderr.read() == ""
    process.stderr.close()


def test_the_speed_is_said_apart_from_the_text_and_from_compilation(capsys, whole, monkeypatch):
    now = 0.0
    monkeypatch.setattr("jaxformer.data.text_generation.time.perf_counter", lambda: now)

    def chunks(*steps):
        nonlocal now
        for seconds, tokens, compiles in steps:
            now += seconds
            if compiles:
                speed._notice("/jax/core/compile/backend_compile_duration", seconds)
            yield np.zeros((1, tokens), np.int32)

    def read(*steps):
        nonlocal now
        for _ in speed.watch(chunks(*steps)):
            now += 100  # the reader's time does not count

    speed = GenerationSpeed()
    read((3.0, 1, True), (2.0, 16, True), (0.5, 16, False))
    assert str(speed) == "first token after 3 s, compilation included; 32 tokens/s after it"
    read((0.25, 1, False), (0.5, 48, False))
    assert str(speed) == (
        "first token after 3 s, compilation included; first token after 0.25 s; "
        "64 tokens/s after it"
    )
    monkeypatch.undo()
    assert main(["sample", str(whole), "--tokens", "60", "--greedy"]) == 0
    assert re.search(r"; [\d,]+ tokens/s after it\n$", capsys.readouterr().err)
