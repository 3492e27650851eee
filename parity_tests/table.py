"""Writes what the cases prove and measure: docs/parity.md, and a summary in the README.

    python -m parity_tests.table            writes both
    python -m parity_tests.table --check    fails where a row is missing or a figure no longer holds

Errors are relative to the largest element of what is compared. A figure holds while it is within a
factor of ten of what is measured again: the last digits of rounding differ between machines.
"""

import argparse
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import conftest  # sets JAX up before it is imported

ROOT = Path(__file__).parent.parent
HEADER = (
    "| component | cases | proven | float64, JAX against torch | float32, JAX | float32, torch |\n"
    "|---|---|---|---|---|---|\n"
)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        name: of the case or component.
        count: how many cases it sums up.
        proven: which proofs run.
        errors: float64 (largest), float32 of JAX and of torch (root mean square).
    """

    name: str
    count: int
    proven: str
    errors: tuple[float, float, float]

    def __str__(self) -> str:
        figures = " | ".join(figure(error) for error in self.errors)
        return f"| {self.name} | {self.count} | {self.proven} | {figures} |"


def figure(error: float) -> str:
    """An error with one digit."""
    return "0" if error == 0 else f"{error:.0e}".replace("e-0", "e-")


def measure() -> list[Row]:
    """A row for every case."""
    import jax
    import torch

    from parity_tests.cases import CASES
    from parity_tests.harness import DTYPES, Pair, judge_case_rounding
    from parity_tests.verdict import judge_float64

    torch.set_num_threads(1)
    rows = []
    with jax.enable_x64(True):
        for case in CASES:
            pair = Pair(case)
            exact, ours, theirs = 0.0, 0.0, 0.0
            for std in case.stds():
                errors = judge_float64(pair.jax(std), pair.torch(std))
                exact = max(exact, *errors.values())
                dtype = DTYPES["float32"]
                for rounding in judge_case_rounding(pair, std, dtype).values():
                    ours, theirs = max(ours, rounding.ours), max(theirs, rounding.theirs)
            proven = ["output", "gradients", "eager", "float32", "bfloat16"]
            proven[2:2] = ["weights"] * case.weights + ["dropout"] * case.dropout
            rows.append(Row(case.name, 1, ", ".join(proven), (exact, ours, theirs)))
            print(rows[-1], flush=True)
    return rows


def summary(rows: list[Row]) -> list[Row]:
    """A row for every component: the worst of its cases."""
    components: dict[str, list[Row]] = {}
    for row in rows:
        components.setdefault(row.name.partition("/")[0], []).append(row)
    result = []
    for name, members in components.items():
        proofs = dict.fromkeys(p for row in members for p in row.proven.split(", "))
        order = ["output", "gradients", "weights", "dropout", "eager", "float32", "bfloat16"]
        worst = tuple(max(row.errors[i] for row in members) for i in range(3))
        proven = ", ".join(p for p in order if p in proofs)
        result.append(Row(name, len(members), proven, worst))  # type: ignore[arg-type]
    return result


def parse(text: str) -> dict[str, Row]:
    """The rows of a table in a file, by name."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and re.fullmatch(r"\d+", cells[1]):
            name, count, proven, *errors = cells
            rows[name] = Row(name, int(count), proven, tuple(map(float, errors)))  # type: ignore[arg-type]
    return rows


def holds(stated: Row | None, measured: Row) -> bool:
    """Whether a stated row says the same proofs and figures of the measured size."""
    if stated is None or (stated.count, stated.proven) != (measured.count, measured.proven):
        return False

    def size(error: float) -> float:
        return math.log10(max(error, 1e-17))

    pairs = zip(stated.errors, measured.errors, strict=True)
    return all(abs(size(a) - size(b)) <= 1 for a, b in pairs)


def main() -> int:
    """Writes the tables, or checks them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    # Figures that are published are those of optimised programs.
    conftest.compile_quickly(arguments.check)
    rows = measure()
    targets = {ROOT / "docs/parity.md": rows, ROOT / "README.md": summary(rows)}
    stale = []
    for path, new in targets.items():
        text = path.read_text(encoding="utf-8")
        if arguments.check:
            stated = parse(text)
            stale += [f"{path.name}: {row}" for row in new if not holds(stated.get(row.name), row)]
            stale += [f"{path.name}: {n} is gone" for n in stated.keys() - {r.name for r in new}]
            continue
        table = HEADER + "".join(f"{row}\n" for row in new)
        begin, end = "<!-- parity table -->\n", "<!-- end of parity table -->"
        head, _, rest = text.partition(begin)
        path.write_text(head + begin + table + end + rest.partition(end)[2], encoding="utf-8")
    for line in stale:
        print(f"no longer holds: {line}", file=sys.stderr)
    if stale:
        print("write it anew with: python -m parity_tests.table", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
