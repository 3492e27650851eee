"""``python -m tests.faults``: injects every kind of fault, prints a table and writes JSON."""

import argparse
import datetime
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RESULT = ROOT / "benchmarks" / "results" / "faults.json"
# Before JAX is imported: some faults need several devices, and none an accelerator.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()

from tests.faults import (  # noqa: E402
    commands,
    damage,
    disk,
    folders,
    hostile,
    kills,
    numbers,
    together,
)
from tests.faults.tally import Tally  # noqa: E402
from tests.faults.workbench import Workbench  # noqa: E402

# By name: what injects it, and how many the complete suite injects.
FAULTS: dict[str, tuple[Callable[[Workbench, Tally, int], None], int]] = {
    "kill -9, one process": (kills.kills, 60),
    "kill -9, two processes": (together.both_killed, 50),
    "kill -9, one of two processes": (together.one_killed, 10),
    "SIGTERM and SIGINT": (kills.signals, 40),
    "SIGTERM and SIGINT, two processes": (together.signalled, 8),
    "flipped bits": (damage.flips, 240),
    "truncated files": (damage.truncations, 120),
    "missing files": (damage.losses_of_files, 60),
    "full disk": (disk.full_disk, 20),
    "two runs in one folder": (folders.two_runs, 24),
    "clock set back": (folders.clock, 5),
    "stray folders": (folders.stray_folders, 24),
    "another number of devices": (folders.devices, 10),
    "numbers that are not finite": (numbers.wild_numbers, 20),
    "metrics services": (numbers.services, 20),
    "damaged metrics.jsonl": (numbers.damaged_metrics, 60),
    "hostile settings": (hostile.hostile_settings, 1000),
    "malicious files": (commands.malicious_files, 1000),
    "commands that fail": (commands.failed_commands, 1000),
}
COLUMNS = {
    "fault": "fault",
    "injected": "injected",
    "held": "detected or survived",
    "durable_lost": "durable steps lost",
    "unreadable": "unreadable checkpoints",
    "made_again": "most steps made again",
    "files_changed": "files changed",
    "seconds": "s",
}


def run(name: str, bench: Workbench, count: int | None = None) -> Tally:
    """Injects faults of one kind.

    Args:
        name: of ``FAULTS``.
        bench: where.
        count: how many, in place of its own number.
    """
    inject, complete = FAULTS[name]
    tally = Tally(name)
    with tally.timed():
        inject(bench, tally, complete if count is None else min(count, complete))
    return tally


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--count", type=int, help="how many of each, at most")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    parser.add_argument("--folder", type=Path, help="to work in, and to keep: continues there")
    parser.add_argument("--out", type=Path, help=f"default {RESULT.relative_to(ROOT)} if complete")
    parser.add_argument("--jobs", type=int, default=2, help="at once, default %(default)s")
    arguments = parser.parse_args()
    complete = arguments.count is None and set(arguments.only) == set(FAULTS)
    out = arguments.out or (RESULT if complete else None)
    with tempfile.TemporaryDirectory(prefix="faults-") as temporary:
        folder = (arguments.folder or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if len(arguments.only) == 1:
            import jax

            jax.config.update("jax_default_matmul_precision", "highest")
            os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
            tallies = [run(*arguments.only, Workbench(folder, arguments.seed), arguments.count)]
            _tell(tallies[0])
        else:
            with ThreadPoolExecutor(arguments.jobs) as pool:
                tallies = list(
                    pool.map(functools.partial(_apart, folder, arguments), arguments.only)
                )
    if out is not None:
        out.write_text(json.dumps(_result(tallies, arguments), indent=1) + "\n", encoding="utf-8")
    _print(tallies)
    return 1 if any(tally.failures for tally in tallies) else 0


def _apart(folder: Path, arguments: argparse.Namespace, name: str) -> Tally:
    """One kind of fault in a process of its own; what a suite cut short has done is taken over."""
    place = folder / re.sub(r"\W+", "-", name)
    result = folder / f"{place.name}.json"
    if result.exists():
        (row,) = json.loads(result.read_text(encoding="utf-8"))["results"]
        return Tally(**row)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    count = [] if arguments.count is None else ["--count", str(arguments.count)]
    command = ["--only", name, "--seed", str(arguments.seed), *count]
    program = [sys.executable, "-m", "tests.faults", *command]
    subprocess.run(
        [*program, "--folder", str(place / "work"), "--out", str(result)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        check=False,
    )
    if not result.exists():
        return Tally(name, failures=["the suite itself broke off"])
    (row,) = json.loads(result.read_text(encoding="utf-8"))["results"]
    return Tally(**row)


def _tell(tally: Tally) -> None:
    summary = tally.skipped or f"{tally.held} of {tally.injected} held, {tally.seconds} s"
    print(f"{tally.fault}: {summary}", file=sys.stderr, flush=True)
    for failure in tally.failures[:20]:
        print(f"  {failure}", file=sys.stderr, flush=True)


def _result(tallies: Sequence[Tally], arguments: argparse.Namespace) -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import measure

    facts = measure.facts()
    only = [] if set(arguments.only) == set(FAULTS) else ["--only", *arguments.only]
    count = [] if arguments.count is None else ["--count", str(arguments.count)]
    flags = [*only, *count, "--seed", str(arguments.seed), "--jobs", str(arguments.jobs)]
    command = shlex.join(["python", "-m", "tests.faults", *flags])
    return {
        "benchmark": "faults",
        **facts,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "settings": {"seed": arguments.seed, "count": arguments.count},
        "results": [tally.row() for tally in tallies],
    }


def _print(tallies: Sequence[Tally]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for heading in COLUMNS.values():
        table.add_column(heading, justify="left" if heading == "fault" else "right")
    for tally in tallies:
        row = [str(getattr(tally, name)) for name in COLUMNS]
        table.add_row(*(row if not tally.skipped else [tally.fault, f"skipped: {tally.skipped}"]))
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
