"""A disk that is full: a small tmpfs, which only root can mount."""

import contextlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.faults.kills import check_durable
from tests.faults.tally import Tally
from tests.faults.workbench import SELDOM, Workbench, durable, losses

KIB = 1024


def full_disk(bench: Workbench, tally: Tally, count: int) -> None:
    """Runs that fill a disk: they end with the figures, and resume once there is room."""
    rng = bench.random("full disk")
    if not _can_mount(bench.folder / "probe"):
        tally.skipped = "no tmpfs can be mounted here"
        return
    for number in range(count):
        # From less than one checkpoint to a handful of them, cut at every stage of a save.
        size = rng.randrange(60 * KIB, 1500 * KIB)
        mount = bench.folder / f"disk-{number}"
        with _small_disk(mount, size):
            _fill(bench, tally, mount, size)


def _can_mount(folder: Path) -> bool:
    try:
        with _small_disk(folder, KIB):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def _fill(bench: Workbench, tally: Tally, mount: Path, size: int) -> None:
    out = mount / "run"
    flags = ["--checkpoint-interval", 2, "--eval-interval", 1000000, "--keep", 1000]
    with tally.injection(f"a disk of {size // KIB} KiB") as check:
        done = bench.call(bench.train(out, *flags, "--steps", 400))
        check.that(done.is_rejected(7), done.summary)
        figures = re.findall(r"\d[\d.,]* (?:[KMG]i?B|bytes)", done.err)
        if "could not save" in done.err or "save" in done.err:
            check.that(len(figures) >= 2, f"no need and free space in: {done.summary}")
        check_durable(out, -1, tally, check)
        kept = max(durable(out), default=0)
        left = [p.name for p in out.glob("checkpoints/*") if not p.name.isdigit()]
        check.that(not left, f"{left} were left behind")
        subprocess.run(["mount", "-o", "remount,size=64m", mount], check=True)
        if not out.exists():
            again = bench.call(bench.train(out, *SELDOM, "--steps", 5))
        else:
            again = bench.resume(out, *SELDOM, "--steps", kept + 5)
        check.that(again.code == 0, f"with more room: {again.summary}")
        check.that(max(losses(out), default=0) == kept + 5 or kept == 0, "steps are missing")
        check.that(not bench.check_losses(out), bench.check_losses(out))


@contextlib.contextmanager
def _small_disk(mount: Path, size: int) -> Iterator[None]:
    mount.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={size}"]
    subprocess.run(["mount", *options, "tmpfs", mount], check=True, capture_output=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", mount], check=True)
