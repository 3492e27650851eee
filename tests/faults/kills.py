"""Processes ended from outside: kill -9, SIGTERM and SIGINT, at random moments."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults.tally import Check, Tally
from tests.faults.workbench import (
    FOREVER,
    FRESH,
    SELDOM,
    Done,
    Process,
    Workbench,
    durable,
    losses,
    state_hash,
    unreadable,
)

# Nearly every moment of a run that saves every third step is one of a save.
SAVING = ["--checkpoint-interval", "3", "--eval-interval", "1000000", "--steps-per-call", "3"]


def kills(bench: Workbench, tally: Tally, count: int) -> None:
    """kill -9 around saves: the run resumes each time from its newest durable step."""
    out, rng = bench.folder / "kills", bench.random("kills")
    newest = -1
    for number in range(count):
        with tally.injection(f"kill {number + 1}") as check:
            again = ["--resume"] if (out / "config.json").exists() else []
            # One in five from its first import on.
            program = FRESH if number % 5 == 0 else ()
            process = bench.start([*bench.train(out, *SAVING, *FOREVER), *again], *program)
            newest = max(newest, until_a_moment(process, out, rng))
            process.signal(signal.SIGKILL)
            done = process.wait()
            check.that(done.code == -signal.SIGKILL, done.summary)
            check_durable(out, newest, tally, check)
    with tally.aside("the run afterwards") as check:
        _finish_and_compare(bench, out, check)


def until_a_moment(process: Process, out: Path, rng: random.Random) -> int:
    """Waits for a random moment, mostly near a save; the newest step that was durable by then."""
    newest = -1

    def look() -> set[str]:
        nonlocal newest
        newest = max([newest, *durable(out)])
        return set(os.listdir(out / "checkpoints"))

    if rng.random() < 0.2:
        end = time.monotonic() + rng.uniform(0, 6)
        process.until(lambda: bool(look() and False) or time.monotonic() > end)
        return newest
    for _ in range(rng.randint(1, 8)):
        before: set[str] = set()
        with contextlib.suppress(OSError):
            before = look()
        process.until(lambda seen=before: look() != seen)  # type: ignore[misc]
    time.sleep(rng.uniform(0, 0.03))
    return newest


def check_durable(out: Path, newest: int, tally: Tally, check: Check) -> None:
    """What must hold after any end: no durable step is lost, and all that bear a name are good."""
    kept = durable(out)
    lost = newest - max(kept, default=-1)
    if newest >= 0 and lost > 0:
        tally.durable_lost += lost
        check.that(False, f"step {newest} was durable, and {kept} are there")
    wrong = unreadable(out)
    tally.unreadable += len(wrong)
    check.that(not wrong, wrong)
    made = max(losses(out), default=0)
    tally.made_again = max(tally.made_again, made - max(kept, default=0))


def _finish_and_compare(bench: Workbench, out: Path, check: Check) -> None:
    """Makes a few more steps, and compares losses and final state with a run that was not cut."""
    last = max(durable(out), default=0) + 20
    done = bench.start(["train", "--out", out, "--resume", *SELDOM, "--steps", last]).wait()
    check.that(done.code == 0, done.summary)
    whole = bench.folder / f"{out.name}-whole"
    done = bench.start(bench.train(whole, *SELDOM, "--steps", last)).wait(600)
    check.that(done.code == 0, done.summary)
    check.that(losses(out) == losses(whole), f"losses of {last} steps differ")
    check.that(state_hash(out, last) == state_hash(whole, last), f"the state of {last} differs")


# What a run does most of the time, and the flags that make it so.
PHASES: dict[str, Sequence[str]] = {
    "starting": SELDOM,
    "compiling": [*SELDOM, "--no-compilation-cache"],
    "saving": ["--checkpoint-interval", "1", "--eval-interval", "1000000"],
    "evaluating": ["--eval-interval", "1", "--checkpoint-interval", "1000000"],
    "training": [*SELDOM, "--steps-per-call", "1"],
}


def signals(bench: Workbench, tally: Tally, count: int) -> None:
    """SIGTERM and SIGINT in turn, in every phase of a run: saved, reported, and resumed."""
    rng = bench.random("signals")
    for number in range(count):
        stop = (signal.SIGTERM, signal.SIGINT)[number % 2]
        phase = list(PHASES)[number // 2 % len(PHASES)]
        out = bench.folder / f"signal-{number}"
        with tally.injection(f"{stop.name} {number + 1} while {phase}") as check:
            program = FRESH if phase in ("starting", "compiling") else ()
            process = bench.start(bench.train(out, *PHASES[phase], *FOREVER), *program)
            _until_phase(process, out, phase, rng)
            process.signal(stop)
            done = process.wait()
            check.that("Traceback" not in done.err, done.summary)
            if not out.exists():
                # It came before the run had begun: there was nothing to save.
                early = done.code in (-stop, 128 + stop) and phase in ("starting", "compiling")
                check.that(early, done.summary)
                continue
            _check_saved(bench, out, done, stop, tally, check)


def _until_phase(process: Process, out: Path, phase: str, rng: random.Random) -> None:
    if phase == "starting":
        time.sleep(rng.uniform(0, 3))
        return
    began = process.until((out / "config.json").exists)
    if phase == "compiling":
        time.sleep(rng.uniform(0, 1) if began else 0)
        return
    process.until(lambda: len(losses(out)) > rng.randint(1, 30))
    time.sleep(rng.uniform(0, 0.3))


def _check_saved(
    bench: Workbench, out: Path, done: Done, stop: int, tally: Tally, check: Check
) -> None:
    check.that(done.code == 128 + stop, done.summary)
    check.that(len(done.err.splitlines()) == 1 and "--resume" in done.err, done.summary)
    check_durable(out, -1, tally, check)
    made, kept = max(losses(out), default=0), max(durable(out), default=-1)
    check.that(made == max(kept, 0), f"{made} steps were made and {kept} was saved")
    again = bench.resume(out, *SELDOM, "--steps", max(kept, 0) + 3)
    check.that(again.code == 0, again.summary)
    check.that(not bench.check_losses(out), bench.check_losses(out))
