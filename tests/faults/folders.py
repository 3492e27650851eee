"""Two runs in one folder, a clock that goes backwards, another number of devices."""

import os
import random
import signal
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
    snapshot,
    state_hash,
    unchanged,
)

# Years before 1970 for some, and each moment before the one before it.
BACKWARDS = """
import itertools, runpy, sys, time
seconds = itertools.count(-10**9, -3600)
time.time = lambda: float(next(seconds))
time.time_ns = lambda: next(seconds) * 10**9
sys.argv[0] = "jaxformer"
runpy.run_module("jaxformer", run_name="__main__", alter_sys=True)
"""


def two_runs(bench: Workbench, tally: Tally, count: int) -> None:
    """A second command that wants to write to the folder of a run: 8, and nothing changed."""
    out, rng = bench.folder / "held", bench.random("two runs")
    process = bench.start(bench.train(out, *SELDOM, "--steps-per-call", 1, *FOREVER))
    process.until(lambda: len(losses(out)) > 3)
    # Held still, so that whatever changes was changed by the others.
    process.signal(signal.SIGSTOP)
    for number in range(max(1, count - count // 4)):
        flags = rng.sample(["--seed=7", "--steps=9", "--batch-size=8", "--profile=3"], 2)
        resume = ["--resume"] if number % 2 else []
        with tally.injection(f"{resume} {flags}") as check, unchanged(out, tally, check):
            # What a resumed run may not change is rejected before its folder is looked at.
            flags = ["--steps=9"] if resume else flags
            done = bench.call([*bench.train(out, *SELDOM, *flags), *resume])
            check.that(done.is_rejected(8), done.summary)
            check.that(f"process {process.popen.pid}" in done.err, f"no holder: {done.summary}")
    process.signal(signal.SIGCONT)
    process.signal(signal.SIGTERM)
    done = process.wait()
    with tally.injection("the run that was there") as check:
        check.that(done.code == 143, done.summary)
        check.that(not bench.check_losses(out), bench.check_losses(out))
    for number in range(count // 4):
        _race(bench, tally, bench.folder / f"race-{number}", rng)


def _race(bench: Workbench, tally: Tally, out: Path, rng: random.Random) -> None:
    """Two runs that start together: one of them trains."""
    with tally.injection(out.name) as check:
        flags = [*SELDOM, "--steps", 30]
        both: list[Process] = [bench.start(bench.train(out, *flags), *FRESH) for _ in range(2)]
        ends: list[Done] = [process.wait() for process in rng.sample(both, 2)]
        codes = sorted(done.code for done in ends)
        # One that comes when the other is done finds a run.
        check.that(codes in ([0, 8], [0, 2]), [done.summary for done in ends])
        check.that(durable(out) == [30], f"{durable(out)} were saved")
        check.that(not bench.check_losses(out), bench.check_losses(out))


def clock(bench: Workbench, tally: Tally, count: int) -> None:
    """Runs whose clock goes backwards, cut and gone on with, among files from other times."""
    rng = bench.random("clock")
    whole = bench.folder / "clock-whole"
    done = bench.call(bench.train(whole, *SELDOM, "--steps", 40, "--checkpoint-interval", 10))
    assert done.code == 0, done.summary
    for number in range(count):
        out = bench.folder / f"clock-{number}"
        with tally.injection(f"run {number + 1}") as check:
            first = rng.randrange(11, 39)
            flags = [*SELDOM, "--checkpoint-interval", 10]
            _backwards(bench, bench.train(out, *flags, "--steps", first), check)
            _misdate(out, rng)
            again = ["train", "--out", str(out), "--resume", "--steps", "40"]
            summary = _backwards(bench, again, check)
            check.that(f"resuming from step {first}" in summary, summary[-300:])
            check.that(state_hash(out, 40) == state_hash(whole, 40), "another state at the end")
            check.that(losses(out) == losses(whole), "other losses")
            check.that(durable(out)[-1] == 40, f"{durable(out)} were kept")


def _backwards(bench: Workbench, arguments: list[str], check: Check) -> str:
    done = bench.start(arguments, "-c", BACKWARDS).wait()
    check.that(done.code == 0, done.summary)
    return done.out


def _misdate(out: Path, rng: random.Random) -> None:
    """Gives every file a time of its own between 1970 and 2100."""
    for path in sorted(out.rglob("*")):
        moment = rng.randrange(0, 4 * 10**9)
        os.utime(path, (moment, moment))


def devices(bench: Workbench, tally: Tally, count: int) -> None:
    """Resumed on other devices: a warning, or an error with the batch sizes that work."""
    rng, run = bench.random("devices"), bench.folder / "devices"
    done = bench.call(bench.train(run, *SELDOM, "--steps", 4))
    assert done.code == 0, done.summary
    for _ in range(count):
        number = rng.choice([2, 3, 4, 5, 8])
        with tally.injection(f"1 to {number} devices") as check:
            out = bench.copy(run, "devices-changed")
            flags = ["--devices", number, "--steps", 6]
            if 4 % number == 0:
                done = bench.resume(out, *flags)
                check.that(done.code == 0, done.summary)
                check.that("not bitwise" in done.out, f"no warning: {done.out}")
                near = bench.reference()
                far = [s for s, x in losses(out).items() if abs(x - near[s]) > 1e-4]
                check.that(not far, f"losses of steps {far} are far off")
            else:
                with unchanged(out, tally, check):
                    done = bench.resume(out, *flags)
                check.that(done.is_rejected(9), done.summary)
                check.that(" use " in done.err, f"no sizes that work: {done.summary}")


def stray_folders(bench: Workbench, tally: Tally, count: int) -> None:
    """Folders and files that look like checkpoints: named, passed over, and left alone."""
    rng, run = bench.random("stray folders"), bench.folder / "strays"
    done = bench.call(bench.train(run, *SELDOM, "--steps", 4))
    assert done.code == 0, done.summary
    names = ["9", "99999", "007", "-1", "1e3", "٣", "4.5", "step_9", " 8", "x", ".hidden", "8 "]
    for _ in range(count):
        name, kind = rng.choice(names), rng.choice(["empty", "file", "half"])
        with tally.injection(f"{kind} {name!r}") as check:
            out = bench.copy(run, "stray")
            path = out / "checkpoints" / name
            if kind == "file":
                path.write_bytes(b"x" * 99)
            else:
                path.mkdir()
            if kind == "half":
                (path / "arrays").mkdir()
                (path / "arrays" / "manifest.ocdbt").write_bytes(b"x")
            before = {p: s for p, s in snapshot(out).items() if f"checkpoints/{name}" in p}
            done = bench.resume(out, *SELDOM, "--steps", 6)
            check.that(done.code == 0, done.summary)
            check.that("resuming from step 4" in done.out, done.out)
            check.that(name.strip() in done.out and "ignored" in done.out, "it is not named")
            after = {p: s for p, s in snapshot(out).items() if f"checkpoints/{name}" in p}
            check.that(before == after, "it was changed")
            check.that(not bench.check_losses(out), bench.check_losses(out))
