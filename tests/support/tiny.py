"""A run small enough to be made many times, and ways to look at what it left."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

from jaxformer.cli.main import main

ROOT = Path(__file__).parents[2]
WORDS = shlex.split("the cat sat on a mat and saw two big dogs run home not one of them was fed")
TEXT = "".join(
    f"{word}{end}"
    for word, end in zip(
        np.random.default_rng(0).choice(WORDS, 900),
        np.random.default_rng(1).choice([" ", " ", " ", ", ", ".\n"], 900),
        strict=True,
    )
)
TINY = shlex.split(
    "--num-layers 1 --d-model 16 --num-heads 2 --context-length 8 --batch-size 4 --devices 1 "
    "--steps-per-call 7 --sample-tokens 8 --eval-interval 10 --checkpoint-interval 10 "
    "--warmup-steps 2 --learning-rate 1e-2"
)


DROPOUT = ["--residual-dropout", 0.1, "--embedding-dropout", 0.1]


def train_arguments(text, out, *more):
    return ["train", "--data", str(text), "--out", str(out), *TINY, *map(str, more)]


def train(text, out, *more):
    return main(train_arguments(text, out, *more))


def resume(out, *more):
    return main(["train", "--out", str(out), "--resume", *map(str, more)])


def same_run(out, whole, last=30):
    assert losses(out) == losses(whole)
    assert losses(out, "val_loss") == losses(whole, "val_loss")
    assert manifest(out, last)["state_sha256"] == manifest(whole, last)["state_sha256"]


def start(*arguments):
    """The command in a process of its own, computing as this one does."""
    environment = {
        **os.environ,
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "jaxformer", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def records(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def losses(out, name="train_loss"):
    return {r["step"]: r[name] for r in records(out) if name in r}


def manifest(out, step):
    return json.loads((Path(out) / "checkpoints" / str(step) / "MANIFEST.json").read_text())


def steps(out):
    """The steps saved in a run's folder, and nothing else may be there."""
    folder = Path(out) / "checkpoints"
    return sorted(int(path.name) for path in folder.iterdir()) if folder.exists() else []


def snapshot(*folders):
    """Every file and folder below, with content and time of change."""
    return {
        path: (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for folder in folders
        for path in sorted(Path(folder).rglob("*"))
    }
