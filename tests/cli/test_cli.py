"""The command line: instant help, and every error one line with its exit code."""

import subprocess
import sys
import time

import pytest

from jaxformer.cli.main import main
from jaxformer.data.corpora import load_corpus
from tests.support.tiny import ROOT, TINY, start, train_arguments

IMPORTS = """
import sys
from jaxformer.cli.main import main
try:
    code = main({arguments!r})
except SystemExit as stop:
    code = stop.code or 0
heavy = [name for name in ("jax", "flax", "numpy", "torch", "matplotlib") if name in sys.modules]
print("\\nCODE", code, "HEAVY", heavy)
"""


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--help"], 0, ["train", "sample"]),
        (["train", "--help"], 0, ["--preset", "nano|baby|", "--learning-rate"]),
        (["sample", "--help"], 0, ["--temperature", "--top-p"]),
        (["port", "--help"], 0, ["--dialect", "--dtype"]),
        (["inspect", ".", "--help"], 0, ["--json"]),
        (["plan", "--help"], 0, ["--topology", "--preset", "nano|baby|"]),
        (["--version"], 0, ["0."]),
        ([], 2, ["usage: jaxformer COMMAND"]),
        (["train", "--steps", "-5"], 2, []),
        (["train", "--preset", "nope"], 2, []),
        (["sample", ".", "--temperature", "0"], 2, []),
        (["port", "a", "b", "--dtype", "int8"], 2, []),
    ],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, list) else str(x),
)
def test_what_needs_no_computing_answers_before_jax_is_imported(arguments, code, words):
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS.format(arguments=arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout.endswith(f"CODE {code} HEAVY []\n"), done.stdout[-200:]
    for word in words:
        assert word in done.stdout


def test_the_entry_points_are_the_same_command():
    texts = [
        subprocess.run(
            [sys.executable, *entry_point, "--help"],
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        ).stdout
        for entry_point in (["train.py"], ["-m", "jaxformer", "train"])
    ]
    assert texts[0] == texts[1]
    assert texts[0].startswith("usage: jaxformer train")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--steps -5", ["steps must be positive: got -5"]),
        ("--steps abc", ["--steps", "'abc'"]),
        ("--steps", ["--steps"]),
        ("--steps 1.5", ["--steps must be a whole number", "'1.5'"]),
        ("--block-size 1e3", ["--block-size must be a whole number", "'1e3'"]),
        ("--learning-rate inf", ["learning_rate must be finite: got inf"]),
        ("--learning-rate nan", ["learning_rate must be finite: got nan"]),
        ("--learning-rate -1", ["learning_rate must be positive: got -1"]),
        (
            "--learning-rate 5e-5 --decay-steps 9",
            ["--min-learning-rate 0.0001 is more than --learning-rate 5e-05: the rate would rise"],
        ),
        ("--resume --out run --preset baby", ["from the run's folder: leave out --preset"]),
        (
            "--optimizer sgd --beta2 0.9",
            ["--beta2 has no effect but with --optimizer adamw, muon or lion"],
        ),
        ("--optimizer lion --eps 1e-6", ["--eps has no effect but with --optimizer adamw or muon"]),
        (
            "--schedule constant --decay-steps 9",
            ["--decay-steps has no effect with --schedule constant"],
        ),
        ("--weight-decay -0.1", ["weight_decay must not be negative: got -0.1"]),
        ("--residual-dropout 1", ["residual_dropout must be in [0, 1): got 1"]),
        ("--num-heads 3", ["d_model=128, num_heads=3"]),
        ("--seed -1", ["seed must be in [0, 2^63): got -1"]),
        ("--batch-size 10 --accumulation 4", ["batch_size=10, accumulation=4"]),
        ("--profile 0", ["--profile must be at least 1 step: got 0"]),
        ("--remat some", ["--remat", "some", "dots"]),
        ("--attention-kernel flash", ["--attention-kernel", "flash", "splash"]),
        ("--dtype float8", ["--dtype", "float8", "bfloat16"]),
        ("--stepz 5", ["--stepz", "did you mean --steps?"]),
        ("--learning_rte 5", ["did you mean --learning-rate or --min-learning-rate?"]),
        ("--resum", ["did you mean --resume?"]),
        ("surplus", ["surplus"]),
        ("--preset nope", ["--preset nope is unknown: choose among nano, baby, char-lm, gpt2-sm"]),
        ("--preset=nope", ["--preset nope is unknown"]),
        ("--data nowhere.txt", ["--data nowhere.txt: does not exist", "tiny-shakespeare"]),
        ("--data .", ["is a folder, not a text file"]),
        ("--encoding klingon", ["--encoding klingon"]),
        ("--vocab-size 3", ["--vocab-size 3 is less than the"]),
        ("--clip-norm none", ["--clip-norm must be {None}|FLOAT: got none"]),
        ("--fresh-optimizer", ["--fresh-optimizer goes with --init-from"]),
        ("--ignore head", ["--ignore goes with --init-from"]),
        ("--cast", ["--cast goes with --init-from or --resume"]),
        ("--tracker nosuch", ["nosuch", "tensorboard"]),
        ("--head-dim 3 --positions rotary", ["an even number of a head's dimensions: got 3"]),
        ("--no-causal", ["training on the next token needs a causal model", "causal=False"]),
        ("--lora-rank 4", ["--lora-rank trains adapters alone", "name it with --init-from"]),
        ("--lora_alpha 8", ["--lora-alpha has no effect without --lora-rank"]),
        ("--preset=", ["--preset '' is unknown: choose among nano"]),
        ("--scan-layers yes", ["--scan-layers takes no value, and got yes: write it alone"]),
        ("--no-scan-layers=false --steps 3", ["--no-scan-layers takes no value, and got false"]),
        ("--out yes yes", ["unrecognized options: yes"]),
        ("--preset=no_pe", ["--preset no_pe is unknown"]),
        ("--preset nanno", ["--preset nanno is unknown (did you mean nano?): choose among nano"]),
        ("--out=", ["--out must name a folder: got ''"]),
        ("--resume --out=", ["--out must name a folder: got ''"]),
        ("--out run\udcff", [r"--out must be a name in UTF-8: got b'run\xff'"]),
        ("--data=", ["data must name a corpus, a text file or a folder of tokens: got ''"]),
        ("--lora-alpha 8", ["--lora-alpha has no effect without --lora-rank"]),
        ("--lora-targets=o_proj", ["--lora-targets has no effect without --lora-rank"]),
        ("--decay-share 0.5", ["--decay-share has no effect but with --schedule wsd"]),
        (
            "--data tiny-shakespeare --encoding latin-1",
            ["--encoding has no effect but on a text file"],
        ),
    ],
)
def test_wrong_settings_are_refused(refuse, text, flags, words):
    data = [] if "--data" in flags else ["--data", text]
    refuse(["train", *data, "--devices", 1, *flags.split()], 2, *words)


