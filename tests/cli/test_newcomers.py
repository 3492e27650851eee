"""What people stumble over who see jaxformer for the first time."""

import ast
import itertools
import os
import re
import shlex
import subprocess
import sys

import pytest

from jaxformer.cli.arguments import USUAL_NAMES
from jaxformer.cli.main import main
from jaxformer.hardware import invocation
from jaxformer.hardware.user_folders import user_cache
from tests.support.tiny import ROOT


@pytest.mark.parametrize("program", USUAL_NAMES)
def test_flags_of_other_projects_lead_to_flags_that_exist(program, capsys):
    with pytest.raises(SystemExit):
        main([program.partition(" ")[2], "--help"])
    flags = set(re.findall(r"--[a-z][\w-]*", capsys.readouterr().out))
    for name, hint in USUAL_NAMES[program].items():
        assert name not in flags
        if program != "jaxformer plan":
            assert set(re.findall(r"--[\w-]+", hint)) <= flags


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train --lr 1e-3", "there is no --lr: use --learning-rate (see jaxformer train --help)"),
        ("train --lr=1e-3", "there is no --lr: use --learning-rate"),
        ("train --optim adamw", "there is no --optim: use --optimizer"),
        ("sample runs/x --max_new_tokens 9", "there is no --max-new-tokens: use --tokens"),
        ("port a.pt x.onnx", "x.onnx: jaxformer writes no .onnx files: name a .safetensors"),
    ],
)
def test_what_is_not_there_is_said_with_what_is(refuse, command, words):
    refuse(command.split(), 2, words)


def test_a_second_picture_leaves_the_first(whole, capsys):
    names = []
    for _ in range(2):
        assert main(["inspect", "masks", str(whole), "--length", "5"]) == 0
        names.append(capsys.readouterr().out.strip())
    assert len(set(names)) == 2
    assert names[1].endswith("masks-2.png")


@pytest.fixture
def shell(monkeypatch):
    """A shell without uv in which jaxformer is on the path or not."""
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/jaxformer"])

    def on_path(found):
        monkeypatch.setattr("shutil.which", lambda name: found)

    return on_path


def test_commands_are_shown_as_the_user_can_write_them(shell, monkeypatch):
    shell("/somewhere/bin/jaxformer")
    assert invocation.command("sample", "runs/a b") == "jaxformer sample 'runs/a b'"
    shell(None)
    assert invocation.command("sample", "x") == f"{sys.executable} -P -m jaxformer sample x"
    monkeypatch.setattr(sys, "argv", ["train.py"])
    assert invocation.command("train", "--resume") == f"{sys.executable} train.py --resume"
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    assert invocation.command("train", "--resume") == "uv run train.py --resume"
    assert invocation.command("sample", "x") == "uv run jaxformer sample x"


def test_a_command_that_is_shown_works_beside_a_file_with_the_name_of_a_module_of_python(
    shell, whole, empty_folder
):
    shell(None)
    (empty_folder / "types.py").write_text("raise SystemExit('mine')")
    command = shlex.split(invocation.command("runs", whole))
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_another_process_looks_in_the_working_folder_if_this_one_does(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["jaxformer"])
    assert invocation.own_command("train", "x")[1:] == ["-P", "-m", "jaxformer", "train", "x"]
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    assert invocation.own_command("train", "x")[1:] == ["-m", "jaxformer", "train", "x"]
    monkeypatch.delenv("UV_RUN_RECURSION_DEPTH", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert invocation.command("sample", "x") == f"{sys.executable} -m jaxformer sample x"


def test_a_cache_folder_is_an_absolute_path(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for given, found in ((str(tmp_path / "a"), "a"), ("relative", ".cache"), ("", ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert user_cache() == tmp_path / found / "jaxformer"


def test_extras_are_installed_where_the_user_is(shell, monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys, "prefix", "/a/venv")
    assert invocation.install("plot") == f"uv pip install '{ROOT}[plot]' --python /a/venv"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert invocation.install("plot") == f"pip install '{ROOT}[plot]'"
    monkeypatch.setattr(invocation, "ROOT", tmp_path)
    assert invocation.install("plot") == "pip install 'jaxformer[plot]'"
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert invocation.install("plot").startswith("python3 -m venv .venv && .venv/bin/pip install ")
    monkeypatch.setenv("UV_RUN_RECURSION_DEPTH", "1")
    assert invocation.install("plot") == "run it with uv run --extra plot"


@pytest.mark.tier("full")
def test_the_command_that_is_shown_runs(whole):
    line = invocation.command("sample", whole, "--tokens", 5)
    done = subprocess.run(
        shlex.split(line),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr


def helps():
    """The help of every option of every command, by the option's place."""
    for path in sorted(ROOT.glob("jaxformer/cli/*.py")) + [
        ROOT / "jaxformer" / name
        for name in (
            "config.py",
            "config_attention.py",
            "config_experts.py",
            "config_heads.py",
            "config_parts.py",
            "config_positions.py",
            "training/config.py",
        )
    ]:
        for cls in ast.walk(ast.parse(path.read_text("utf-8"))):
            body = cls.body if isinstance(cls, ast.ClassDef) else []
            for field, text in itertools.pairwise(body):
                if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                    yield f"{path.name}:{cls.name}.{field.target.id}", text.value.value


def test_every_help_stands_by_itself():
    found = dict(helps())
    assert len(found) > 150
    # A word that leans on the option's name begins no sentence.
    leaning = re.compile(r"(Of|After|At|By|From|To|On|Decay|Bound|In|It|They|[a-z]\w*)\b")
    allowed = re.compile(r"(With|In) (--|its place)|nanoGPT's|[a-z0-9, ]+: ")
    wrong = [
        place
        for place, text in found.items()
        if not text.rstrip().endswith(".") or (leaning.match(text) and not allowed.match(text))
    ]
    assert wrong == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands_and_flags(shell, capsys):
    assert main(["completions", shell]) == 0
    script = capsys.readouterr().out
    assert f"jaxformer completions {shell} > " in script
    for word in ("inspect", "attention", "--learning-rate", "--temperature", "llama-70b"):
        assert word in script


def test_bash_completes(capsys, tmp_path):
    assert main(["completions", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    words = "COMP_WORDS=(jaxformer train --batch); COMP_CWORD=2; $f jaxformer --batch train"
    function = 'f=$(complete -p jaxformer | cut -d" " -f3)'
    code = f'. "{tmp_path}/script"; {function}; {words}; echo "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["--batch-size"]
