"""Runs that are killed and resumed on an accelerator; a part of ``accelerator_checks.py``."""

import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import measure
import numpy as np
import sides
from accelerator_losses import CHECKS_SCRIPT, Row, largest

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
# Makes steps past its first checkpoint, and then dies as if the machine had. Its first argument is
# the step of that checkpoint.
KILLED = """
import os, signal, sys
from jaxformer.cli.main import main
from jaxformer.training.loop import TrainingLoop
train, saved = TrainingLoop._train, int(sys.argv[1])
def train_or_die(loop, count):
    if loop.step >= saved:
        train(loop, min(saved // 3, count))
        loop.folder.checkpoints.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    train(loop, count)
TrainingLoop._train = train_or_die
sys.exit(main(["train", *sys.argv[2:]]))
"""


def check_resume(turns: int, _: Any) -> Iterator[Row]:
    """Compares runs in one go with each other and with one that was killed, bit for bit.

    XLA chooses among a GPU's kernels by timing them, and some add in any order. So bits are
    demanded of deterministic kernels, and on a CPU; those of others are reported.
    """
    variants = {"kept programs": ("", True)}
    if measure.on_gpu():
        variants["programs compiled anew"] = ("", False)
        variants["deterministic, compiled anew"] = (DETERMINISTIC, False)
    with tempfile.TemporaryDirectory(prefix="jaxformer-resume-") as folder:
        with ThreadPoolExecutor(len(variants)) as pool:
            pending = {
                name: pool.submit(_resume_rows, Path(folder, str(i)), *given)
                for i, (name, given) in enumerate(variants.items())
            }
        for name, rows in pending.items():
            demanded = not measure.on_gpu() or variants[name][0] == DETERMINISTIC
            for what, row in rows.result().items():
                yield {
                    "name": f"{what}: {name}",
                    **row,
                    "holds": row["bit_exact"] or (False if demanded else None),
                }


def _resume_rows(folder: Path, flags: str, keeps: bool) -> dict[str, Row]:
    """Trains nano in one go, once more, and killed and resumed."""
    # A step takes a hundred times as long on a CPU.
    steps = 60 if measure.on_gpu() else 12
    half = steps // 2
    folder.mkdir()
    text = folder / "text.txt"
    text.write_bytes((measure.ROOT / "LICENSE").read_bytes())
    environment = {
        **os.environ,
        "XLA_FLAGS": _flags(flags),
        "PYTHONPATH": measure.python_path(),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    settings = [
        "--preset", "nano", "--data", text, "--steps", steps, "--checkpoint-interval", half,
        "--eval-interval", steps, "--sample-tokens", 0, "--seed", 5, "--dtype", "float32",
    ]  # fmt: skip
    cache = "--compilation-cache" if keeps else "--no-compilation-cache"

    def train(out: str, *arguments: Any, start: Sequence[Any] = ("train.py",)) -> int:
        command = [sys.executable, *start, *arguments, cache, "--out", folder / out]
        done = subprocess.run(
            [str(part) for part in command],
            cwd=measure.ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in (0, -signal.SIGKILL):
            raise RuntimeError("\n".join(done.stderr.splitlines()[-3:]))
        return done.returncode

    train("whole", *settings)
    train("again", *settings)
    code = train("killed", *settings, start=("-c", KILLED, half))
    saved = sorted(path.parent.name for path in folder.glob("killed/checkpoints/*/MANIFEST.json"))
    if code != -signal.SIGKILL or saved != [str(half)]:
        raise RuntimeError(
            f"the run was to be killed after step {half}: code {code}, saved {saved}"
        )
    train("killed", "--resume")
    return {
        "two runs": _difference(folder / "whole", folder / "again", steps),
        "killed and resumed": _difference(folder / "whole", folder / "killed", steps),
    }


def _difference(one: Path, other: Path, steps: int) -> Row:
    """How the last checkpoints of two runs of so many steps differ, and their losses."""
    hashes, losses = [], []
    for folder in (one, other):
        manifest = json.loads((folder / f"checkpoints/{steps}/MANIFEST.json").read_text())
        hashes.append({name: about["sha256"] for name, about in manifest["arrays"].items()})
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        # The steps of a killed run after its checkpoint are made again: the later line counts.
        losses.append({x["step"]: x["train_loss"] for x in lines if "train_loss" in x})
    first, second = (np.array([run[step] for step in sorted(run)]) for run in losses)
    differ = [name for name in hashes[0] if hashes[0][name] != hashes[1].get(name)]
    other_steps = np.flatnonzero(first != second)
    return {
        "bit_exact": hashes[0] == hashes[1] and not len(other_steps),
        "arrays": len(hashes[0]),
        "arrays_that_differ": len(differ),
        "first_step_that_differs": int(other_steps[0]) + 1 if len(other_steps) else None,
        "largest_relative_difference": largest(first / second - 1),
    }


def check_price(turns: int, _: Any) -> Iterator[Row]:
    """Compares the time of a step with that of deterministic kernels."""
    name = "deterministic kernels: baby"
    if not measure.on_gpu():
        yield {"name": name, "holds": None, "skipped": "needs an NVIDIA GPU"}
        return
    usual, deterministic = (
        measure.child([CHECKS_SCRIPT, "--part", "step:baby"], XLA_FLAGS=flags)["seconds_per_step"]
        for flags in (_flags(""), _flags(DETERMINISTIC))
    )
    yield {
        "name": name,
        "holds": None,
        "seconds_per_step": usual,
        "deterministic": deterministic,
        "ratio": measure.rounded(deterministic["median"] / usual["median"]),
    }


def time_steps(preset: str) -> Row:
    """Returns the seconds of a step of a preset, as training makes them."""
    from jaxformer.training.presets import PRESETS

    config = PRESETS[preset]()
    config = config.replace(vocab_size=config.model.vocab_size or 65)
    ids = sides.random_ids(config, 200_000)
    last = len(ids) - config.model.context_length
    starts = np.random.default_rng(1).integers(0, last, (50, config.batch_size), np.int32)
    side = sides.make_side(sides.JAXFORMER, config, ids)
    call = functools.partial(side.train, starts)
    times = measure.interleave({"steps": call}, 7, warm_up=2)["steps"]["seconds"]
    return {"seconds_per_step": measure.scaled(times, 1 / len(starts))}


def _flags(more: str) -> str:
    return f"{os.environ.get('XLA_FLAGS', '')} {more}".strip()
