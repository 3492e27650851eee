"""Writes the results of the cases into docs/reference/parity.md, and a summary into identical.md.

    python -m parity_tests.table            writes both
    python -m parity_tests.table --check    fails where a row is missing or a figure no longer holds

Figures that tests have saved before (see FIGURES) are not measured again. With --check, a figure
that the tests of a case have not measured stays as it is stated: its test is in the slow tier.

Errors are relative to the largest element of what is compared. The last digits of rounding differ
between machines and compilations. So a figure holds while a new measurement is at most ten times
as large and not below a hundredth: where a case is badly conditioned, its float64 figure, the
largest of few last digits, is sometimes ten times smaller.
"""

import argparse
import json
import math
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import conftest  # sets JAX up before it is imported

ROOT = Path(__file__).parent.parent
# Names the folder in which the tests of the cases save what they measure, if any.
FIGURES = "JAXFORMER_FIGURES"
# What a case measures: the errors of its row.
NAMES = ("float64", "jax", "torch")
HEADER = (
    "| component | cases | proven | float64, JAX against torch | float32, JAX | float32, torch |\n"
    "|---|---|---|---|---|---|\n"
)


@dataclass(frozen=True)
class Row:
    """A line of the table.

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
    """Returns an error as text, with one digit."""
    return "0" if error == 0 else f"{error:.0e}".replace("e-0", "e-")


def float64_figures(pair: Any, std: float) -> dict[str, float]:
    """Returns the largest float64 error of a pair, after ``judge_float64`` has accepted it."""
    from parity_tests.verdict import judge_float64

    return {"float64": max(judge_float64(pair.jax(std), pair.torch(std)).values())}


def rounding_figures(pair: Any, std: float, dtype: np.dtype) -> dict[str, float]:
    """Returns the largest error of each side against float64, after it was judged."""
    from parity_tests.harness import judge_case_rounding

    found = judge_case_rounding(pair, std, dtype).values()
    return {"jax": max(r.candidate for r in found), "torch": max(r.reference for r in found)}


def save_figures(case: Any, figures: dict[str, float]) -> None:
    """Saves what a test has measured, if the environment names a folder for it."""
    if folder := os.environ.get(FIGURES):
        with Path(folder, f"{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"case": case.name, **figures}) + "\n")


def saved_figures() -> dict[str, dict[str, float]]:
    """Returns the largest of each figure that tests have saved, by case; empty without a folder."""
    found: dict[str, dict[str, float]] = {}
    for path in Path(os.environ[FIGURES]).glob("*.jsonl") if FIGURES in os.environ else ():
        for line in path.read_text(encoding="utf-8").splitlines():
            figures = json.loads(line)
            known = found.setdefault(figures.pop("case"), {})
            for name, value in figures.items():
                known[name] = max(value, known.get(name, 0.0))
    return found


def measure(stated: dict[str, Row]) -> list[Row]:
    """Returns a row for every case; figures that tests have saved are not measured again.

    Args:
        stated: rows whose figures stand where the tests of a case have saved only others.
    """
    import jax
    import torch

    from parity_tests.cases import CASES
    from parity_tests.harness import DTYPES, Pair

    torch.set_num_threads(1)
    known, rows = saved_figures(), []
    with jax.enable_x64(True):
        for case in CASES:
            figures = known.get(case.name, {})
            if figures and case.name in stated:
                figures = dict(zip(NAMES, stated[case.name].errors, strict=True)) | figures
            if figures.keys() != set(NAMES):
                pair = Pair(case)
                for std in case.stds():
                    again = float64_figures(pair, std)
                    again |= rounding_figures(pair, std, DTYPES["float32"])
                    figures = {n: max(v, figures.get(n, 0.0)) for n, v in again.items()}
            proven = ["output", "gradients", "eager", "float32", "bfloat16"]
            proven[2:2] = ["weights"] * case.weights + ["dropout"] * case.dropout
            errors = (figures["float64"], figures["jax"], figures["torch"])
            rows.append(Row(case.name, 1, ", ".join(proven), errors))
            print(rows[-1], flush=True)
    return rows


def summary(rows: list[Row]) -> list[Row]:
    """Returns a row for every component: the worst of its cases."""
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
    """Returns the rows of a table in a file, by name."""
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and re.fullmatch(r"\d+", cells[1]):
            name, count, proven, *errors = cells
            rows[name] = Row(name, int(count), proven, tuple(map(float, errors)))  # type: ignore[arg-type]
    return rows


def holds(stated: Row | None, measured: Row) -> bool:
    """Returns whether a stated row has the measured proofs, and figures of the measured size."""
    if stated is None or (stated.count, stated.proven) != (measured.count, measured.proven):
        return False

    def size(error: float) -> float:
        return math.log10(max(error, 1e-17))

    pairs = zip(stated.errors, measured.errors, strict=True)
    return all(-2 <= size(again) - size(said) <= 1 for said, again in pairs)


def main() -> int:
    """Writes the tables, or checks them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    conftest.compile_quickly(False)
    page = ROOT / "docs/reference/parity.md"
    rows = measure(parse(page.read_text(encoding="utf-8")) if arguments.check else {})
    targets = {
        page: rows,
        ROOT / "docs/explanation/identical.md": summary(rows),
    }
    stale = []
    for path, new in targets.items():
        text = path.read_text(encoding="utf-8")
        if arguments.check:
            stated = parse(text)
            stale += [f"{path.name}: {row}" for row in new if not holds(stated.get(row.name), row)]
            stale += [
                f"{path.name}: there is no case {n}" for n in stated.keys() - {r.name for r in new}
            ]
            continue
        table = HEADER + "".join(f"{row}\n" for row in new)
        begin, end = "<!-- parity table -->\n", "<!-- end of parity table -->"
        head, _, rest = text.partition(begin)
        path.write_text(head + begin + table + end + rest.partition(end)[2], encoding="utf-8")
    for line in stale:
        print(f"no longer holds: {line}", file=sys.stderr)
    if stale:
        print("update it with: python -m parity_tests.table", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
