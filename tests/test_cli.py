"""The command line: instant help, and every refusal one line with its exit code."""

import fcntl
import json
import shutil
import subprocess
import sys
import time

import jax
import pytest

from jaxformer.cli import main
from jaxformer.training.run_folder import RunFolder
from tests.tiny import ROOT, TEXT, TINY, manifest, snapshot, start, steps, train_arguments


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of 20 steps, only to be read, and its text."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "text.txt").write_text(TEXT)
    assert main(train_arguments(folder / "text.txt", folder / "run", "--steps", 20)) == 0
    return folder


@pytest.fixture
def refuse(capsys, caplog, tmp_path):
    """Runs a command that must end with ``code``, one line, nothing compiled, nothing changed."""

    def check(arguments, code, *words):
        before = snapshot(tmp_path)
        with jax.log_compiles():
            assert main([str(a) for a in arguments]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = captured.err.splitlines()
        assert len(lines) == 1, captured.err
        assert lines[0].startswith("jaxformer: ")
        for word in words:
            assert word in lines[0]
        assert [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()] == []
        assert snapshot(tmp_path) == before
        return lines[0]

    return check


IMPORTS = """
import sys
from jaxformer.cli import main
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
        (["train", "--help"], 0, ["--preset nano|baby|char-lm|gpt2-small", "--learning-rate"]),
        (["sample", "--help"], 0, ["--temperature", "--top-p"]),
        (["--version"], 0, ["0."]),
        ([], 2, ["usage: jaxformer COMMAND"]),
        (["train", "--steps", "-5"], 2, []),
        (["train", "--preset", "nope"], 2, []),
        (["sample", ".", "--temperature", "0"], 2, []),
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


def test_the_front_doors_are_the_same_command():
    texts = [
        subprocess.run(
            [sys.executable, *door, "--help"], capture_output=True, text=True, cwd=ROOT, check=True
        ).stdout
        for door in (["train.py"], ["-m", "jaxformer", "train"])
    ]
    assert texts[0] == texts[1]
    assert texts[0].startswith("usage: jaxformer train")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--steps -5", ["steps must be positive: got -5"]),
        ("--steps abc", ["--steps", "'abc'"]),
        ("--steps", ["--steps"]),
        ("--steps 1.5", ["--steps", "'1.5'"]),
        ("--learning-rate inf", ["learning_rate must be finite: got inf"]),
        ("--learning-rate nan", ["learning_rate must be finite: got nan"]),
        ("--learning-rate -1", ["learning_rate must be positive: got -1"]),
        ("--weight-decay -0.1", ["weight_decay must not be negative: got -0.1"]),
        ("--residual-dropout 1", ["residual_dropout must be in [0, 1): got 1"]),
        ("--num-heads 3", ["d_model=128, num_heads=3"]),
        ("--seed -1", ["seed must be in [0, 2^63): got -1"]),
        ("--batch-size 10 --accumulation 4", ["batch_size=10, accumulation=4"]),
        ("--dtype float8", ["--dtype", "float8", "bfloat16"]),
        ("--stepz 5", ["--stepz", "did you mean --steps?"]),
        ("--learning_rte 5", ["did you mean --learning-rate?"]),
        ("--resum", ["did you mean --resume?"]),
        ("surplus", ["surplus"]),
        ("--preset nope", ["--preset nope is unknown: choose among nano, baby, char-lm, gpt2-sm"]),
        ("--preset=nope", ["--preset nope is unknown"]),
        ("--data nowhere.txt", ["--data nowhere.txt: does not exist", "tiny-shakespeare"]),
        ("--data .", ["is a folder, not a text file"]),
        ("--encoding klingon", ["--encoding klingon"]),
        ("--vocab-size 3", ["--vocab-size 3 is less than the"]),
        ("--tracker nosuch", ["nosuch", "tensorboard"]),
    ],
)
def test_wrong_settings_are_refused(refuse, text, flags, words):
    data = [] if "--data" in flags else ["--data", text]
    refuse(["train", *data, "--devices", 1, *flags.split()], 2, *words)


def test_a_service_without_its_package_is_refused(refuse, text, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refuse(train_arguments(text, "out", "--tracker", "wandb"), 2, "pip install 'jaxformer[wandb]'")


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


def test_a_text_may_not_be_too_short_for_training_either(refuse, text):
    words = "training split has", "a window needs 4097", "--context-length"
    refuse(["train", "--data", text, "--context-length", 4096, "--devices", 1], 3, *words)


def test_a_batch_that_does_not_divide_is_refused_with_the_sizes_that_do(refuse, text):
    arguments = train_arguments(text, "out", "--devices", 3, "--batch-size", 10)
    refuse(arguments, 9, "--batch-size 10", "3 devices", "use 9 or 12")
    arguments = train_arguments(text, "out", "--devices", 8, "--accumulation", 2)
    refuse(arguments, 9, "--batch-size 4", "8 devices and 2 micro-batches", "use 16,")


def test_more_devices_than_there_are_are_refused(refuse, text):
    refuse(train_arguments(text, "out", "--devices", 9), 9, "--devices 9: this process has 8")


def test_an_unknown_command_is_refused(refuse):
    refuse(["trian"], 2, "there is no command trian", "train or sample")


def test_a_file_in_the_place_of_the_folder_is_refused(refuse, text, tmp_path):
    refuse(train_arguments(text, text), 7, "cannot write to", "text.txt")
    refuse(train_arguments(text, text / "run"), 7, "cannot write to")


def test_a_folder_that_may_not_be_written_to_is_refused(refuse, text, tmp_path, monkeypatch):
    def denied(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.mkdir", denied)
    refuse(train_arguments(text, "out"), 7, "cannot write to out: Permission denied")


class TestRunFolders:
    @pytest.fixture
    def here(self, run, empty_folder):
        """A finished run, linked into the folder that may not change."""
        shutil.copytree(run, empty_folder, dirs_exist_ok=True)
        return empty_folder

    def test_a_folder_that_holds_a_run_needs_resume(self, refuse, here):
        refuse(train_arguments("text.txt", "run"), 2, "run already holds a run", "--resume")

    @pytest.mark.parametrize("left", ["config.json", "metrics.jsonl"])
    def test_a_run_that_came_no_further_than_its_first_file_counts(self, refuse, text, left, here):
        (here / "begun").mkdir()
        (here / "begun" / left).write_text("{}")
        refuse(train_arguments(text, "begun"), 2, "begun already holds a run")

    def test_resuming_without_a_run_is_refused(self, refuse, text, here):
        refuse(train_arguments(text, "nothing", "--resume"), 4, "nothing holds no run")
        (here / "empty").mkdir()
        refuse(train_arguments(text, "empty", "--resume"), 4, "empty holds no run")

    def test_resuming_with_an_unreadable_config_is_refused(self, refuse, here):
        (here / "run" / "config.json").write_text("{")
        refuse(train_arguments("text.txt", "run", "--resume"), 4, "config.json cannot be read")

    @pytest.mark.parametrize(
        ("flags", "word"),
        [
            ("--d-model 32", "model.d_model (16 -> 32)"),
            ("--num-layers 2 --seed 3", "model.num_layers (1 -> 2), seed (1337 -> 3)"),
            ("--batch-size 8", "batch_size (4 -> 8)"),
            ("--dtype bfloat16", "dtype (float32 -> bfloat16)"),
            ("--residual-dropout 0.5", "model.residual_dropout (0.0 -> 0.5)"),
            ("--data python-docs", "data ("),
        ],
    )
    def test_a_resumed_run_may_not_become_another_one(self, refuse, here, flags, word):
        refuse(["train", "--out", "run", "--resume", *flags.split()], 2, "must keep", word)

    def test_a_changed_text_is_noticed_at_resume(self, refuse, here, run):
        text = run / "text.txt"
        original = text.read_text()
        try:
            text.write_text(original.replace("cat", "tac"))
            refuse(["train", "--out", "run", "--resume"], 2, "must keep", "corpus (SHA-256 ")
        finally:
            text.write_text(original)

    def test_with_all_checkpoints_damaged_nothing_is_left_to_resume(self, refuse, here):
        for step in (10, 20):
            (here / "run" / "checkpoints" / str(step) / "MANIFEST.json").unlink()
        words = "run/checkpoints holds no checkpoint that can be used", "start a new run"
        refuse(["train", "--out", "run", "--resume"], 4, *words)

    @pytest.mark.parametrize("resume", [[], ["--resume"]], ids=["fresh", "resume"])
    def test_a_folder_in_use_is_refused_with_its_holder(self, refuse, here, resume):
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, "run"], stdout=subprocess.PIPE, text=True, cwd=here,
            env={"PYTHONPATH": str(ROOT), "PATH": ""},
        )  # fmt: skip
        try:
            assert holder.stdout.readline() == "held\n"
            words = "run is in use by", f"process {holder.pid},"
            refuse(["train", "--data", run_text(here), "--devices", 1, "--out", "run", *resume],
                   8, *words)  # fmt: skip
        finally:
            holder.kill()
            holder.wait()
            holder.stdout.close()

    def test_the_lock_goes_with_its_holder(self, here):
        with (
            RunFolder("run", resume=True),
            (here / "run" / ".lock").open() as lock,
            pytest.raises(BlockingIOError),
        ):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with (here / "run" / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


HOLD = """
import sys, time
from jaxformer.training.run_folder import RunFolder, stored_config
with RunFolder(sys.argv[1], resume=True) as folder:
    folder.begin(stored_config(sys.argv[1]))
    print("held", flush=True)
    time.sleep(60)
"""


def run_text(folder):
    return json.loads((folder / "run" / "config.json").read_text())["data"]


class TestSampleCommand:
    @pytest.mark.parametrize(
        ("flags", "code", "words"),
        [
            ("nowhere", 4, ["nowhere does not exist"]),
            (".", 4, [". holds no checkpoint"]),
            ("--temperature 0", 2, ["--temperature must be positive and finite: got 0"]),
            ("--temperature inf", 2, ["--temperature must be positive and finite: got inf"]),
            ("--top-k 0", 2, ["--top-k must be at least 1: got 0"]),
            ("--top-p 1.5", 2, ["--top-p must be in (0, 1]: got 1.5"]),
            ("--tokens 0", 2, ["--tokens must be at least 1: got 0"]),
            ("--samples -1", 2, ["--samples must be at least 1: got -1"]),
            ("--seed -1", 2, ["--seed must be in [0, 2^63): got -1"]),
            ("--step 10 --best", 2, ["--step and --best exclude each other"]),
            ("--step 11", 4, ["has no step 11: it has 10, 20"]),
            ("--prompt xyz", 3, ["character 'x' (U+0078) at position 0", "--unknown skip|replace"]),
            ("--unknown ignore", 2, ["--unknown", "ignore", "replace"]),
            ("--temprature 1", 2, ["did you mean --temperature?"]),
        ],
    )
    def test_what_cannot_work_is_refused(self, refuse, run, flags, code, words):
        path = [] if flags in ("nowhere", ".") else [run / "run"]
        refuse(["sample", *path, *flags.split()], code, *words)

    def test_the_folder_is_required(self, refuse):
        refuse(["sample"], 2, "PATH")

    def test_a_file_is_not_a_run(self, refuse, text):
        refuse(["sample", text], 2, "is not a run's folder")

    def sample(self, capsys, run, *flags):
        assert main(["sample", str(run / "run"), *map(str, flags)]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    def test_the_same_seed_writes_the_same_text_and_another_another(self, capsys, run):
        first = self.sample(capsys, run, "--tokens", 60, "--seed", 3)
        assert len(first) == 61
        assert first[-1] == "\n"
        assert set(first) <= set(manifest(run / "run", 20)["vocabulary"])
        assert self.sample(capsys, run, "--tokens", 60, "--seed", 3) == first
        assert self.sample(capsys, run, "--tokens", 60, "--seed", 4) != first

    def test_greedy_text_needs_no_seed_and_begins_with_the_prompt(self, capsys, run):
        texts = {
            self.sample(capsys, run, "--prompt", "the cat", "--tokens", 20, "--greedy", "--seed", s)
            for s in (0, 1)
        }
        assert len(texts) == 1
        assert len(text := texts.pop()) == 7 + 20 + 1
        assert text.startswith("the cat")
        nearly = self.sample(
            capsys, run, "--prompt", "the cat", "--tokens", 20, "--temperature", 1e-6
        )
        assert nearly == text

    def test_several_samples_are_numbered_and_differ(self, capsys, run):
        text = self.sample(capsys, run, "--tokens", 30, "--samples", 2, "--prompt", "a")
        first, second = text.split("--- 2 of 2 ---\n")
        assert first.startswith("--- 1 of 2 ---\na")
        assert second.startswith("a")
        assert first.split("---\n")[1].strip() != second.strip()
        alone = self.sample(capsys, run, "--tokens", 30, "--seed", 1, "--prompt", "a")
        assert alone == second

    def test_unknown_characters_of_the_prompt_are_skipped_or_replaced(self, capsys, run):
        flags = ["--tokens", 20, "--greedy", "--prompt"]
        for unknown, prompt in (("skip", "the"), ("replace", "the  ")):
            text = self.sample(capsys, run, *flags, "theXX", "--unknown", unknown)
            same = self.sample(capsys, run, *flags, prompt)
            assert text.removeprefix("theXX") == same.removeprefix(prompt)

    def test_an_older_and_the_best_step_can_be_asked_for(self, capsys, run):
        losses = {step: manifest(run / "run", step)["val_loss"] for step in (10, 20)}
        texts = {
            step: self.sample(capsys, run, "--tokens", 60, "--step", step) for step in (10, 20)
        }
        assert texts[10] != texts[20]
        best = self.sample(capsys, run, "--tokens", 60, "--best")
        assert best == texts[min(losses, key=lambda step: losses[step])]
        assert self.sample(capsys, run, "--tokens", 60) == texts[20]

    def test_a_damaged_checkpoint_is_refused_by_number_and_passed_over_otherwise(
        self, refuse, capsys, run, empty_folder
    ):
        shutil.copytree(run / "run", empty_folder / "run")
        (empty_folder / "run" / "checkpoints" / "20" / "arrays" / "_METADATA").unlink()
        refuse(["sample", "run", "--step", 20], 4, "20 is damaged", "missing _METADATA")
        before = snapshot(empty_folder)
        assert main(["sample", "run", "--greedy", "--tokens", "5"]) == 0
        captured = capsys.readouterr()
        assert "20 is damaged" in captured.err
        assert len(captured.err.splitlines()) == 1
        expected = self.sample(capsys, run, "--greedy", "--tokens", 5, "--step", 10)
        assert captured.out == expected
        assert snapshot(empty_folder) == before


def test_a_reader_that_leaves_early_is_no_error(run):
    process = start("sample", run / "run", "--tokens", 100_000)
    assert process.stdout.read(5)
    process.stdout.close()
    assert process.wait(timeout=120) == 141
    assert process.stderr.read() == ""
    process.stderr.close()


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

    monkeypatch.setattr("jaxformer.training.loop.make_parameters", fail)
    assert main(train_arguments(text, "out")) == 7
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1
    assert list(empty_folder.iterdir()) == []


def test_the_run_used_here_is_whole(run):
    assert steps(run / "run") == [10, 20]
