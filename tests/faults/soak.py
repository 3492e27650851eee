"""``python -m tests.faults.soak``: a long run, ten times killed, beside one that was left alone.

The numbers that both wrote down, but for their speed, and their final states must be the same;
memory and open files of the one that was left alone must be flat.

Memory is watched with glibc's threshold for blocks of their own held where it begins. By itself
it rises with the largest block that was freed, and what lies between blocks then stays with the
process: about 70 MB here, that still move by a per cent in 10,000 steps and would hide a leak.
"""

import argparse
import contextlib
import json
import os
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.workbench import FRESH, Process, Workbench, durable, state_hash, unreadable

ROOT = Path(__file__).parent.parent.parent
RESULT = ROOT / "benchmarks" / "results" / "soak.json"
MODEL = shlex.split(
    "--num-layers 2 --d-model 32 --num-heads 4 --context-length 32 --batch-size 8 --devices 1 "
    "--residual-dropout 0.1 --embedding-dropout 0.1 --learning-rate 3e-3 --sample-tokens 20 "
    "--checkpoint-interval 100 --eval-interval 250"
)
SPEED = ("tokens_per_second", "model_flops_utilization")
SAMPLE_SECONDS = 0.5
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
# Resident memory may grow by this share of its mean over the second half of the run, as a straight
# line through all samples has it.
MOST_GROWTH = 0.01


def soak(bench: Workbench, steps: int, kills: int) -> dict[str, Any]:
    """Makes both runs and compares them.

    Returns:
        What was found, with ``same_losses``, ``same_state``, ``flat_memory``, ``flat_files``.
    """
    rng = bench.random("soak")
    whole, killed = bench.folder / "whole", bench.folder / "killed"
    arguments = ["train", "--data", str(bench.text), *MODEL, "--steps", str(steps)]
    began = time.monotonic()
    samples = _watch(bench.start([*arguments, "--out", whole], *FRESH, **ALLOCATOR), whole, steps)
    whole_seconds = time.monotonic() - began
    cuts = _cut(bench, [*arguments, "--out", str(killed)], killed, steps, kills, rng)
    same = _numbers(whole) == _numbers(killed)
    return {
        "steps": steps,
        "kills": cuts,
        "evaluations": sum("val_loss" in r for r in _numbers(killed)),
        "seconds_whole": round(whole_seconds, 1),
        "seconds": round(time.monotonic() - began, 1),
        "same_losses": same,
        "same_state": state_hash(whole, steps) == state_hash(killed, steps),
        "state_sha256": state_hash(whole, steps),
        "unreadable": len(unreadable(killed)),
        **flatness(samples),
        "samples": samples[:: max(1, len(samples) // 200)],
    }


def flatness(samples: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Whether memory and files stay as they are over the second half of the samples.

    Memory is flat if a straight line through its samples rises by at most MOST_GROWTH of their
    mean; files are flat if their median, which a save under way does not move, is not above that
    of the first half.
    """
    first, second = samples[: len(samples) // 2], samples[len(samples) // 2 :]
    seconds = [sample["seconds"] for sample in second]
    memory = [sample["memory"] for sample in second]
    slope = statistics.linear_regression(seconds, memory).slope
    growth = slope * (seconds[-1] - seconds[0]) / statistics.fmean(memory)
    files = [statistics.median(sample["files"] for sample in half) for half in (first, second)]
    return {
        "memory_mean": round(statistics.fmean(memory)),
        "memory_growth": round(growth, 5),
        "memory_most": max(sample["memory"] for sample in samples),
        "flat_memory": growth <= MOST_GROWTH,
        "files_first_half": files[0],
        "files_second_half": files[1],
        "files_most": max(sample["files"] for sample in samples),
        "flat_files": files[1] <= files[0],
    }


def _watch(process: Process, out: Path, steps: int) -> list[dict[str, float]]:
    """Samples a run until its last step: seconds, resident bytes, open files.

    What follows is the picture of the losses, with all that a picture needs.
    """
    samples: list[dict[str, float]] = []
    began = time.monotonic()
    here = Path(f"/proc/{process.popen.pid}")
    while process.popen.poll() is None:
        with contextlib.suppress(OSError, IndexError):
            pages = int((here / "statm").read_text().split()[1])
            sample = {
                "seconds": round(time.monotonic() - began, 2),
                "memory": pages * os.sysconf("SC_PAGE_SIZE"),
                "files": len(os.listdir(here / "fd")),
            }
            if _last_step(out) < steps:
                samples.append(sample)
        time.sleep(SAMPLE_SECONDS)
    done = process.wait()
    assert done.code == 0, done.summary
    return samples


def _cut(
    bench: Workbench,
    arguments: Sequence[object],
    out: Path,
    steps: int,
    kills: int,
    rng: random.Random,
) -> list[dict[str, int]]:
    """Makes a run that is killed at random steps; where it was, and from where it went on."""
    cuts = []
    for goal in sorted(rng.randrange(1, steps) for _ in range(kills)):
        again = ["--resume"] if out.exists() else []
        process = bench.start([*arguments, *again])
        process.until(lambda goal=goal: _last_step(out) >= goal, seconds=3600)  # type: ignore[misc]
        process.signal(signal.SIGKILL)
        process.wait()
        cuts.append({"killed_at": _last_step(out), "goes_on_from": max(durable(out), default=0)})
    done = bench.start([*arguments, *(["--resume"] if out.exists() else [])]).wait(3600)
    assert done.code == 0, done.summary
    return cuts


def _last_step(out: Path) -> int:
    """The step of the last whole line, without reading all of them."""
    try:
        with (out / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1000))
            lines = file.read().split(b"\n")
        return int(json.loads(lines[-2])["step"])
    except (OSError, ValueError, IndexError, KeyError):
        return 0


def _numbers(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what depends on the machine's speed."""
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k not in SPEED} for record in records]


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="default %(default)s")
    parser.add_argument("--kills", type=int, default=10, help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--out", type=Path, default=RESULT, help="default %(default)s")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        found = soak(Workbench(Path(folder), arguments.seed), arguments.steps, arguments.kills)
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import measure

    report = {
        "benchmark": "soak",
        **measure.facts(),
        "command": shlex.join(["python", "-m", "tests.faults.soak", *sys.argv[1:]]),
        "settings": {k: v for k, v in vars(arguments).items() if k != "out"},
        "results": [found],
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for name, value in found.items():
        if name != "samples":
            print(f"{name}: {value}")
    good = ("same_losses", "same_state", "flat_memory", "flat_files")
    return 0 if all(found[name] for name in good) and not found["unreadable"] else 1


if __name__ == "__main__":
    sys.exit(main())
