"""Numbers that are not finite, and metrics services that do not answer."""

import contextlib
import json
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.faults.tally import Tally
from tests.faults.workbench import SELDOM, Workbench, durable, losses, snapshot, unreadable

DUMPED = {"step", "train_loss", "grad_norm", "learning_rate", "window_starts"}


def wild_numbers(bench: Workbench, tally: Tally, count: int) -> None:
    """Learning rates at which a run diverges, at once or after its checkpoints: 6, never saved."""
    rng = bench.random("wild numbers")
    for number in range(count):
        out = bench.folder / f"wild-{number}"
        late = number % 2 == 1
        with tally.injection(f"run {number + 1}") as check:
            if late:
                done = bench.call(bench.train(out, *SELDOM, "--steps", rng.randrange(5, 30)))
                check.that(done.code == 0, done.summary)
            before = {p: s for p, s in snapshot(out).items() if "/checkpoints/" in p}
            rate = 10 ** rng.uniform(25, 38)
            wild = ["--learning-rate", rate, "--min-learning-rate", rate, "--steps", 200]
            wild += ["--warmup-steps", 1, "--checkpoint-interval", rng.choice([1, 7, 1000])]
            wild += ["--eval-interval", rng.choice([1, 5, 1000])]
            done = bench.resume(out, *wild) if late else bench.call(bench.train(out, *wild))
            check.that(done.is_rejected(6), done.summary)
            kept = durable(out)
            check.that(not unreadable(out), unreadable(out))
            after = snapshot(out)
            # Those of later steps may have taken the place of the oldest.
            other = [p for p, s in before.items() if p in after and after[p] != s]
            check.that(not other, f"changed {other}")
            dumps = sorted(out.glob("divergence-*.json"))
            check.that(len(dumps) == 1, f"{len(dumps)} dumps")
            facts: dict[str, Any] = json.loads(dumps[0].read_text()) if dumps else {}
            missing = DUMPED - facts.keys()
            check.that(not missing, f"the dump lacks {missing}: {facts.keys()}")
            if kept:
                summary = f"step {kept[-1]} is the last one saved"
                check.that(summary in done.err, done.summary)
                again = bench.resume(
                    out, "--learning-rate", 1e-3, "--min-learning-rate", 1e-4, "--steps",
                    kept[-1] + 2,
                )  # fmt: skip
                check.that(again.code in (0, 6), f"afterwards: {again.summary}")


def services(bench: Workbench, tally: Tally, count: int) -> None:
    """Services that fail at any of their calls: one warning, and the run as if they were not."""
    rng = bench.random("services")
    for number in range(count):
        name = rng.choice(["wandb", "trackio", "tensorboard"])
        fails = rng.choice(["start", "log", "finish"])
        error = rng.choice([ConnectionError, TimeoutError, OSError, RuntimeError, SystemExit])
        out = bench.folder / f"service-{number}"
        with tally.injection(f"{name} fails to {fails} with {error.__name__}") as check:
            with _service(name, fails, error("the service is unreachable")):
                flags = [*SELDOM, "--steps", 12, "--tracker", name]
                done = bench.call(bench.train(out, *flags))
            check.that(done.code == 0, done.summary)
            warnings = [line for line in done.out.splitlines() if "warning" in line]
            check.that(len(warnings) == 1 and name in warnings[0], warnings)
            check.that(sorted(losses(out)) == list(range(1, 13)), "steps are missing")
            check.that(not bench.check_losses(out), bench.check_losses(out))


@contextlib.contextmanager
def _service(name: str, fails: str, error: BaseException) -> Iterator[None]:
    """Puts a module in the service's place, one of whose calls raises."""

    def call(which: str) -> Any:
        def raise_or_not(*_: Any, **__: Any) -> Any:
            if which == fails:
                raise error
            return module

        return raise_or_not

    module: Any = types.ModuleType({"tensorboard": "tensorboardX"}.get(name, name))
    module.__spec__ = types.SimpleNamespace(name=module.__name__)
    module.init = module.SummaryWriter = call("start")
    module.log = module.add_scalar = call("log")
    module.finish = module.close = call("finish")
    before = sys.modules.get(module.__name__)
    sys.modules[module.__name__] = module
    try:
        yield
    finally:
        del sys.modules[module.__name__]
        if before is not None:
            sys.modules[module.__name__] = before


def damaged_metrics(bench: Workbench, tally: Tally, count: int) -> None:
    """Flipped bits, cut ends and foreign lines in metrics.jsonl: the run continues all the same."""
    rng, run = bench.random("damaged metrics"), bench.folder / "metrics"
    flags = [*SELDOM, "--steps", 20, "--checkpoint-interval", 10]
    done = bench.call(bench.train(run, *flags))
    assert done.code == 0, done.summary
    lines = ["null", "5", "[]", "{}", '{"step": "x"}', '{"step": null}', "\0" * 50, "\udcff{"]
    for _ in range(count):
        out = bench.copy(run, "metrics-damaged")
        path = out / "metrics.jsonl"
        data = bytearray(path.read_bytes())
        kind = rng.choice(["flip", "cut", "line"])
        place = rng.randrange(len(data))
        if kind == "flip":
            data[place] ^= 1 << rng.randrange(8)
        elif kind == "cut":
            del data[place:]
        else:
            at = data.rfind(b"\n", 0, place) + 1
            data[at:at] = rng.choice(lines).encode(errors="surrogateescape") + b"\n"
        path.write_bytes(data)
        with tally.injection(f"{kind} at {place}") as check:
            done = bench.resume(out, *SELDOM, "--steps", 25)
            check.that(done.code == 0, done.summary)
            found, before = losses(out), losses(run)
            kept = sum(found.get(step) == loss for step, loss in before.items())
            least = len(before) - 2 if kind != "cut" else 0
            check.that(kept >= least, f"{kept} of {len(before)} lines were kept")
            check.that(all(step in found for step in range(21, 26)), "new lines are missing")
            _only_objects(path, check)


def _only_objects(path: Path, check: Any) -> None:
    for line in path.read_text(errors="replace").splitlines():
        try:
            good = isinstance(json.loads(line), dict)
        except ValueError:
            good = False
        check.that(good, f"a line is no object: {line[:50]!r}")
