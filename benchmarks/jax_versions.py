"""Times jaxformer under the JAX of several interpreters, in turn.

    uv run --group test python benchmarks/jax_versions.py --python ../other/.venv/bin/python

Which JAX is installed depends on the version of Python. Each turn starts a process of each
interpreter for each thing that is timed: a training step, an evaluation, and the writing of one
text and of 32, by the scripts that measure them, without other sides. The first interpreter is
that of this script.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import measure

STEP, EVALUATION = "training_step.py", "evaluation.py"
WRITING = "generation.py --no-memory --batch-sizes"
# What each process is to run, and how many turns of its own it has.
THINGS = {
    "training step of nano": f"{STEP} --preset nano --turns 9",
    "training step of baby": f"{STEP} --preset baby --turns 5",
    "evaluation of nano": f"{EVALUATION} --preset nano --turns 5",
    "evaluation of baby": f"{EVALUATION} --preset baby --turns 5",
    "writing one text": f"{WRITING} 1 --turns 5",
    "writing 32 texts": f"{WRITING} 32 --turns 5",
}
FIND_VERSIONS = "import jax, platform; print(platform.python_version(), jax.__version__)"


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=3)
    parser.add_argument(
        "--python", action="append", required=True,
        help="an interpreter in whose environment jaxformer's packages are; once for each",
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=list(THINGS), default=list(THINGS))
    arguments = parser.parse_args()
    # By path as given: a link to the interpreter is what finds its environment.
    sides = {_name(python): python for python in (sys.executable, *arguments.python)}
    if len(sides) <= len(arguments.python):
        parser.error("two of the interpreters have the same versions of Python and JAX")

    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.turns):
            for thing in arguments.only:
                names = [*sides][turn % len(sides) :] + [*sides][: turn % len(sides)]
                for name in names:
                    rate = tokens_per_second(sides[name], thing, Path(folder) / name)
                    found.setdefault((thing, name), []).append(rate)
    results = [
        {"what": thing, "side": name, "tokens_per_second": measure.spread(rates)}
        for (thing, name), rates in found.items()
    ]
    results.sort(key=lambda row: arguments.only.index(row["what"]))
    first = next(iter(sides))
    speedup = {
        thing: {
            name: measure.rounded(
                statistics.median(found[thing, name]) / statistics.median(found[thing, first])
            )
            for name in sides
            if name != first
        }
        for thing in arguments.only
    }
    measure.write("jax_versions", arguments, results, COLUMNS, speedup=speedup)


def tokens_per_second(python: str, thing: str, cache: Path) -> float:
    """Runs a script in an interpreter, and returns the median of its turns.

    Args:
        python: the interpreter.
        thing: one of THINGS.
        cache: a folder for its caches, which other interpreters do not share.
    """
    script, *settings = THINGS[thing].split()
    command = [str(measure.ROOT / "benchmarks" / script), *settings, "--only", "jaxformer"]
    report = json.loads(_run(python, command, XDG_CACHE_HOME=str(cache)))
    rate: float = report["results"][0]["tokens_per_second"]
    return rate


def _name(python: str) -> str:
    return "Python {}, JAX {}".format(*_run(python, ["-c", FIND_VERSIONS]).split())


def _run(python: str, command: list[str], **environment: str) -> str:
    """Returns the standard output of an interpreter, or ends this program with its last words."""
    done = subprocess.run(
        [python, *command], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": measure.python_path(), **environment},
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{python}: {''.join(done.stderr.splitlines()[-1:])}")
    return done.stdout


def _compared(row: Mapping[str, Any]) -> str:
    rates = row["tokens_per_second"]
    return f"{rates['median']:,.0f} ({rates['min']:,.0f} to {rates['max']:,.0f})"


COLUMNS = {
    "what": lambda row: row["what"],
    "side": lambda row: row["side"],
    "tokens/s": _compared,
}

if __name__ == "__main__":
    measure.run(main)
