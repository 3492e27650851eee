"""Writes what the fault suite and the soak measured into docs/explanation/faults.md.

    python -m tests.faults.table            writes it
    python -m tests.faults.table --check    fails where it does not say what the results do

What lies between ``<!-- faults: NAME -->`` and ``<!-- end of NAME -->`` is written here.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TARGETS = (ROOT / "docs" / "explanation" / "faults.md",)
Result = dict[str, Any]


def load() -> dict[str, Result]:
    """The results that there are, by the name of their benchmark."""
    found = {}
    for name in ("faults", "soak"):
        path = RESULTS / f"{name}.json"
        if path.exists():
            found[name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def suite(results: dict[str, Result]) -> str:
    """Every kind of fault, a line each."""
    if "faults" not in results:
        return "Not measured yet."
    result = results["faults"]
    lines = [
        _where(result, "../../benchmarks/results"),
        "",
        "| fault | injected | detected or survived | durable steps lost | unreadable checkpoints | "
        "most steps made again | files changed by failed commands | seconds |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["results"]:
        if row["skipped"]:
            lines.append(f"| {row['fault']} | skipped: {row['skipped']} |" + " |" * 6)
            continue
        figures = (
            "injected", "held", "durable_lost", "unreadable", "made_again", "files_changed",
        )  # fmt: skip
        shown = [row["fault"], *(f"{row[name]:,}" for name in figures), f"{row['seconds']:.0f}"]
        lines.append(f"| {' | '.join(shown)} |")
    return "\n".join(lines)


def soak(results: dict[str, Result]) -> str:
    """The long run, in a paragraph."""
    if "soak" not in results:
        return "Not measured yet."
    result = results["soak"]
    (found,) = result["results"]
    lost = max(k["killed_at"] - k["goes_on_from"] for k in found["kills"])
    memory = f"{100 * found['memory_growth']:+.2f} %"
    return "\n".join(
        [
            _where(result, "../../benchmarks/results"),
            "",
            f"{found['steps']:,} steps with {found['evaluations']} evaluations and a checkpoint "
            f"every hundred steps, killed {len(found['kills'])} times: "
            f"{_yes(found['same_losses'])} losses and {_yes(found['same_state'])} final state as "
            f"the run that was left alone; at most {lost} steps were made again after a kill. Over "
            f"the second half of the other run memory changed by {memory} of "
            f"{found['memory_mean'] / 2**20:.0f} MiB; {found['files_second_half']:.0f} files were "
            f"open, {found['files_first_half']:.0f} in the first ({found['files_most']} at most).",
        ]
    )


def summary(results: dict[str, Result]) -> str:
    """What is promised, with the counts."""
    if "faults" not in results:
        return "Not measured yet."
    rows = {row["fault"]: row for row in results["faults"]["results"] if not row["skipped"]}

    def line(promise: str, *names: str, **figures: str) -> str:
        there = [rows[name] for name in names if name in rows]
        injected, held = (sum(row[key] for row in there) for key in ("injected", "held"))
        more = "".join(
            f", {sum(row[key] for row in there)} {summary}" for key, summary in figures.items()
        )
        return f"| {promise} | {held:,} of {injected:,}{more} |"

    kills = [name for name in rows if name.startswith("kill -9") or "killed" in name]
    lines = [
        "| promised | held |",
        "|---|---|",
        line(
            "kill -9 at any moment: the last durable step is resumed, to the bit", *kills,
            durable_lost="durable steps lost", unreadable="unreadable checkpoints",
        ),
        line("SIGTERM, SIGINT: saved, and the message says how to resume", "SIGTERM and SIGINT"),
        line(
            "a damaged checkpoint is found, put aside, and the one before it used",
            "flipped bits", "truncated files", "missing files",
        ),
        line("a full disk costs nothing that was saved", "full disk"),
        line(
            "hostile files are rejected, and none of their code is run", "malicious files",
        ),
        line("settings that cannot work are rejected before anything is made", "hostile settings"),
        line(
            "a command that fails changes nothing", "commands that fail",
            files_changed="files changed",
        ),
        line(
            "numbers that are not finite are found before the update, and never saved",
            "numbers that are not finite",
        ),
    ]  # fmt: skip
    if "soak" in results:
        (found,) = results["soak"]["results"]
        lines.append(
            f"| a run that is cut is the run that is not | {found['steps']:,} steps, "
            f"{len(found['kills'])} kills: {_yes(found['same_losses'])} losses, "
            f"{_yes(found['same_state'])} final state |"
        )
    return "\n".join(lines)


def _where(result: Result, folder: str) -> str:
    machine, versions = result["machine"], result["versions"]
    return (
        f"`{result['command']}`, {result['date'][:10]}: {machine['cpu']}, {machine['cores']} "
        f"cores; python {versions['python']}, jax {versions['jax']} "
        f"([result]({folder}/{result['benchmark']}.json))."
    )


def _yes(same: bool) -> str:
    return "the same" if same else "NOT the same"


BLOCKS: dict[str, Callable[[dict[str, Result]], str]] = {
    "suite": suite,
    "soak": soak,
    "summary": summary,
}


def render(text: str, results: dict[str, Result]) -> str:
    """The text of a document with its blocks written anew.

    Raises:
        SystemExit: a block is not closed, or has a name that is not known.
    """

    def block(match: re.Match[str]) -> str:
        if match[1] not in BLOCKS:
            sys.exit(f"there is no block {match[1]!r}: choose among {', '.join(BLOCKS)}")
        return (
            f"<!-- faults: {match[1]} -->\n{BLOCKS[match[1]](results)}\n<!-- end of {match[1]} -->"
        )

    pattern = r"<!-- faults: ([^>]*?) -->\n.*?<!-- end of \1 -->"
    written, count = re.subn(pattern, block, text, flags=re.DOTALL)
    if count != text.count("<!-- faults: "):
        sys.exit("a block is not closed")
    return written


def main() -> int:
    """Writes the documents, or checks them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    results, stale = load(), []
    for path in TARGETS:
        text = path.read_text(encoding="utf-8")
        written = render(text, results)
        if written != text and arguments.check:
            stale.append(path.name)
        elif written != text:
            path.write_text(written, encoding="utf-8")
    if stale:
        print(f"{', '.join(stale)}: write anew with python -m tests.faults.table", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
