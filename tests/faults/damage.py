"""Checkpoints whose files are not as they were written: flipped bits, lost ends, lost files."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxformer.checkpoints import CheckpointFolder
from tests.faults.tally import Check, Tally
from tests.faults.workbench import Workbench, changed, snapshot, state_hash

OLDER, NEWER = 2, 4
# Every so many, the run is gone on with.
RESUMED = 5
Change = tuple[str, Callable[[Path], None]]


def flips(bench: Workbench, tally: Tally, count: int) -> None:
    """One bit of one file: every file once, then bits drawn from all that there are."""
    run, rng = _run(bench), bench.random("flips")
    files = _files(run)
    sizes = [len((run / name).read_bytes()) for name in files]
    chosen = rng.sample(files, len(files))[:count]
    chosen += rng.choices(files, sizes, k=count - len(chosen))
    for name in chosen:
        place = rng.randrange(len((run / name).read_bytes()))
        _inject(bench, tally, run, (f"bit of byte {place} of {name}", _flip(name, place, rng)))


def truncations(bench: Workbench, tally: Tally, count: int) -> None:
    """Every file cut at several lengths, or with more behind it."""
    run, rng = _run(bench), bench.random("truncations")
    changes = [
        (f"{name} {summary}", _resize(name, length))
        for name in _files(run)
        for summary, length in _lengths(len((run / name).read_bytes()), rng)
    ]
    for change in _some(changes, count, rng):
        _inject(bench, tally, run, change)


def losses_of_files(bench: Workbench, tally: Tally, count: int) -> None:
    """Every file missing, and every folder below; files that do not belong; names exchanged."""
    run, rng = _run(bench), bench.random("missing")
    folder = run / "checkpoints" / str(NEWER)
    gone = [str(path.relative_to(run)) for path in sorted(folder.rglob("*"))]
    changes: list[Change] = [(f"without {name}", _remove(name)) for name in gone]
    changes += [("with a stray file", _add), ("with the older step's files", _exchange)]
    for change in _some(changes, count, rng):
        _inject(bench, tally, run, change)


def _run(bench: Workbench) -> Path:
    """A finished run with two checkpoints."""
    run = bench.folder / "whole"
    if not run.exists():
        flags = ["--steps", NEWER, "--checkpoint-interval", OLDER, "--eval-interval", 1000]
        done = bench.call(bench.train(run, *flags))
        assert done.code == 0, done.summary
    return run


def _files(run: Path) -> list[str]:
    """The files of the newest checkpoint that hold anything, by their path in the run."""
    folder = run / "checkpoints" / str(NEWER)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    return [str(path.relative_to(run)) for path in paths]


def _some(changes: list[Change], count: int, rng: random.Random) -> list[Change]:
    return changes if count >= len(changes) else rng.sample(changes, count)


def _lengths(size: int, rng: random.Random) -> Iterator[tuple[str, int]]:
    for length in sorted({0, 1, size // 2, size - 1, rng.randrange(size)} - {size}):
        yield f"cut from {size} to {length} bytes", length
    yield "with a byte more", size + 1


def _inject(bench: Workbench, tally: Tally, whole: Path, change: Change) -> None:
    """Damages a copy: chosen by number it is rejected, resumed it uses the older step.

    What is restored is looked at each time; the whole run that follows only now and then, which
    takes fifty times as long.
    """
    summary, damage = change
    run = bench.copy(whole, "damaged")
    damage(run)
    with tally.injection(summary) as check:
        _check_asked_for(bench, run, tally, check)
        if tally.injected % RESUMED == 0:
            resumed = bench.resume(run)
            check.that(resumed.code == 0, f"--resume: {resumed.summary}")
            check.that(f"resuming from step {OLDER}" in resumed.out, f"--resume: {resumed.summary}")
            check.that("warning" in resumed.out, "no warning")
            if resumed.code == 0:
                same = state_hash(run, NEWER) == state_hash(whole, NEWER)
                check.that(same, "the state at the end is another one")
        else:
            checkpoints = CheckpointFolder(run / "checkpoints")
            checkpoints.tidy()
            _, manifest, warnings = checkpoints.restore_latest(quarantine=True)
            check.that(manifest["step"] == OLDER, f"step {manifest['step']} was restored")
            check.that(NEWER not in checkpoints.steps(), "it still counts")
            # Without its manifest a folder is no checkpoint, and put aside when its name is needed.
            check.that(bool(warnings) or "MANIFEST.json" in summary, "no warning")
        aside = list((run / "checkpoints").glob(f"quarantine/{NEWER}*"))
        check.that(bool(aside) or "MANIFEST.json" in summary, "not in quarantine")


def _check_asked_for(bench: Workbench, run: Path, tally: Tally, check: Check) -> None:
    before = snapshot(run)
    for command in (
        ["sample", run, "--step", NEWER, "--tokens", 1],
        ["port", run, bench.folder / "ported.safetensors", "--step", NEWER],
    ):
        done = bench.call(command)
        check.that(done.is_rejected(4), f"{command[0]} --step: {done.summary}")
    paths = changed(before, snapshot(run))
    paths += [str(p) for p in bench.folder.glob("ported*")]
    tally.files_changed += len(paths)
    check.that(not paths, f"a command that failed changed {paths}")


def _flip(name: str, place: int, rng: random.Random) -> Callable[[Path], None]:
    bit = 1 << rng.randrange(8)

    def damage(run: Path) -> None:
        data = bytearray((run / name).read_bytes())
        data[place] ^= bit
        (run / name).write_bytes(data)

    return damage


def _resize(name: str, length: int) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        data = (run / name).read_bytes()
        (run / name).write_bytes((data + b"\0")[:length])

    return damage


def _remove(name: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def _add(run: Path) -> None:
    (run / "checkpoints" / str(NEWER) / "arrays" / "stray").write_bytes(b"x")


def _exchange(run: Path) -> None:
    for name in ("arrays",):
        target = run / "checkpoints" / str(NEWER) / name
        shutil.rmtree(target)
        shutil.copytree(run / "checkpoints" / str(OLDER) / name, target)