def test_a_service_without_its_package_is_refused(refuse, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refuse(train_arguments(text, "out", "--tracker", "wandb"), 2, "[wandb]'")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["is empty"]),
        (b"too short", ["training split has 8 characters, a window needs 9"]),
        (b"good \xff bad" * 99, ["is not utf-8: byte 0xff at offset 5", "--encoding"]),
        ("good".encode("utf-16") * 99, ["is not utf-8: byte 0xff at offset 0", "--encoding"]),
    ],
    ids=["empty", "short", "latin-1", "utf-16"],
)
def test_texts_that_cannot_be_learnt_are_refused(refuse, tmp_path, content, words):
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    refuse(train_arguments(path, "out"), 3, *words)


@pytest.mark.parametrize(
    ("encoding", "code", "words"),
    [
        ("utf-7", 3, ["half a character, U+D800, at position 0"]),
        ("undefined", 3, ["is not undefined"]),
        ("ascii", 3, ["byte 0xff at offset 5"]),
        ("rot13", 2, ["Python knows no such encoding"]),
        ("", 2, ["Python knows no such encoding"]),
    ],
)
def test_encodings_that_do_not_fit_are_refused(refuse, tmp_path, encoding, code, words):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"+2AA-" * 200 if encoding == "utf-7" else b"+2AA-\xff" * 200)
    refuse(train_arguments(path, "out", "--encoding", encoding), code, *words)


def test_a_binary_file_with_an_encoding_needs_no_other(refuse, tmp_path):
    path = tmp_path / "bad.txt"
    path.write_bytes(b"\0bad" * 200)
    line = refuse(train_arguments(path, "out", "--encoding", "latin-1"), 3, "is no text")
    assert "--encoding" not in line


@pytest.mark.parametrize("encoding", ["utf-8", "UTF8", "U8", "utf_8"])
def test_a_byte_order_mark_is_no_character(encoding, tmp_path):
    path = tmp_path / "marked.txt"
    path.write_bytes("\ufefftext".encode())
    assert load_corpus(str(path), encoding=encoding).text == "text"


