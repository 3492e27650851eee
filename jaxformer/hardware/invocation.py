"""Commands as this user has to write them: with ``uv run``, in a clone, or installed."""

import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]


def command(name: str, *arguments: object) -> str:
    """Returns a line that runs a command of jaxformer in the shell that started this program.

    Args:
        name: such as ``sample``; ``train`` is ``train.py`` where that was run.
        arguments: what follows it.
    """
    script = sys.argv[0] if name == "train" and Path(sys.argv[0]).name == "train.py" else None
    words = [script] if script else ["jaxformer", name]
    if _is_uv_run():
        words = ["uv", "run", *words]
    elif script:
        words = [sys.executable, *words]
    elif shutil.which("jaxformer") is None:
        words = [sys.executable, *_safe_path(), "-m", *words]
    return shlex.join([*words, *map(str, arguments)])


def own_command(name: str, *arguments: str) -> list[str]:
    """Returns the words that run a command of jaxformer in another process, as this one runs.

    Args:
        name: such as ``sample``; ``train`` is ``train.py`` where that was run.
        arguments: what follows it.
    """
    script = sys.argv[0] if name == "train" and Path(sys.argv[0]).name == "train.py" else None
    if script:
        return [sys.executable, script, *arguments]
    return [sys.executable, *_safe_path(), "-m", "jaxformer", name, *arguments]


def _safe_path() -> list[str]:
    """Returns what keeps Python from taking a module of its own, as types, from this folder.

    It is nothing where jaxformer itself may be found in the folder.
    """
    looks_here = any(os.path.abspath(path) == os.getcwd() for path in sys.path)
    return [] if looks_here else ["-P"]


def install(extra: str) -> str:
    """Returns what makes an extra of jaxformer available, as a part of a sentence.

    >>> "[plot]" in install("plot") or "--extra plot" in install("plot")
    True
    """
    if _is_uv_run():
        return f"run it with uv run --extra {extra}"
    source = str(ROOT) if (ROOT / "pyproject.toml").is_file() else "jaxformer"
    line = f"pip install '{source}[{extra}]'"
    if importlib.util.find_spec("pip") is None:
        # An environment that uv has made.
        return f"uv {line} --python {shlex.quote(sys.prefix)}"
    managed = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED").exists()
    if managed and sys.prefix == sys.base_prefix:
        return (
            f"python3 -m venv .venv && .venv/bin/{line}, as this system's Python takes no packages"
        )
    return line


def _is_uv_run() -> bool:
    """Whether ``uv run`` started this program: its environment is then not on the user's PATH."""
    return "UV_RUN_RECURSION_DEPTH" in os.environ
