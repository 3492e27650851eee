"""Writes docs/reference/wild.md and wild.json beside it: JAX models of others, compared.

    uv run python docs/write_wild.py --environment DIR            # all of it: an hour on 2 cores
    uv run python docs/write_wild.py --environment DIR --library equimo
    uv run python docs/write_wild.py --page                       # from wild.json alone
    uv run python docs/write_wild.py --check                      # fail where it is out of date

It makes environments of its own in DIR, which takes 12 GB, and installs public packages by name.
Lines that were measured before stay for the libraries that are not named.
"""

import argparse
import datetime
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
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
         "equimo==1.1.0"],
        ["esm2quinox", "equimo"],
    ),
}  # fmt: skip
NAMED = ("transformers", "esm2quinox", "equimo", "jax", "flax", "torch")


def main() -> int:
    """Measures what is asked for, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environment", type=Path, help="a folder outside the repository")
    parser.add_argument("--library", action="append", help="this one alone")
    parser.add_argument("--lines", type=Path, action="append", help="lines of benchmarks.wild.run")
    parser.add_argument("--page", action="store_true", help="write the page from what is known")
    parser.add_argument("--check", action="store_true", help="fail where the page is out of date")
    args = parser.parse_args()
    data = json.loads(DATA.read_text("utf-8")) if DATA.exists() else {"made": {}, "rows": []}
    if args.check:
        is_new = PAGE.exists() and PAGE.read_text("utf-8") == page(data)
        if not is_new:
            print("out of date: run python docs/write_wild.py --page", file=sys.stderr)
        return 0 if is_new else 1
    if not args.page:
        if args.environment is None or args.environment.resolve().is_relative_to(ROOT):
            parser.error("--environment must name a folder outside the repository")
        lines = [json.loads(x) for f in args.lines or () for x in f.read_text("utf-8").splitlines()]
        data = measure(args.environment.resolve(), args.library, data, lines)
        DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(data), encoding="utf-8")
    return 0


def measure(
    folder: Path, libraries: list[str] | None, data: dict, lines: Sequence[dict] = ()
) -> dict:
    """Returns what is known, with new rows of some libraries.

    Args:
        folder: of the environments.
        libraries: those that are measured; None for all.
        data: what was known.
        lines: rows that were measured already; their libraries are not measured again.
    """
    rows, versions = data["rows"], dict(data["made"].get("packages", {}))
    for name, (packages, own) in ENVIRONMENTS.items():
        wanted = [library for library in own if libraries is None or library in libraries]
        if not wanted:
            continue
        python = make_environment(folder / name, packages)
        versions[name] = versions_of(python)
        for library in wanted:
            found = [row for row in lines if row["library"] == library] or run(python, library)
            rows = [r for r in rows if r["library"] != library] + found
    text = "; ".join(", ".join(f"{n} {v}" for n, v in own.items()) for own in versions.values())
    made = {
        "date": datetime.date.today().isoformat(),
        "command": "python docs/write_wild.py --environment DIR",
        "versions": text,
        "packages": versions,
    }
    order = [library for _, own in ENVIRONMENTS.values() for library in own]
    rows.sort(key=lambda row: order.index(row["library"]))
    return {"made": made, "rows": rows}


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


def run(python: Path, library: str) -> list[dict]:
    """Returns the rows of a library, one a comparison; they are shown as they come."""
    command = [str(python), "-W", "ignore", "-m", "benchmarks.wild.run", library]
    rows = []
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                rows.append(json.loads(line))
                print(*(rows[-1][n] for n in ("family", "setting", "mode", "verdict")), flush=True)
    if process.returncode:
        raise SystemExit(f"{library}: ended with {process.returncode} after {len(rows)} rows")
    return rows


if __name__ == "__main__":
    sys.exit(main())