def test_a_device_is_no_text(refuse):
    refuse(["train", "--data", "/dev/null"], 2, "is a device or a pipe, not a text file")


@pytest.mark.parametrize("flag", ["--out", "--data", "--init-from"])
def test_a_name_too_long_for_the_disk_is_refused(refuse, text, flag):
    name = "x" * 5000
    given = (name, "out") if flag == "--data" else (text, "out", flag, name)
    refuse(train_arguments(*given), 7, "File name too long")


def test_a_text_may_not_be_too_short_for_training_either(refuse, text):
    words = "training split has", "a window needs 4097", "--context-length"
    refuse(["train", "--data", text, "--context-length", 4096, "--devices", 1], 3, *words)


def test_a_batch_that_does_not_divide_is_refused_with_the_sizes_that_do(refuse, text):
    arguments = train_arguments(text, "out", "--devices", 3, "--batch-size", 10)
    refuse(arguments, 9, "--batch-size 10", "3 devices", "use 9 or 12")
    arguments = train_arguments(text, "out", "--devices", 8, "--accumulation", 2)
    refuse(arguments, 9, "--batch-size 4", "8 devices and 2 micro-batches", "use 16,")


def test_a_flag_may_have_underscores(refuse, text):
    """What is looked for before all settings are read is found too."""
    refuse(train_arguments(text, "out", "--init_from", "nowhere"), 4, "nowhere does not exist")


def test_more_devices_than_there_are_are_refused(refuse, text):
    refuse(train_arguments(text, "out", "--devices", 9), 9, "--devices 9: this process has 8")


def test_an_unknown_command_is_refused(refuse):
    refuse(["trian"], 2, "there is no command trian", "train or sample")


def test_a_file_in_the_place_of_the_folder_is_refused(refuse, text, tmp_path):
    words = "cannot write to", "text.txt: it is a file, not a folder: give another --out"
    refuse(train_arguments(text, text), 7, *words)
    refuse(train_arguments(text, text / "run"), 7, "cannot write to")


def test_a_folder_that_may_not_be_written_to_is_refused(refuse, text, tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", denied)
    refuse(train_arguments(text, "out"), 7, "cannot write to out: Permission denied")


def test_a_real_process_says_one_line_and_leaves_nothing(text, empty_folder):
    began = time.monotonic()
    process = start("train", "--data", "nowhere.txt", "--out", "deep/er/run", *TINY)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert out == ""
    assert err.startswith("jaxformer: --data nowhere.txt: does not exist")
    assert err.count("\n") == 1
    assert list(empty_folder.iterdir()) == []
    assert time.monotonic() - began < 60


def test_debug_shows_the_traceback(text, capsys):
    assert main(["train", "--data", "nowhere.txt", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.splitlines()[-1].startswith("jaxformer: --data nowhere.txt")


def test_a_bug_is_one_line_and_code_1(text, capsys, monkeypatch):
    monkeypatch.setattr("jaxformer.training.loop.RunFolder", lambda *_, **__: 1 / 0)
    assert main(train_arguments(text, "out")) == 1
    err = capsys.readouterr().err
    assert err.splitlines() == [
        "jaxformer: ZeroDivisionError: division by zero (a bug in jaxformer; --debug shows where)"
    ]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (MemoryError(), "--batch-size"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"), "--accumulation"),
        (OSError(28, "No space left on device", "out/x"), "out/x: No space left on device"),
    ],
)
def test_a_lack_of_memory_or_disk_is_code_7(text, capsys, monkeypatch, error, words, empty_folder):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("jaxformer.training.initial_state.plan_parameters", fail)
    assert main(train_arguments(text, "out")) == 7
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert list(empty_folder.iterdir()) == []


def test_without_arguments_the_main_job_is_run(monkeypatch, tmp_path):
    import jaxformer.training.loop

    calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        jaxformer.training.loop, "train", lambda *a, **k: calls.append((a[0].config, a[1], k))
    )
    assert main(["train"]) == 0
    ((config, out, settings),) = calls
    assert config.data == "python-docs"
    assert config.steps == 2000
    assert str(out) == "runs/nano"
    assert settings.pop("reporter").__name__ == "Reporter"
    assert settings == {"resume": False, "cast": False, "trackers": (), "profile_steps": None}
