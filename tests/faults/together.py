"""Two processes that train together: both killed, or one of them."""

import contextlib
import random
import signal
import socket
import time
from pathlib import Path

from tests.faults.kills import SAVING, check_durable, until_a_moment
from tests.faults.tally import Check, Tally
from tests.faults.workbench import (
    FOREVER,
    SELDOM,
    Done,
    Process,
    Workbench,
    durable,
    losses,
    state_hash,
)

# In seconds: how long the one that is left may take to notice.
NOTICED = 200


def both_killed(bench: Workbench, tally: Tally, count: int) -> None:
    """kill -9 of two processes around saves that they make together."""
    out, rng = bench.folder / "both", bench.random("both killed")
    newest = -1
    for number in range(count):
        with tally.injection(f"kill {number + 1}") as check:
            pair = _pair(bench, out, *SAVING, *FOREVER)
            newest = max(newest, until_a_moment(pair[0], out, rng))
            for process in rng.sample(pair, 2):
                process.signal(signal.SIGKILL)
                time.sleep(rng.choice([0, 0, rng.uniform(0, 0.05)]))
            for process in pair:
                done = process.wait()
                # The second may have noticed the first's end already.
                check.that(done.code in (-signal.SIGKILL, 9), done.summary)
            check_durable(out, newest, tally, check)
    with tally.aside("the run afterwards") as check:
        _finish_and_compare(bench, out, check)


def one_killed(bench: Workbench, tally: Tally, count: int) -> None:
    """kill -9 of one: the other ends with 9, and names the step that the next run goes on from."""
    out, rng = bench.folder / "one", bench.random("one killed")
    for number in range(count):
        victim = number % 2
        with tally.injection(f"kill {number + 1}, of process {victim}") as check:
            pair = _pair(bench, out, *SAVING, *FOREVER)
            first = max(durable(out), default=0)
            # From the moment that they have made a step together.
            pair[0].until(lambda first=first: max(durable(out), default=0) > first)  # type: ignore[misc]
            newest = max(durable(out), default=-1)
            time.sleep(rng.uniform(0, 0.3))
            pair[victim].signal(signal.SIGKILL)
            pair[victim].wait()
            done = pair[1 - victim].wait(NOTICED)
            # XLA may have had its say before.
            last = (done.err.splitlines() or [""])[-1]
            check.that(done.code == 9 and last.startswith("jaxformer: "), done.summary)
            kept = max(durable(out), default=-1)
            words = "no step was saved" if kept < 0 else f"step {kept} is the last one saved"
            check.that(words in last, f"{kept} is there: {done.summary}")
            check_durable(out, newest, tally, check)
    with tally.aside("the run afterwards") as check:
        _finish_and_compare(bench, out, check)


def _pair(bench: Workbench, out: Path, *more: object) -> list[Process]:
    """Two processes that train, or go on, in the same folder."""
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = [*more, *(["--resume"] if (out / "config.json").exists() else [])]
    flags += ["--coordinator", address, "--num-processes", 2]
    return [bench.start(bench.train(out, *flags, "--process-id", i)) for i in range(2)]


def _finish_and_compare(bench: Workbench, out: Path, check: Check) -> None:
    last = max(durable(out), default=0) + 20
    for folder in (out, whole := bench.folder / f"{out.name}-whole"):
        ends: list[Done] = [
            process.wait(600) for process in _pair(bench, folder, *SELDOM, "--steps", last)
        ]
        check.that([done.code for done in ends] == [0, 0], [done.summary for done in ends])
    check.that(losses(out) == losses(whole), f"losses of {last} steps differ")
    check.that(state_hash(out, last) == state_hash(whole, last), f"the state of {last} differs")


def signalled(bench: Workbench, tally: Tally, count: int) -> None:
    """SIGTERM or SIGINT to one of two: both stop after the same step, once it is saved."""
    rng: random.Random = bench.random("signalled together")
    for number in range(count):
        stop, victim = (signal.SIGTERM, signal.SIGINT)[number % 2], number // 2 % 2
        out = bench.folder / f"signalled-{number}"
        with tally.injection(f"{stop.name} to process {victim}") as check:
            pair = _pair(bench, out, *SELDOM, "--steps-per-call", 1, *FOREVER)
            pair[0].until(lambda out=out: len(losses(out)) > 2)  # type: ignore[misc]
            time.sleep(rng.uniform(0, 0.5))
            pair[victim].signal(stop)
            ends = [process.wait() for process in pair]
            check.that({done.code for done in ends} == {128 + stop}, [d.summary for d in ends])
            kept, made = max(durable(out), default=-1), max(losses(out), default=0)
            check.that(kept == made, f"{made} steps were made and {kept} was saved")
            check_durable(out, -1, tally, check)
