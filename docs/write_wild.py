"""Writes docs/reference/wild.md and wild.json beside it: JAX models of others, compared.

    uv run python docs/write_wild.py --environment DIR            # all of it: an hour on 2 cores
    uv run python docs/write_wild.py --environment DIR --library equimo
    uv run python docs/write_wild.py --environment DIR --minutes 20    # as many rows as fit
    uv run python docs/write_wild.py --page                       # from wild.json alone
    uv run python docs/write_wild.py --check                      # fail where it is out of date

It makes environments of its own in DIR, which takes 12 GB, and installs public packages by name.
Each row is written as soon as it is measured, with the revision that measured it. A row that the
checked-out revision measured already is not measured again; those of older revisions stay until
they are.
"""

import argparse
import datetime
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.wild.page import page  # noqa: E402

PAGE = ROOT / "docs/reference/wild.md"
DATA = PAGE.with_suffix(".json")
COMMON = ["torch==2.13.0", "jax", "flax", "orbax-checkpoint", "sentencepiece", "timm"]
# The packages of each environment, and the libraries that are compared in it.
ENVIRONMENTS = {
    "flax": (["transformers==4.55.4"], ["transformers"]),
    "others": (
        ["esm2quinox==0.2.0", "fair-esm==2.0.0",
         "equimo==1.1.0", "transformers==5.23.0"],
        ["esm2quinox", "equimo"],
    ),
    "tunix": (["google-tunix==0.1.7", "transformers==5.12.1"], ["google-tunix"]),
}  # fmt: skip
KEY = ("library", "family", "setting", "mode")
NAMED = ("transformers", "esm2quinox", "equimo", "google-tunix", "jax", "flax", "torch")


def main() -> int:
    """Measures what is asked for, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environment", type=Path, help="a folder outside the repository")
    parser.add_argument("--library", action="append", help="this one alone")
    parser.add_argument("--lines", type=Path, action="append", help="lines of benchmarks.wild.run")
    parser.add_argument("--revision", help="of --lines; default the checked-out one")
    parser.add_argument("--minutes", type=float, help="stop after the row that ends then")
    parser.add_argument("--page", action="store_true", help="write the page from what is known")
    parser.add_argument("--check", action="store_true", help="fail where the page is out of date")
    args = parser.parse_args()
    data = json.loads(DATA.read_text("utf-8")) if DATA.exists() else {"made": {}, "rows": []}
    if args.check:
        is_new = PAGE.exists() and PAGE.read_text("utf-8") == page(data)
        if not is_new:
            print("out of date: run python docs/write_wild.py --page", file=sys.stderr)
        return 0 if is_new else 1
    if args.lines:
        revision = args.revision or revision_of(ROOT)
        for line in (x for f in args.lines for x in f.read_text("utf-8").splitlines()):
            put(data, json.loads(line), revision)
    elif not args.page:
        if args.environment is None or args.environment.resolve().is_relative_to(ROOT):
            parser.error("--environment must name a folder outside the repository")
        measure(args.environment.resolve(), args.library, data, args.minutes, write)
    write(data)
    PAGE.write_text(page(data), encoding="utf-8")
    return 0


def write(data: dict) -> None:
    """Writes what is known, in the order of the libraries."""
    order = [library for _, own in ENVIRONMENTS.values() for library in own]
    data["rows"].sort(key=lambda row: order.index(row["library"]))
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def put(data: dict, row: dict, revision: str) -> None:
    """Puts a row in the place of the one that was measured before, or after those of its family."""
    row["revision"] = revision
    row["date"] = datetime.date.today().isoformat()
    for place, old in enumerate(data["rows"]):
        if key(old) == key(row):
            data["rows"][place] = row
            return
    data["rows"].append(row)


def key(row: dict) -> tuple[str, ...]:
    """Returns what tells a row from others."""
    return tuple(row[name] for name in KEY)


def revision_of(folder: Path) -> str:
    """Returns the short name of the checked-out revision."""
    command = ["git", "-C", str(folder), "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def measure(
    folder: Path,
    libraries: list[str] | None,
    data: dict,
    minutes: float | None,
    save: Callable[[dict], None],
) -> None:
    """Measures rows that the checked-out revision has not measured, and writes each at once.

    Args:
        folder: of the environments.
        libraries: those that are measured; None for all.
        data: what is known; new rows are put into it.
        minutes: after how many to stop; None for never.
        save: called with what is known after each row.
    """
    revision, end = revision_of(ROOT), time.monotonic() + 60 * (minutes or 1e9)
    versions = dict(data["made"].get("packages", {}))
    for name, (packages, own) in ENVIRONMENTS.items():
        wanted = [library for library in own if libraries is None or library in libraries]
        if not wanted:
            continue
        python = make_environment(folder / name, packages)
        versions[name] = versions_of(python)
        described = (", ".join(f"{n} {v}" for n, v in one.items()) for one in versions.values())
        data["made"] = {
            "date": datetime.date.today().isoformat(),
            "command": "python docs/write_wild.py --environment DIR",
            "versions": "; ".join(described),
            "packages": versions,
        }
        done = folder / "done.jsonl"
        for library in wanted:
            own_rows = [row for row in data["rows"] if row["library"] == library]
            is_new = [row for row in own_rows if row.get("revision") == revision]
            done.write_text("".join(json.dumps(row) + "\n" for row in is_new), "utf-8")
            for row in run(python, library, done, end):
                put(data, row, revision)
                save(data)


def make_environment(folder: Path, packages: list[str]) -> Path:
    """Returns the Python of an environment with packages and this checkout."""
    found = shutil.which("uv")
    uv = [found] if found else [sys.executable, "-m", "uv"]
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([*uv, "venv", "-q", "--python", "3.11", str(folder)], check=True)
    install = [*uv, "pip", "install", "-q", "--python", str(python)]
    subprocess.run([*install, *COMMON, *packages, "-e", str(ROOT)], check=True)
    return python


def versions_of(python: Path) -> dict:
    """Returns the versions of the packages that the page names."""
    code = (
        "import importlib.metadata as m, json\n"
        f"have = {{d.name for d in m.distributions()}} & set({NAMED!r})\n"
        f"print(json.dumps({{n: m.version(n) for n in {NAMED!r} if n in have}}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def run(python: Path, library: str, done: Path, end: float) -> Iterator[dict]:
    """Yields the rows of a library as they come, but for those that are done.

    Args:
        python: of the environment.
        library: its name.
        done: a file of rows that are not measured again.
        end: the time, of ``time.monotonic``, after which no row is waited for.
    """
    command = [str(python), "-W", "ignore", "-m", "benchmarks.wild.run", library]
    count = 0
    with subprocess.Popen(
        [*command, "--done", str(done)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                count += 1
                row = json.loads(line)
                print(*(row[n] for n in ("family", "setting", "mode", "verdict")), flush=True)
                yield row
            if time.monotonic() > end:
                process.terminate()
                return
    if process.returncode:
        raise SystemExit(f"{library}: ended with {process.returncode} after {count} rows")


if __name__ == "__main__":
    sys.exit(main())
